"""The levels over one batch of conversations, and a round of all of them.

    full        the target over its whole cache            emits
    retrieval   the target over a view of its cache        proposes to the full level
    sources     a draft model, n-grams, ...                propose to either

The plan says which of them take part in a round.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..cache.kv_cache import KVCache
from ..cache.streaming import StreamingCache
from ..cache.views import CommonView, RetrievalView
from ..config import Settings
from ..errors import UserError
from ..model import Transformer
from ..runtime.graphs import Compiler
from ..tree import TokenTree
from .drafters.base import Drafter
from .drafters.model import ModelDrafter
from .drafters.ngram import NgramDrafter
from .drafters.ranks import SharedDrafter
from .plan import DraftPlan
from .tape import FULL, RETRIEVAL, Tape
from .verifier import RowRound, Verifier


@dataclass(frozen=True)
class Models:
    """What a batch runs."""

    target: Transformer
    draft: Transformer | None = None
    drafting: Transformer | None = None  # the target's weights for the retrieval level, quantized say. None: itself
    draft_ranks: Sequence[int] | None = None  # that hold the draft, which is None on the others. None: all of them


@dataclass
class Timing:
    """How long a round took, in milliseconds."""

    plan: DraftPlan
    drafting: float  # all before its verify
    checking: float  # from there to the host's read


@dataclass
class Round:
    """What a round brought."""

    plan: DraftPlan
    rows: list[RowRound]
    # The times of this round; with several ranks, those of the round before on the first rank. None where a step was
    # warmed up or recorded, and so slower than it will be.
    timing: Timing | None


class Clock:
    """Takes the times of one round: by events on a GPU, where the host runs ahead of the device."""

    def __init__(self, compiler: Compiler, device: torch.device):
        self.compiler, self.on_gpu, self.recorded = compiler, device.type == "cuda", compiler.num_recorded
        self.begun = time.perf_counter()
        if self.on_gpu:
            self.start, self.middle = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.start.record()

    def drafted(self) -> None:
        """The drafting has been enqueued, or done."""
        self.between = time.perf_counter()
        if self.on_gpu:
            self.middle.record()

    def read(self, plan: DraftPlan) -> Timing | None:
        """After the host has read what the round brought."""
        total = (time.perf_counter() - self.begun) * 1e3
        drafting = self.start.elapsed_time(self.middle) if self.on_gpu else (self.between - self.begun) * 1e3
        if self.compiler.num_recorded != self.recorded:
            return None
        return Timing(plan, drafting if plan.gamma else 0.0, max(total - drafting, 1e-3))


class Hierarchy:
    """See the module.

    Args:
        cache: the target's, shared by the full level and the retrieval level.
        budget: tokens of a row that the retrieval level reads. own, common: those of the row's own prefix, and of the
            one that all rows share.
        sources: the drafters at the bottom, by name.
        drafting: the target's weights for the retrieval level, quantized say. None: the target itself.
        row_unit: of the full level, see `cpu.row_unit`.
    """

    def __init__(self, target: Transformer, cache: KVCache, tape: Tape, settings: Settings, *, budget: int,
                 own: int, common: int, sources: dict[str, Drafter], drafting: Transformer | None, row_unit: int | None,
                 compiler: Compiler):
        self.cache, self.sources, self.compiler, self.group = cache, sources, compiler, target.group
        self._last: Timing | None = None  # of the round before, as this rank measured it
        self._last_plan: DraftPlan | None = None
        self.drafters: dict[str, Drafter] = dict(sources)  # that may propose to the full level
        self.view: RetrievalView | None = None
        self.inner: Verifier | None = None
        if settings.retrieval:
            made = {"chunk_size": settings.chunk_size, "kind": settings.draft_cache, "device": target.device,
                    "dtype": target.dtype, "compiler": compiler}
            shared = CommonView(cache, budget=common, recent=settings.recent, **made) if common else None
            recent = min(settings.recent * budget / own, 1.0)  # the newest tokens are a row's own
            self.view = RetrievalView(cache, budget=own, recent=recent, batch=len(tape.tokens), shared=shared, **made)
            self.inner = Verifier(drafting or target, cache, self.view, tape, level=RETRIEVAL,
                                  tree=settings.inner_tree if sources else TokenTree(1), drafters=sources,
                                  compiler=compiler)
            self.drafters = {"retrieval": self.inner, **sources}
        self.outer = Verifier(target, cache, cache.prefix, tape, level=FULL, tree=settings.tree,
                              drafters=self.drafters, keep_queries=True, row_unit=row_unit, compiler=compiler)

    @property
    def gathering(self) -> RetrievalView | None:
        """The view that the next verify gathers, if one waits for that: the common one where rows share a prefix."""
        view = self.view if self.view is None or self.view.shared is None else self.view.shared
        return view if view is not None and view.awaiting else None

    def round(self, plan: DraftPlan, lengths: list[int], meanwhile: Callable[[], None] | None = None) -> Round:
        """One verify and all that is drafted for it; the one host sync is at its end.

        Args:
            lengths: settled tokens of each row.
            meanwhile: called while the device works.
        """
        clock = Clock(self.compiler, self.outer.length.device)
        if self.group is not None:
            self.outer.outbox.tell(self._last)
        for name, source in self.sources.items():
            if name == plan.source:
                source.catch_up(lengths)
            else:
                source.leave_out()
        self.outer.gathering = gathering = self.gathering
        drafted = self.outer.draft(plan)
        clock.drafted()
        self.outer.check(plan, drafted)
        if gathering is not None:
            gathering.gathered()
        if meanwhile is not None:
            meanwhile()
        rows, told = self.outer.outbox.read()
        timing = clock.read(plan)
        for row, brought in enumerate(rows):
            if brought.beside > 1:  # drafters notice one token more by themselves
                for source in self.sources.values():
                    source.depart(row)
        if self.group is None:
            return Round(plan, rows, timing)
        before, self._last, self._last_plan = self._last_plan, timing, plan
        return Round(plan, rows, Timing(before, *told) if before is not None and told[1] > 0 else None)

    def kinds_of_rounds(self, default: DraftPlan) -> list[DraftPlan]:
        """Plans that together take every padded step. default: the plan of rounds where none is chosen."""
        plans = [DraftPlan(), *(DraftPlan(1, source) for source in self.sources)]
        if self.inner is not None:  # two drafted tokens run the steps that more would
            short = replace(default, rounds=1, gamma_inner=min(default.gamma_inner, 2))
            plans += [replace(short, source=source) for source in self.sources or [None]]
        return plans

    def prefill(self, row: int, length: int, fresh: bool) -> None:
        """The target's cache holds the first `length` tokens of a row, and its last queries."""
        for source in self.sources.values():
            source.prefill(row, length, fresh)
        self.outer.length[row].fill_(length)

    def rewind(self, row: int, length: int) -> None:
        """Back to `length` tokens of a row, where `open` was called."""
        for source in self.sources.values():
            source.rewind(row, length)
        self.outer.length[row].fill_(length)

    def open(self, ends: list[int]) -> None:
        """All prompts are in: no row's prefix will outgrow its end."""
        self._last = self._last_plan = None
        self.cache.prefix.open(ends)
        for level in filter(None, (self.outer, self.inner)):
            level.totals.zero_()
        if self.view is not None:
            self.view.num_rebuilds = 0
            if self.view.shared is not None:
                self.view.shared.open(0)
        for source in self.sources.values():
            source.open(ends)

    def flush(self, row: int) -> None:
        """A row has filled a flush interval, which moves from the tail to the prefix."""
        self.cache.flush(row)
        if self.view is not None:
            self.view.flush(row)

    def limit(self, row: int, length: int) -> None:
        """Rounds emit nothing for a row beyond `length` tokens."""
        self.outer.limit[row].fill_(length)

    def close_row(self, row: int, length: int) -> None:
        """Rounds emit nothing more for a row. Where a kernel reads lengths on the device, it reads one key of it."""
        self.limit(row, length)
        self.cache.prefix.close(row)

    def acceptance_rates(self) -> list[dict[str, float]]:
        """Per row, accepted / drafted since `open`, by the level that checked. Waits for the device."""
        rates: list[dict[str, float]] = [{} for _ in self.cache.lens]
        for name, level in (("retrieval", self.inner), ("full", self.outer)):
            for row, (accepted, drafted, _) in enumerate(level.totals.tolist() if level is not None else []):
                if drafted:
                    rates[row][name] = accepted / drafted
        return rates


