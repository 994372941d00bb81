"""Asks the controller for each round's plan, tells it what rounds brought, and says when to choose a view anew.

The controller is told of kept tokens, first rejections, and times that do not depend on discarded tokens. So its
decisions cannot bias the output.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from ..cache.views import COMMON
from ..config import Settings
from ..parallel import agreed
from .controller import Controller, Costs, Rate
from .drafters.ngram import NgramMeter
from .plan import BRANCH, LENGTHS, PADDED, DraftPlan, Padding
from .tape import ACCEPTED, LEAF, MISSED
from .verifier import RowRound

if TYPE_CHECKING:
    from .hierarchy import Hierarchy, Round
    from .verifier import Verifier

ROW = 0.08  # on a CPU each further row of a step adds about this share of the first; on a GPU next to nothing
LAYER_ON_CPU, LAYER_ON_GPU = 0.3, 0.1  # milliseconds of a layer, whatever it reads: it is made of many operations
# Milliseconds of an H100's host for a layer of a step that runs for the first time, or is recorded.
PREPARING = 1.7
SAME_LENGTH = 4096  # tokens: texts whose lengths lie in one such stretch share what was learned


class Pilot:
    """See the module.

    Args:
        shelf: what earlier texts showed, by their circumstances. A text begins with it, and adds to it.
        rebuild_interval: tokens between two choices of a row's view. common_interval: of the one that rows share.
        meter: gives the meter of what all rows share. None: it is made here.
    """

    def __init__(self, hierarchy: "Hierarchy", settings: Settings, *,
                 shelf: dict[tuple, tuple[Costs, dict[str, Rate]]], rebuild_interval: int, common_interval: int,
                 meter: Callable[[], NgramMeter] | None = None):
        self.hierarchy, self.shelf = hierarchy, shelf
        self.auto = settings.auto and bool(hierarchy.drafters)
        self.default = default_plan(settings, hierarchy)  # what rounds follow where nothing is chosen
        self.padding = PADDED
        self.controller: Controller | None = None
        self.meters: list[NgramMeter | None] = []  # of each row that is not finished, where n-grams are to choose
        self.rebuild_interval, self.common_interval = rebuild_interval, common_interval
        # Tokens since a view was chosen, by row, and of COMMON where rows share one; none without views.
        self.since: dict[int, float] = {}
        self._shared_meter = meter
        self._begins = self.auto  # no round has been chosen yet
        # Tokens of a row: those that this text may still have, and those that texts have had. Later texts are expected
        # to be as long as earlier ones, so recording a step may pay although each text is short.
        self._remaining, self._emitted = 0.0, 0.0
        self._next: DraftPlan | None = None  # of the round to come, if that is known
        self._on_cpu = hierarchy.outer.length.device.type == "cpu"
        self._unseen: Round | None = None  # a chosen round that has not been learned from

    def open(self, plan: DraftPlan | None, padding: Padding, lengths: list[int], max_new_tokens: int,
             texts: Callable[[int], list[list[int]]]) -> None:
        """Decoding begins.

        Args:
            plan: what all rounds follow; None: chosen, or what the settings say.
            padding: of the steps of plans that are not given.
            lengths: settled tokens of each row. max_new_tokens: of a row, at most.
            texts: gives each row's tokens from a position on, the pending one among them.
        """
        self.fixed, self.padding, self._next, self._unseen = plan, padding, None, None
        self._remaining = max_new_tokens + self._emitted
        self.controller, self.meters = None, []
        has_views, base = self.hierarchy.view is not None, self.hierarchy.cache.prefix.base
        self.since = dict.fromkeys((*range(len(lengths)), *[COMMON] * (base > 0)) if has_views else (), 0.0)
        if plan is None and self.auto:
            self.controller = self._controller(lengths)
        if self.controller is not None and "ngram" in self.hierarchy.sources:
            # The tokens that all rows share are gone through once.
            meter = self._shared_meter or (lambda: NgramMeter(texts(0)[0][:base]))
            self.meters = [meter().fork(text) for text in texts(base)] if base else list(map(NgramMeter, texts(0)))

    def _controller(self, lengths: list[int]) -> Controller:
        """The controller of one text. It goes on where the last text under such circumstances ended."""
        outer, inner, view, prefix = (self.hierarchy.outer, self.hierarchy.inner, self.hierarchy.view,
                                      self.hierarchy.cache.prefix)
        guessed = guess(self.hierarchy, self.padding, lengths)
        longest, shortest = (-(-length // SAME_LENGTH) for length in (max(lengths), min(lengths)))
        name = (*self.padding, longest, shortest, len(lengths), prefix.base > 0, view and view.budget,
                self.hierarchy.compiler.settings, *guessed.number)
        # A guess, too: a rank without the draft does not know what it reads.
        costs, rates = agreed(self.hierarchy.group, self.shelf.get(name, (guessed, {})))
        for rate in rates.values():
            rate.begin()
        gains = (lambda gamma: outer.tape.nodes.shape_for(gamma, BRANCH)[1]) if outer.tree.size else None
        controller = Controller(costs, outer.rows - 1, inner.rows - 1 if inner else 0, self.padding, gains, rates)
        self.shelf[name] = costs, controller.rates
        return controller

    def choose(self) -> DraftPlan:
        """The next round's plan."""
        if self._next is None:
            self.learn()
            self._next = self._choose()
        plan, self._next = self._next, None
        self._begins = self._begins and self.controller is None
        return plan

    def _choose(self) -> DraftPlan:
        """The very first round drafts nothing, so the first token waits for no drafter. Where steps are recorded and
        drafts will follow, it takes the step that checks them, which is then recorded for them, too."""
        if self.fixed is not None:
            return self.fixed
        gathering = self.hierarchy.gathering
        if gathering is not None and gathering.is_stale and self.default.retrieval:
            return DraftPlan(padded=self.padding.plain)  # what an earlier call selected must decide nothing
        if self.controller is None:
            return replace(self.default, padded=self.padding.drafts if self.default.gamma else self.padding.plain,
                           padded_inner=self.padding.inner)
        if not self._begins:
            return self._best()
        drafts_follow = self.hierarchy.outer.is_recorded and self._best().gamma > 0
        return DraftPlan(padded=self.padding.plain or drafts_follow)

    def _best(self) -> DraftPlan:
        found = [meter.emitted(self.hierarchy.outer.rows) for meter in self.meters if meter is not None] or [[1.0]]
        return self.controller.choose(remaining=self._remaining, ngram=[*map(fmean, zip(*found, strict=True))])

    def think(self) -> None:
        """Chooses while the device works. A CPU has nothing beside: there a choice waits for what the round shows."""
        if not self._on_cpu:
            self.learn()
            self._next = self._choose()

    def learn(self) -> None:
        """Learns from the round before, if that has not been done."""
        result, self._unseen = self._unseen, None
        if result is None:
            return
        if result.timing is not None:
            self.controller.timed(result.timing.plan, result.timing.drafting, result.timing.checking)
        tokens, seen = tally(result.plan, result.rows)
        self.controller.update(tokens, **seen)
        self._remaining -= tokens
        self._emitted += tokens

    def close_row(self, row: int) -> None:
        """The row is finished."""
        if self.meters:
            self.meters[row] = None

    def observe(self, result: "Round", was_chosen: bool) -> list[int]:
        """Takes a round in. Returns the rows whose views are due to be chosen anew, COMMON perhaps among them.

        Args:
            was_chosen: it followed what `choose` gave.
        """
        if self.controller is not None and was_chosen:
            self._unseen = result
        for i, meter in enumerate(self.meters):
            if meter is not None:
                meter.update(result.rows[i].tokens)
        return [row for row in self.since if self.is_due(row, result.rows if row == COMMON else [result.rows[row]])]

    def is_due(self, row: int, brought: list[RowRound]) -> bool:
        """Takes in what a round brought for the rows of a view: is it to be chosen anew?"""
        going = [len(one.tokens) for one in brought if one.tokens]  # the others have ended
        self.since[row] += fmean(going or [0])
        return bool(going) and self.since[row] >= (self.common_interval if row == COMMON else self.rebuild_interval)

    def rebuilt(self, rows: list[int]) -> None:
        """The views of these rows have been chosen."""
        self.since.update(dict.fromkeys(rows, 0.0))


