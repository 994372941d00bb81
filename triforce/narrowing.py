"""Rows of a batch end one after the other: for how many of them a GPU's steps still do their work.

What a row has for itself is read up to a length that the device knows, and of a row that has ended that is one key. But
the keys of those that go on are split as those of all rows were, so about half of the time of the others is not saved.
What all rows share is read once for all, and computed for TILE queries of a KV head at a time: one tile takes the time
of one row, and each tile beyond it takes its time whether or not its rows have ended. All else takes a step of one or
two rows a little less than one of many.

So steps of fewer rows are faster, and have to be recorded. They have a power of 2 of rows: so there are few of them.
Where that takes the device no time, they are recorded before rows end.

Where bits are promised, those of a row must not depend on which others go on. Products of fewer rows have other bits.
Attention over what all rows share has not, if the keys are split alike: so a step computes all rows, and fewer tiles of
queries attend to what is shared. To split keys alike takes a little time in all steps, so it has to be worth it.
"""

import statistics
import time

import torch

from .attention import LONG, TILE, filled_up, over_shared, pays_to_plan
from .costs import PREPARING
from .model import ModelConfig
from .plan import Plan
from .speculator import Speculator

RATE = 5e11  # multiplications and additions in a millisecond, 2 a pair: what an H200 reaches in attention
BANDWIDTH = 4e9  # bytes that it reads in a millisecond
PLAN = 60.0  # milliseconds that cuDNN's kernel takes to be planned for another number of rows, filled up
# Milliseconds that each of the first FEW rows takes in a layer, besides attention to what is long; those beyond it take
# next to nothing. And what it takes in a layer that the rows do not lie side by side.
ROW, FEW, APART = 0.009, 4, 0.006
# Where the keys that rows share are split alike for any number of rows: what that takes in a layer for each tile, and
# what it takes that fewer rows attend. Of so many tiles at most, for the memory that it takes.
MERGED, SPREAD, TILES = 0.009, 0.03, 8


def widths(going: int, batch: int) -> list[int]:
    """Numbers of rows that a step may have which computes those that go on, but fewer than all of a batch."""
    least = 1 << (going - 1).bit_length()
    return [least << i for i in range(batch.bit_length()) if least << i < batch]