def make_sources(models: Models, tape: Tape, settings: Settings, *, capacity: int,
                 compiler: Compiler) -> dict[str, Drafter]:
    """The drafters at the bottom, by name."""
    sources: dict[str, Drafter] = {}
    drafter, draft = None, models.draft
    if draft is not None:
        # A model of long context gets better with the window; one of short context, trained for a short one, worse.
        window = min(settings.draft_window or min(max(draft.config.max_position_embeddings // 8, 256), 4096), capacity)
        slack = max(ModelDrafter.STEP_ROWS, 2 * settings.block_size, window // 8)
        cache = StreamingCache(draft.config, draft.rope, batch=len(tape.tokens), num_sink=settings.draft_sink,
                               window_size=window, slack=slack, device=draft.device, dtype=draft.dtype)
        drafter = ModelDrafter(draft, cache, tape, max_drafted=settings.block_size - 1,
                               prefill_chunk_size=settings.prefill_chunk_size, compiler=compiler)
    if models.draft_ranks is not None:
        drafter = SharedDrafter(drafter, tape, models.target.group, models.draft_ranks[0])
    if drafter is not None:
        sources["model"] = drafter
    if callable(settings.draft):
        sources["custom"] = made = settings.draft(tape)
        if not isinstance(made, Drafter):
            raise UserError(f"draft must make a Drafter of a Tape, and made {made!r}; see docs/extending.md")
    if settings.ngram:
        sources["ngram"] = NgramDrafter(tape, max_drafted=settings.block_size - 1, compiler=compiler)
    return sources