def default_plan(settings: Settings, hierarchy: "Hierarchy") -> DraftPlan:
    """The plan of rounds where the settings fix it."""
    source = next(iter(hierarchy.sources), None)
    if not settings.retrieval:
        return DraftPlan(settings.gamma, source) if source else DraftPlan()
    rounds, inner = (settings.gamma, 0) if source is None else (-(-settings.gamma // 2), settings.gamma_inner)
    return DraftPlan(settings.gamma, source, True, inner, rounds, branches=BRANCH * (settings.tree_size > 0))


def tally(plan: DraftPlan, rows: list[RowRound]) -> tuple[float, dict[str, tuple[int, int]]]:
    """What a round showed: the tokens of a row, in the mean of those that have not ended; and by level (hits, tests),
    of kept tokens and first rejections only."""
    rows = [row for row in rows if row.tokens]
    seen = {}
    if plan.drafter not in (None, "ngram"):  # its meter keeps its rates
        hits = sum(row.num_accepted for row in rows)
        # A drafter that proposed nothing has missed: otherwise one that seldom proposes would keep its first rate.
        seen[plan.drafter] = hits, hits + sum(row.num_accepted < max(row.num_drafted, 1) for row in rows)
    if plan.retrieval and plan.source not in (None, "ngram"):
        kept = [origin for row in rows for origin in row.origins[: row.num_accepted]]
        seen[plan.source] = kept.count(ACCEPTED), sum(map(kept.count, (ACCEPTED, MISSED, LEAF)))
    return fmean(len(row.tokens) for row in rows) if rows else 0.0, seen


def guess(hierarchy: "Hierarchy", padding: Padding, lengths: list[int]) -> Costs:
    """Guesses costs by a step's layers and the bytes that it reads. Rounds soon show the real ones."""
    outer, inner, prefix = hierarchy.outer, hierarchy.inner, hierarchy.cache.prefix
    on_cpu, config = outer.length.device.type == "cpu", outer.model.config
    rate, layer = (2e7, LAYER_ON_CPU) if on_cpu else (4e9, LAYER_ON_GPU)  # bytes a millisecond
    held = prefix.base + sum(length - prefix.base for length in lengths)  # what rows share is read once
    kv = held * config.kv_elements_per_token * outer.model.dtype.itemsize
    on_host = 0 if prefix.streams is None else kv * len(prefix.streams.layers) / config.n_layer
    layers = layer * config.n_layer
    full = layers + (outer.model.weight_bytes + kv - on_host) / rate + on_host / (rate if on_cpu else 5e7)

    def by_rows(level: "Verifier", padded: bool, first: float) -> dict[int, float]:
        unit = level.row_unit if padded else 1
        sizes = {min(-(-(1 + gamma) // unit) * unit, level.rows) for gamma in (0, *LENGTHS, level.rows - 1)}
        return {rows: first * (1 + ROW * (max(rows, level.tree.size) - 1) * on_cpu) for rows in sizes}

    costs = {"verify": by_rows(outer, padding.drafts, full)}
    if padding.drafts and not padding.plain:
        costs["plain"] = full
    if inner is not None:
        first = layers + (inner.model.weight_bytes + min(hierarchy.view.nbytes, kv)) / rate
        costs["retrieval"] = by_rows(inner, padding.inner, first)
        if outer.tree.size:
            costs["growth"] = first * (1 + ROW * (outer.tape.nodes.width - 1) * on_cpu)
    costs["sources"] = {}
    for name, source in hierarchy.sources.items():
        first = layer * source.num_layers + (source.nbytes + source.weight_bytes) / rate + 0.001
        costs["sources"][name] = first, first if source.weight_bytes else 0.0
    return Costs(**costs, seen=0, preparing=0.0 if hierarchy.compiler.recorder is None else PREPARING * config.n_layer)