def shared_ms(config: ModelConfig, length: int, queries: int) -> float:
    """What a step computes over `length` tokens that its rows share, in all layers. queries: of a KV head, of all of
    its rows."""
    pairs = -(-queries // TILE) * TILE * length * config.n_kv_head * config.n_layer
    return 4 * config.head_dim * pairs / RATE


def own_ms(config: ModelConfig, tokens: float, itemsize: int) -> float:
    """What a step reads of so many tokens that rows have for themselves, in all layers."""
    return 2 * tokens * config.n_kv_head * config.head_dim * config.n_layer * itemsize / BANDWIDTH


def saved_ms(config: ModelConfig, before: int, after: int, block: int, *, shared: int, own: float,
             itemsize: int) -> float:
    """How much less a step of fewer rows takes.

    Args:
        before, after: its rows. block: tokens of each.
        shared: tokens that rows share. own: that each of them has for itself, on average.
    """
    queries = block * config.query_group
    return (shared_ms(config, shared, before * queries) - shared_ms(config, shared, after * queries)
            + own_ms(config, (before - after) * own, itemsize) / 2
            + ((min(before, FEW) - min(after, FEW)) * ROW - APART) * config.n_layer)


def is_planned(config: ModelConfig, length: int, before: int, after: int, block: int) -> bool:
    """Whether a step of fewer rows, of so many tokens each, has cuDNN's kernel planned that serves it over what they
    share."""
    queries = block * config.query_group
    filled = [filled_up(rows * queries) for rows in (before, after)]
    return length > 0 and filled[0] != filled[1] and pays_to_plan(config.n_kv_head, after * queries, length, False)


def pays_to_split_alike(config: ModelConfig, length: int, rows: int, block: int) -> bool:
    """Whether the keys that rows share are to be split alike for any number of rows, where bits are promised: that
    takes little of what a tile takes. rows: of the batch. block: tokens of each."""
    tiles = -(-rows * block * config.query_group // TILE)
    is_long = length >= LONG and shared_ms(config, length, 1) > 3 * MERGED * config.n_layer
    return rows > 1 and 1 < tiles <= TILES and is_long


def pays(saved: float, rounds: float, n_layer: int, is_planned: bool) -> bool:
    """Whether a step that takes so many milliseconds less is worth recording. rounds: that are expected to follow."""
    return saved * rounds > 2 * PREPARING * n_layer + PLAN * is_planned  # it is run once, and then recorded


class Narrower:
    """Chooses for how many rows the steps of the full level do their work, and records such steps.

    Args:
        outer: that level.
        base: tokens that all rows share.
    """

    def __init__(self, outer: Speculator, base: int):
        self.outer, self.base = outer, base
        self.batch, self.config = len(outer.length), outer.model.config
        self.promises_bits = False
        self._tried: dict[tuple[int, int], bool] = {}

    def begin(self, promises_bits: bool) -> None:
        """A text begins, with all rows."""
        self.promises_bits = promises_bits
        if promises_bits and pays_to_split_alike(self.config, self.base, self.batch, self.outer.tree.rows):
            self.outer.attend_for(None)

    def narrow(self, plan: Plan, going: list[int], rounds: float) -> bool:
        """From the next verify on, steps do their work for the rows that go on, and perhaps for others: as it pays.

        Args:
            rounds: that are expected to follow.

        Returns:
            whether these are fewer than all.
        """
        if self.promises_bits and self.outer.num_attending is None:
            return False
        width = self._choose(plan, len(going), rounds)
        work_for = self.outer.attend_for if self.promises_bits else self.outer.compute_for
        work_for(going if width < self.batch else None, width)
        return width < self.batch

    def _choose(self, plan: Plan, going: int, rounds: float) -> int:
        known = next((width for width in widths(going, self.batch) if self.outer.has_recorded(plan, width)
                      and self._saved(self.batch, width, plan) > 0 and self._keeps_bits(width, plan)), self.batch)
        best = sorted(widths(going, known), key=lambda width: (self._saved(known, width, plan), width), reverse=True)
        return next((width for width in best
                     if pays(self._saved(known, width, plan), rounds, self.config.n_layer,
                             self._is_planned(known, width, plan)) and self._keeps_bits(width, plan)), known)

    def record(self, plan: Plan, until: float) -> int:
        """Records steps of fewer rows than are computed, or parts of them, as long as there is time. Steps for which a
        kernel is planned are left out: that takes long, and is no part.

        Args:
            until: by time.perf_counter().

        Returns:
            how many parts were recorded.
        """
        computed, parts = self.outer.num_computed or self.batch, 0
        for width in reversed(widths(1, computed)):
            if self._saved(computed, width, plan) > 0 and not self._is_planned(computed, width, plan):
                while time.perf_counter() < until and not self.outer.has_recorded(plan, width):
                    self.outer.record_narrower(plan, width, until)
                    parts += 1
        return parts

    def _saved(self, before: int, after: int, plan: Plan) -> float:
        """Milliseconds that a verify of fewer rows takes less."""
        if self.promises_bits:
            tiles = [shared_ms(self.config, self.base, rows * self._block(plan) * self.config.query_group)
                     for rows in (before, after)]
            return tiles[0] - tiles[1] - (SPREAD if before == self.batch else 0) * self.config.n_layer
        own = statistics.fmean(self.outer.cache.prefix.own_lens)
        return saved_ms(self.config, before, after, self._block(plan), shared=self.base, own=own,
                        itemsize=self.outer.model.dtype.itemsize)

    def _is_planned(self, before: int, after: int, plan: Plan) -> bool:
        """Whether a kernel is planned before such a step can be recorded: for the step, or to try its bits."""
        return self.promises_bits or is_planned(self.config, self.base, before, after, self._block(plan))

    def _keeps_bits(self, width: int, plan: Plan) -> bool:
        """Whether rows get the same bits where so many attend to what all share as where all do, if that is promised.
        It is tried with keys of the first layer, since no kernel promises it. All ranks have to find it."""
        if not self.promises_bits:
            return True
        block, view, group = self._block(plan), self.outer.cache.prefix, self.outer.model.group
        if (width, block) not in self._tried:
            k, v = view.before(0)
            shape = self.batch, k.shape[1], block * self.config.query_group, k.shape[3]
            q = torch.randn(shape, generator=torch.Generator(k.device).manual_seed(0), device=k.device).to(k.dtype)
            some = torch.arange(self.batch, device=k.device).flip(0)[:: self.batch // width][:width]
            of_all, of_some = (over_shared(q, k, v, lambda *parts: parts, even=True, of=of) for of in (None, some))
            place = int(of_all[0].ndim > q.ndim)  # of rows: behind the parts, if there are some
            same = all(torch.equal(x.index_select(place, some), y.index_select(place, some))
                       for x, y in zip(of_all, of_some, strict=True))
            found = {"same"} if same else set()
            self._tried[width, block] = bool(found if group is None else group.common(found))
        return self._tried[width, block]

    def _block(self, plan: Plan) -> int:
        """Tokens of a row in the verify."""
        return self.outer.tree.cut(self.outer.rows_of(plan) or self.outer.rows).rows
