"""One batch of conversations: its tape, its caches and its lengths.

Weights live elsewhere and are shared; a batch is what generating changes. Token ids go in, rounds of token ids come
out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..cache.offload import Offload
from ..cache.prefix import PrefixStore
from ..config import Settings
from ..cpu import packs
from ..errors import NotFinite
from ..runtime.graphs import Compiler
from .drafters.ngram import NgramMeter
from .hierarchy import Hierarchy, Models, Round, make_sources
from .nodes import Nodes
from .pilot import Pilot
from .plan import ONE_ROW, DraftPlan, Padding
from .tape import Tape


@dataclass(frozen=True)
class Sizes:
    """Of the caches that serve a batch."""

    batch: int  # rows
    capacity: int  # tokens that a row can hold, prompt and output
    budget: int  # tokens of the view that drafts; ignored without one
    vocab_size: int
    shared: int = 0  # tokens of a document that all rows have in common, and that has a plan of its own
    resident_layers: int | None = None  # of the KV prefix, on the device, the others in host memory; None: all


class DecodeBatch:
    """See the module. Its rows run side by side; each has its own length.

    Args:
        settings: resolved; see `Settings.resolve`.
        compiler: of the steps of all levels.
        shared: the prefix that all rows have in common: their prompts begin with its tokens.
        meter: of the shared tokens, see `Pilot`.
        shelf: what earlier texts showed, see `Pilot`. None: nothing.
        pack: keep the prompt's prefix in the CPU's own layout as well; see cpu.py.
        row_unit: padded steps of the full level have a multiple of it, see `cpu.row_unit`. None: they have all rows.
        runs_on: the device that it is meant for, if the target is on another: a plan of the memory builds it on the
            meta device.
    """

    def __init__(self, models: Models, settings: Settings, sizes: Sizes, compiler: Compiler, *,
                 shared: PrefixStore | None = None, meter: Callable[[], NgramMeter] | None = None,
                 shelf: dict | None = None, pack: bool = False, row_unit: int | None = None,
                 runs_on: torch.device | None = None):
        batch, budget, target, resident = sizes.batch, sizes.budget, models.target, sizes.resident_layers
        self.settings, self.batch, self.budget, self.target = settings, batch, budget, target
        config, device, dtype = target.config, target.device, target.dtype
        interval, block = settings.flush_interval, max(settings.tree.rows, settings.inner_tree.rows)
        self.capacity = -(-sizes.capacity // interval) * interval
        self.base = 0 if shared is None else shared.lens[0]  # tokens that all rows share
        self._pack = pack and batch == 1 and resident is None and shared is None and packs(device, dtype)
        self.compiler = compiler
        nodes = Nodes(settings.tree, max(settings.tree_size // 8, 4), batch, device) if settings.tree.size else None
        # A power of two: steps that were compiled for one length of prompts serve others.
        tokens = 1 << (self.capacity + 4 * settings.block_size - 1).bit_length()
        self.tape = Tape(batch, tokens, sizes.vocab_size, device, settings.coupled, settings.runners_up, nodes)
        self.params = self.tape.params
        own, common = settings.split_budget(budget, self.base, self.capacity) if settings.retrieval else (0, 0)
        # A block of a tree needs slots for its own rows, or for those of the level that runs ahead of it.
        ahead = max(block, settings.block_size + settings.inner_tree.rows) if settings.tree_size else 2 * block
        self.cache = KVCache(config, target.rope, batch=batch, capacity=self.capacity, block_size=block,
                             flush_interval=interval, budget=own, newest=settings.block_size, ahead=ahead,
                             resident_layers=resident, piece=settings.piece_tokens, shared=shared,
                             chunk_size=settings.scored_chunk_size, device=device, dtype=dtype, runs_on=runs_on)
        sources = make_sources(models, self.tape, settings, capacity=self.capacity, compiler=compiler)
        self.hierarchy = Hierarchy(target, self.cache, self.tape, settings, budget=budget, own=own, common=common,
                                   sources=sources, drafting=models.drafting, row_unit=row_unit, compiler=compiler)
        self.pilot = Pilot(self.hierarchy, settings, shelf={} if shelf is None else shelf,
                           rebuild_interval=settings.rebuild_interval or self._usual_rebuild_interval(
                               self.cache.prefix.offload),
                           common_interval=settings.rebuild_interval or self._usual_rebuild_interval(
                               self.cache.prefix.streams, for_all=True), meter=meter)
        self.lens = [self.base] * batch  # tokens with exact K/V, as the host knows them
        self._texts: list[list[int]] = [[] for _ in range(batch)]  # what the tape holds, as the host knows it
        self.prompt_end = [0] * batch  # lens when the last prefill ended
        self._closed: set[int] = set()  # rows that have ended
        self.prompts: list[list[int]] | None = None  # set by the caller: what `rewind` goes back to
        self.told = float("inf")  # set by the caller: tokens of the first row that it passed on; a round may bring more
        self.reused = [0] * batch  # set by the caller: tokens of each prompt that an earlier call had computed
        self.waited = 0.0  # seconds that its prompts waited for compiled steps
        self._is_compiled = not compiler.compiles  # all its steps have run
        self.is_whole = True  # nothing was broken off in the middle: `truncate` finds all that `lens` promise
        self._prompt_queries: list[torch.Tensor] = []
        self._prompt_weight: torch.Tensor | None = None
        self.num_forwards = self.num_flushes = 0
        self._recorded = 0.0  # seconds that were spent on recording before
        self.last_round: Round | None = None

    def _usual_rebuild_interval(self, streams: Offload | None, for_all: bool = False) -> int:
        """The newest selection drafts best. An offloaded one takes no time for one row, or for what all rows share: the
        next verify's copies bring it. On a GPU the time of a rebuild grows with the number of chunks. Many rows take
        the sum of their times. On a CPU a rebuild takes as long as a token.

        Args:
            streams: what the view is chosen from, if that is in host memory.
            for_all: it is the view that all rows share.
        """
        if streams is not None and (self.batch == 1 or for_all):
            return 1
        if self.batch == 1 and self.target.device.type == "cuda":
            return max(16, 256 // self.settings.chunk_size)
        return 64

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those in host memory too."""
        view, sources = self.hierarchy.view, self.hierarchy.sources.values()
        return self.cache.nbytes + (view.nbytes if view else 0) + sum(source.nbytes for source in sources)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forgets all conversations, keeps the memory."""
        self.lens, self._texts, self.prompts = [self.base] * self.batch, [[] for _ in range(self.batch)], None
        self.is_whole = True
        for row in range(self.batch):
            self.cache.prefix.truncate(row, self.base)

    @torch.inference_mode()
    def truncate(self, row: int, length: int) -> None:
        """Keeps the first `length` tokens of a row, at most those with K/V: a prefill goes on from there."""
        self.prompts, self.is_whole = None, False
        if length < self.cache.lens[row]:
            self.cache.truncate(row, length)
        self.cache.prefix.forget(row)
        self.lens[row] = length
        del self._texts[row][length:]
        self.is_whole = True

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int], on_progress=None, fresh: bool | None = None) -> None:
        """Appends tokens to a row, which may be in use, and computes K/V for all but the last, the pending one.

        The tokens of a new row begin with those of the shared prefix.

        Args:
            on_progress: called with the share of the work that is done, 0 to 1.
            fresh: the row's text is not the one that drafters have read: they read all of it. None: if the row is new.
        """
        start, known = self.lens[row], len(self._texts[row])
        self.cache.prefix.packed, self.is_whole = None, False
        stop = known + len(tokens) - 1
        self.tape.tokens[row, known : stop + 1] = torch.tensor(tokens, dtype=torch.int64)
        if start > self.cache.lens[row]:
            self.cache.spill_tail(row)
        self._compute(range(row, row + 1), start, [stop], on_progress)
        self._texts[row] += tokens
        self._prefilled(row, stop, start == self.base if fresh is None else fresh)
        self.is_whole = True

    @torch.inference_mode()
    def prefill_all(self, prompts: list[list[int]], on_progress=None) -> None:
        """`prefill` of every row, all of them new. Rows over a shared prefix go through the model side by side: it is
        read once for as many as a chunk of the prefill holds."""
        self.cache.prefix.packed, self.is_whole = None, False
        for rows in self._together(prompts):
            def report(share, rows=rows):
                on_progress((rows.start + share * len(rows)) / self.batch)

            some = prompts[rows.start : rows.stop]
            self._write(rows, some)
            stops = [len(prompt) - 1 for prompt in some]
            self._compute(rows, self.base, stops, on_progress and report)
            for row, stop in zip(rows, stops, strict=True):
                self._prefilled(row, stop, True)
        self.is_whole = True

    def _write(self, rows: range, prompts: list[list[int]]) -> None:
        """Puts prompts on the tape that begin with the shared prefix."""
        here, base = slice(rows.start, rows.stop), self.base
        width = max(map(len, prompts))
        own = [prompt[base:] + [0] * (width - len(prompt)) for prompt in prompts]
        self.tape.tokens[here, :base] = torch.tensor(prompts[0][:base], dtype=torch.int64)
        self.tape.tokens[here, base:width] = torch.tensor(own, dtype=torch.int64)
        self._texts[here] = [list(prompt) for prompt in prompts]

    def _together(self, prompts: list[list[int]]) -> list[range]:
        """The rows in runs that are prefilled side by side, each padded to the longest of its run."""
        runs, width = [range(0, 1)], len(prompts[0])
        for row, prompt in enumerate(prompts[1:], 1):
            width, begun = max(width, len(prompt)), runs[-1].start
            fits = (row + 1 - begun) * (width - self.base) <= self.settings.prefill_chunk_size
            if self.base and fits and min(map(len, prompts[begun : row + 1])) > self.base + 1:
                runs[-1] = range(begun, row + 1)
            else:
                runs.append(range(row, row + 1))
                width = len(prompt)
        return runs

    def _prefilled(self, row: int, stop: int, fresh: bool) -> None:
        self.lens[row] = self.prompt_end[row] = stop
        self.hierarchy.prefill(row, stop, fresh)

    def _compute(self, rows: range, start: int, stops: list[int], on_progress) -> None:
        """K/V of the tokens from `start` to each row's stop, layer by layer, and the views of these rows."""
        cache, prefix, end = self.cache, self.cache.prefix, max(stops)
        wholes = [cache.whole(stop) for stop in stops]
        on_layer = partial(prefix.score_layer, rows=rows, start=prefix.base, stops=wholes)
        if end > start:
            blocks = prefill_blocks(cache, rows, start, end, self.settings.prefill_chunk_size, lengths=stops,
                                    keep_queries=True, on_layer=on_layer)
            try:
                self.target.prefill(self.tape.tokens[rows.start : rows.stop, start:end], blocks, on_progress,
                                    cache_only=True)
            finally:
                if prefix.offload is not None:
                    prefix.offload.close_work()
        for row, stop in zip(rows, stops, strict=True):
            self._seat(row, stop)

    def _seat(self, row: int, length: int) -> None:
        """Sets a row's tail and view as after a prefill of `length` tokens, which lie in the prefix."""
        self.cache.truncate(row, length)
        if self.hierarchy.view is not None:
            self.hierarchy.view.open(row)

    @torch.inference_mode()
    def begin(self, max_new_tokens: int, plan: DraftPlan | None = None, padding: Padding | None = None) -> None:
        """Begins to decode after all rows are prefilled. `rewind` comes back to this point.

        Args:
            plan: what all rounds follow. None: chosen round by round, or what the settings say.
            padding: of steps whose plan is not given. None: as before; at first, all are padded.
        """
        self._prompt_queries = [q[:, :, : self.cache.newest].clone() for q in self.cache.queries]
        self._prompt_weight = self.cache.query_weight.clone()
        self.cache.prefix.keep(self.prompt_end)
        if self._pack:
            self.cache.prefix.pack()
        self._open(max_new_tokens, plan, padding)
        if not self._is_compiled:
            begun = time.perf_counter()
            self._compile(max_new_tokens)
            self.rewind(max_new_tokens, plan, padding)
            self._is_compiled, self.waited = True, time.perf_counter() - begun

    def _compile(self, max_new_tokens: int) -> None:
        """Has each step compiled, by rounds of every kind, which `rewind` forgets: nothing can be compiled within a
        recording."""
        for row, length in enumerate(self.lens):
            room = self.settings.flush_interval - 1 - (length - self.cache.lens[row])
            self.hierarchy.limit(row, length + min(room, max_new_tokens))  # it has to fit, and to flush nothing
        # Of several rows on one rank, those that check nothing may be unpadded, see `Engine.prepare`.
        unpadded = [ONE_ROW] * (self.batch > 1 and self.target.group is None)
        for plan in [*self.hierarchy.kinds_of_rounds(self.pilot.default), *unpadded]:
            for _ in range(2):  # the second round follows one that drafted
                self.round(plan)

    @torch.inference_mode()
    def rewind(self, max_new_tokens: int, plan: DraftPlan | None = None, padding: Padding | None = None) -> None:
        """Back to where `begin` was called: the next rounds are those of a fresh prefill, bit for bit."""
        self.is_whole, self.waited = False, 0.0
        for q, kept in zip(self.cache.queries, self._prompt_queries, strict=True):
            q[:, :, : self.cache.newest] = kept
        self.cache.query_weight.copy_(self._prompt_weight)
        for row, length in enumerate(self.prompt_end):
            self._seat(row, length)  # a prefill leaves all of its K/V in the prefix
            self.lens[row] = length
            del self._texts[row][length + 1 :]
            self.hierarchy.rewind(row, length)
        self.is_whole = True
        self._open(max_new_tokens, plan, padding)

    def _open(self, max_new_tokens: int, plan: DraftPlan | None, padding: Padding | None) -> None:
        interval = self.settings.flush_interval
        self.compiler.settings = self.params.uses
        self._closed = set()
        # A prefix grows by whole intervals.
        prefix_ends = [min(held + (length + max_new_tokens - held) // interval * interval, self.capacity)
                       for held, length in zip(self.cache.lens, self.lens, strict=True)]
        self.hierarchy.open(prefix_ends)
        for row in range(self.batch):
            self.hierarchy.limit(row, self.cache.lens[row] + interval)
        self.pilot.open(plan, padding or self.pilot.padding, self.lens, max_new_tokens, self.texts)
        if self.compiler.recorder is not None:
            torch.cuda.current_stream().synchronize()  # the time of the prefill is not the first round's
        self.num_forwards, self.num_flushes, self._recorded = 0, 0, self.compiler.seconds

    @property
    def recording(self) -> float:
        """Seconds that the preparation of steps took since decoding began."""
        return self.compiler.seconds - self._recorded

    def texts(self, start: int = 0) -> list[list[int]]:
        """The tokens of each row from `start` on, the pending one among them."""
        return [text[start:] for text in self._texts]

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """The row is finished: later rounds emit nothing for it."""
        self.hierarchy.close_row(row, self.lens[row])
        self._closed.add(row)
        self.pilot.close_row(row)

    @torch.inference_mode()
    def round(self, plan: DraftPlan | None = None) -> list[list[int]]:
        """One verify and all that is drafted for it. Returns each row's new tokens; the one host sync is here.

        Args:
            plan: what to follow, instead of what is chosen.
        """
        chosen, going = plan is None, [row for row in range(self.batch) if row not in self._closed]
        if chosen:
            plan = self.pilot.choose()
        if plan.retrieval and self.hierarchy.view is not None:
            self.pilot.rebuilt(self.hierarchy.view.catch_up(going))
        result = self.hierarchy.round(plan, self.lens, self.pilot.think if chosen else None)
        self.num_forwards += 1
        self.last_round = result
        return self._settle(result, chosen)

    def _settle(self, result: Round, chosen: bool) -> list[list[int]]:
        """Takes in what a round brought: lengths, flushes, and views that are to be chosen anew."""
        self.is_whole = False
        for row, brought in enumerate(result.rows):
            if brought.diverged:
                raise RuntimeError(f"the ranks disagree on the tokens after {self.lens[row]:,}; their weights, prompts "
                                   "or settings differ, or a device miscalculates")
            if brought.tokens and not brought.is_finite:
                raise NotFinite(len(self._texts[row]))
            self.lens[row] += len(brought.tokens)
            self._texts[row] += brought.tokens
        due = self.pilot.observe(result, chosen)
        for row, brought in enumerate(result.rows):
            if brought.tokens and self.lens[row] - self.cache.lens[row] == self.settings.flush_interval:
                self._flush(row)
        if due and result.plan.retrieval:
            self.pilot.rebuilt(self.hierarchy.view.renew(due))
        self.is_whole = True
        return [brought.tokens for brought in result.rows]

    def _flush(self, row: int) -> None:
        self.hierarchy.flush(row)
        self.num_flushes += 1
        limit = self.cache.lens[row] + self.settings.flush_interval
        if limit <= self.capacity:
            self.hierarchy.limit(row, limit)
