"""One batch of conversations: its tape, caches and lengths, and the hierarchy of speculators over them.

Weights live elsewhere and are shared; a State is what generating changes. Knows nothing of text, stop strings or
prompts: token ids go in, rounds of token ids come out.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cache import StreamingCache, TargetCache
from .calibration import measure
from .controller import Controller, Costs, Plan
from .draft_memory import DraftMemory, LongMemory, StreamingMemory
from .draft_ranks import SharedDrafter
from .graphs import Compiler
from .model import Transformer
from .ngram import NgramDrafter, NgramMeter
from .offload import Offload
from .packed import packs
from .retrieval import RetrievalView
from .sampling import SamplingParams
from .speculation import ACCEPTED, FULL, MISSED, RETRIEVAL, ModelDrafter, Speculator, Tape

WORTH_TIMING = 16  # tokens that are still to come: for fewer, no steps are timed


@dataclass(frozen=True)
class Settings:
    """How a hierarchy is built. Shapes follow from these, so a change builds new caches."""

    gamma: int = 6  # tokens proposed per verify over the full cache
    gamma_inner: int = 2  # tokens that the draft proposes per verify over the retrieval view
    auto: bool = False  # choose both, and which levels draft, from round to round; gamma_inner is then the most
    block_size: int = 8  # M, the rows of every verify; a multiple of 4, or on a CPU bits depend on the row
    retrieval: bool = True
    chunk_size: int = 8
    # What drafts attend to: the target to a view (retrieval.py), or without one the draft model (draft_memory.py).
    draft_cache: str = "retrieval"
    recent: float = 0.25  # share of the retrieval budget that goes to the newest tokens of the prefix
    flush_interval: int = 128  # tokens between two flushes of the tail
    rebuild_interval: int | None = None  # tokens between two rebuilds of the retrieval view; None: see `State`
    ngram: bool = False  # draft by looking up, instead of by a model or, with auto, besides it
    draft_sink: int = 4
    draft_window: int = 256
    prefill_chunk_size: int = 2048
    piece_tokens: int | None = None  # of an offloaded layer, copied at a time. None: 32 MiB of them
    keep_logits: bool = False

    @property
    def scores_chunks(self) -> bool:
        return self.retrieval and self.draft_cache == "retrieval"

    @property
    def drafts_over(self) -> str:
        """What a draft model keeps. Below a retrieval level it is to cost next to nothing."""
        return "streaming" if self.retrieval or self.draft_cache == "retrieval" else self.draft_cache

    @property
    def has_view(self) -> bool:
        """Whether there is a view of `budget` tokens."""
        return self.retrieval or self.drafts_over == "snapkv"


class State:
    """See the module. `rows` run side by side; each has its own length.

    Args:
        capacity: tokens that a row can hold, prompt and output.
        budget: tokens of the view that drafts; ignored without one.
        compiler: makes the levels' compilers.
        drafting: the target's weights for the retrieval level, quantized say. None: the target itself.
        num_resident_layers: so many layers of the prefix stay on the device, the others in host memory. None: all.
        pack: keep the prompt's prefix in the CPU's own layout as well; see packed.py.
        draft_ranks: of the target's group, those that hold the draft; draft is None on the others. None: all of them.
    """

    def __init__(self, target: Transformer, draft: Transformer | None, settings: Settings, *, batch: int, capacity: int,
                 budget: int, vocab_size: int, compiler: Compiler, drafting: Transformer | None = None,
                 num_resident_layers: int | None = None, pack: bool = False,
                 draft_ranks: Sequence[int] | None = None):
        self.settings, self.batch, self.budget, self.target = settings, batch, budget, target
        self._pack = pack and batch == 1 and num_resident_layers is None and packs(target.device, target.dtype)
        interval, block = settings.flush_interval, settings.block_size
        self.capacity = -(-capacity // interval) * interval
        device, dtype = target.device, target.dtype
        self.params = SamplingParams.allocate(batch, device)
        tokens = torch.zeros(batch, self.capacity + 4 * block, dtype=torch.int64, device=device)
        self.tape = Tape(tokens, torch.zeros_like(tokens), self.params, vocab_size)
        use_retrieval = settings.retrieval
        offload = None
        if num_resident_layers is not None and num_resident_layers < target.config.n_layer:
            offload = Offload(target.config, num_resident_layers, batch=batch, capacity=self.capacity,
                              interval=interval, device=device, dtype=dtype, piece=settings.piece_tokens)
        self.cache = TargetCache(target.config, target.rope, batch=batch, capacity=self.capacity, block_size=block,
                                 flush_interval=interval,
                                 chunk_size=settings.chunk_size if settings.scores_chunks else 0,
                                 budget=budget if use_retrieval else 0, offload=offload, device=device, dtype=dtype)
        make = {"gamma": settings.gamma_inner if use_retrieval else settings.gamma, "compiler": compiler}
        self._prefill_level = compiler.level("prefill")
        self.sources: dict[str, ModelDrafter | SharedDrafter | NgramDrafter] = {}
        drafter = None
        if draft is not None:
            drafter = ModelDrafter(draft, self._draft_memory(draft, compiler), self.tape, max_drafted=block - 1, **make)
        if draft_ranks is not None:
            drafter = SharedDrafter(drafter, self.tape, target.group, draft_ranks[0], gamma=make["gamma"])
        if drafter is not None:
            self.sources["model"] = drafter
        if settings.ngram:
            self.sources["ngram"] = NgramDrafter(self.tape, **make)
        sources = tuple(self.sources.values())
        self.retrieval = self.inner = None
        if use_retrieval:
            self.retrieval = RetrievalView(self.cache, budget=budget, chunk_size=settings.chunk_size,
                                           recent=settings.recent, kind=settings.draft_cache, batch=batch,
                                           device=device, dtype=dtype, compiler=compiler)
            rounds = -(-settings.gamma // 2) if sources else settings.gamma
            self.inner = Speculator(
                drafting or target, self.cache, self.retrieval, self.tape, level=RETRIEVAL, drafters=sources,
                dense="model" in self.sources, rows=1 + (settings.gamma_inner if sources else 0),
                gamma=settings.gamma, rounds=rounds, compiler=compiler)
        self.outer = Speculator(target, self.cache, self.cache.full, self.tape, level=FULL, rows=block,
                                drafters=(self.inner, *sources) if use_retrieval else sources,
                                dense=use_retrieval or "model" in self.sources, keep_queries=True,
                                keep_logits=settings.keep_logits, compiler=compiler)
        self.one_row = Speculator(target, self.cache, self.cache.full, self.tape, level=FULL, rows=1,
                                  keep_queries=True, position=(self.outer.length, self.outer.limit), compiler=compiler)
        self.plain = self.outer  # what takes the rounds in which the controller does not draft
        self.plan = Plan(settings.gamma if self.outer.drafters else 0, next(iter(self.sources), None), use_retrieval,
                         settings.gamma_inner if sources else 0, self.inner.rounds if use_retrieval else 0)
        self.controller: Controller | None = None
        self._costs: dict[tuple, Costs] = {}
        self._untimed: tuple | None = None  # where the steps are still to be timed, which `_costs` will remember
        self.timing_seconds = 0.0  # spent on that since `begin` or `rewind`
        self._drafted_to = [0] * batch  # tokens of each row that the draft model has seen for certain
        self._draft_left_out = False  # of the last round
        self._meters: list[NgramMeter | None] = []  # of each row that is not finished
        self.lens = [0] * batch  # tokens with exact K/V, as the host knows them
        self.known = [0] * batch  # tokens on the tape
        self.prompt_end = [0] * batch  # lens when the last prefill ended
        self._ends = [0] * batch  # what lens will not exceed
        self.prompts: list[list[int]] | None = None  # set by the caller: what `rewind` goes back to
        self._prompt_queries: list[torch.Tensor] = []
        self._prompt_weight: torch.Tensor | None = None
        self._rebuild_interval = settings.rebuild_interval or self._usual_rebuild_interval()
        self._rebuild = [RebuildPolicy(self._rebuild_interval) for _ in range(batch)]
        self.num_forwards = 0
        self.num_flushes = 0

    def _usual_rebuild_interval(self) -> int:
        """The newest selection drafts best. Offloaded, it takes no time: it is gathered beside the next verify's
        copies. On a GPU it takes the longer the more chunks there are. Of many rows each is rebuilt on its own, and on
        a CPU a rebuild takes as long as a token."""
        if self.batch == 1 and self.cache.full.offload is not None:
            return 1
        if self.batch == 1 and self.target.device.type == "cuda":
            return max(16, 256 // self.settings.chunk_size)
        return 64

    def _draft_memory(self, draft: Transformer, compiler: Compiler) -> DraftMemory:
        settings, tokens = self.settings, self.tape.tokens
        if settings.drafts_over == "streaming":
            cache = StreamingCache(draft.config, draft.rope, batch=self.batch, num_sink=settings.draft_sink,
                                   window_size=settings.draft_window, slack=max(64, 2 * settings.block_size),
                                   device=draft.device, dtype=draft.dtype)
            return StreamingMemory(draft, tokens, cache)
        return LongMemory(draft, tokens, kind=settings.drafts_over, capacity=self.capacity, budget=self.budget,
                          block_size=settings.block_size, flush_interval=settings.flush_interval,
                          chunk_size=settings.chunk_size, recent=settings.recent,
                          prefill_chunk_size=settings.prefill_chunk_size, compiler=compiler)

    @property
    def nbytes(self) -> int:
        parts = [self.cache, self.retrieval, getattr(self.sources.get("model"), "memory", None)]
        return sum(part.nbytes for part in parts if part is not None)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forgets all conversations, keeps the memory."""
        self.lens, self.known, self.prompts = [0] * self.batch, [0] * self.batch, None
        for row in range(self.batch):
            self.cache.full.set_len(row, 0)

    @torch.inference_mode()
    def prefill(self, row: int, tokens: Sequence[int], on_progress=None) -> None:
        """Appends tokens to a row, which may be in use, and computes K/V for all but the last, the pending one.

        Args:
            on_progress: called with the share of the work that is done, 0 to 1.
        """
        start, known = self.lens[row], self.known[row]
        self.cache.full.packed = None
        stop = known + len(tokens) - 1
        self.tape.tokens[row, known : stop + 1] = torch.tensor(tokens, dtype=torch.int64)
        if start > self.cache.full.lens[row]:
            self.cache.spill_tail(row)
        if stop > start:
            self._prefill(row, start, stop, on_progress)
        else:
            self._seat(row, stop)
        self.known[row] = stop + 1
        self.prompt_end[row] = stop
        for source in self.sources.values():
            source.prefill(row, stop, self._drafted_to[row] if start else 0)
        self._start(row, stop)

    def _prefill(self, row: int, start: int, stop: int, on_progress) -> None:
        cache, offload = self.cache, self.cache.full.offload
        cache.full.set_len(row, cache.whole(stop))
        if self.retrieval is not None:
            self.retrieval.fit(row)

        def on_layer(i: int) -> None:
            cache.seat_layer(i, row, stop)
            if self.retrieval is not None and offload is not None:
                self.retrieval.rebuild_layer(i, row)

        blocks = cache.prefill_blocks(row, start, stop, self.settings.prefill_chunk_size, keep_queries=True,
                                      level=self._prefill_level, on_layer=on_layer)
        try:
            self.target.prefill(self.tape.tokens[row, None, start:stop], blocks, on_progress, cache_only=True)
        finally:
            if offload is not None:
                offload.close_work()
        if self.retrieval is not None and offload is None:
            self.retrieval.rebuild(row)

    @torch.inference_mode()
    def begin(self, max_new_tokens: int, speculate: bool = True) -> None:
        """Called when all rows are prefilled: remembers this point for `rewind`, and opens the rows.

        Args:
            speculate: False: all rounds will be without speculation, and nothing is made ready for it.
        """
        self._prompt_queries = [q.clone() for q in self.cache.queries]
        self._prompt_weight = self.cache.query_weight.clone()
        if self._pack:
            self.cache.full.pack()
        self._open(max_new_tokens)
        self._plan_ahead(speculate)

    @torch.inference_mode()
    def rewind(self, max_new_tokens: int, speculate: bool = True) -> None:
        """Back to where `begin` was called: the next rounds are those of a fresh prefill, bit for bit."""
        for q, kept in zip(self.cache.queries, self._prompt_queries, strict=True):
            q.copy_(kept)
        self.cache.query_weight.copy_(self._prompt_weight)
        for row in range(self.batch):
            self._seat(row, self.prompt_end[row])  # a prefill leaves all of its K/V in the prefix
            self.known[row] = self.prompt_end[row] + 1
            for source in self.sources.values():
                source.rewind(row, self.prompt_end[row])
            self._start(row, self.prompt_end[row])
        self._open(max_new_tokens)
        self._plan_ahead(speculate)

    def set_padding(self, padded: bool, tight: bool) -> None:
        """Which steps are padded to all M rows: the same law, other bits.

        Args:
            padded: those that check nothing; False: they have one row.
            tight: False: all others. True: they have just the rows that are drafted, which is faster on a CPU.
        """
        self.plain = self.outer if padded or tight else self.one_row
        for level in (self.outer, self.inner):
            if level is not None:
                level.tight = tight

    def _plan_ahead(self, speculate: bool) -> None:
        """With `auto`: starts a controller, if the steps have been timed at about this length. Otherwise the first
        round is plain, and the next one times them, and compiles their pieces: the first token need not wait."""
        self.controller, self._meters, self._untimed = None, [], None
        if not speculate or not self.settings.auto or not self.outer.drafters:
            return
        key = self.outer.tight, self.plain is self.outer, -(-max(self.lens) // 4096), -(-min(self.lens) // 4096)
        if key in self._costs:
            self._steer(self._costs[key])
        else:
            self._untimed = key

    def _time_steps(self) -> None:
        """Times the steps where the rows stand, and starts a controller."""
        begun, costs, group = time.perf_counter(), measure(self), self.target.group
        self._costs[self._untimed] = costs if group is None else group.agree(costs)  # or each would choose for itself
        self._steer(self._costs[self._untimed])
        self._untimed = None
        self.timing_seconds += time.perf_counter() - begun

    def _steer(self, costs: Costs) -> None:
        self.controller = Controller(costs, self.outer.rows - 1, self.inner.rows - 1 if self.inner else 0)
        if "ngram" in self.sources:
            self._meters = [NgramMeter(self.tape.tokens[row, : self.known[row]].tolist()) for row in range(self.batch)]

    def follow(self, plan: Plan) -> None:
        """Sets the levels so that the next round follows the plan."""
        if plan.source == "model":
            if self._draft_left_out:
                for row, (length, known) in enumerate(zip(self.lens, self._drafted_to, strict=True)):
                    if length > known:
                        self.sources["model"].prefill(row, length, known)
            self._drafted_to = list(self.lens)
        self._draft_left_out = plan.source != "model"
        self.outer.speculate = plan.gamma > 0
        if plan.gamma == 0:
            return
        source = self.sources.get(plan.source)
        self.outer.drafter = self.inner if plan.retrieval else source
        if source is not None:
            source.gamma = plan.gamma_inner if plan.retrieval else plan.gamma
        if plan.retrieval:
            self.inner.gamma, self.inner.rounds = plan.gamma, plan.rounds
            self.inner.speculate = source is not None
            if source is not None:
                self.inner.drafter = source

    @torch.inference_mode()
    def close_row(self, row: int) -> None:
        """The row is finished: later rounds emit nothing for it."""
        self.outer.limit[row].fill_(self.lens[row])
        self._ends[row] = self.lens[row]
        if self._meters:
            self._meters[row] = None

    @torch.inference_mode()
    def round(self, speculate: bool = True, one_row: bool = False) -> list[list[int]]:
        """One verify and all that is drafted for it. Returns each row's new tokens; the one host sync is here."""
        if speculate and self._untimed is not None and self.num_forwards > 0:
            if max(end - now for end, now in zip(self._ends, self.lens, strict=True)) >= WORTH_TIMING:
                self._time_steps()
        steered = speculate and self.controller is not None
        plan = Plan() if not speculate or self._untimed is not None else self.plan
        if steered:
            rates = [meter.rate for meter in self._meters if meter is not None]
            plan = self.controller.choose(ngram=statistics.fmean(rates or [0.0]))
        level = self.outer  # without speculation, too: it is the comparison, to the bit
        if one_row:
            level = self.one_row
        elif speculate and plan.gamma == 0:
            level = self.plain
        begun = time.perf_counter()
        self.follow(plan)
        gathers = self.retrieval is not None and self.retrieval.awaits_pieces
        level.on_piece = self.retrieval.gather if gathers else None
        level.round()
        if gathers:
            self.retrieval.gathered()
        self.num_forwards += 1
        interval, full = self.settings.flush_interval, self.cache.full
        if any(start + interval // 2 <= now and start + interval < end
               for start, now, end in zip(full.lens, self.lens, self._ends, strict=True)):
            level.look_ahead(full.extent_after(interval))  # a flush is near, and something will come after it
        boxes = read(level.outbox)
        if steered and self.target.group is None:  # ranks must choose alike, and their clocks differ
            self.controller.timed(plan, (time.perf_counter() - begun) * 1e3)
        emitted, seen = [], Tally()
        for row, box in enumerate(boxes):
            tokens, origins = box[: level.rows], box[level.rows : -4]
            num_emitted, num_accepted, num_drafted, diverged = box[-4:]
            if diverged:
                raise RuntimeError(f"the ranks disagree on the tokens after {self.lens[row]:,}; their weights, prompts "
                                   "or settings differ, or a device miscalculates")
            emitted.append(tokens[:num_emitted])
            self.lens[row] += num_emitted
            self.known[row] = self.lens[row] + 1
            if num_emitted == 0:
                continue
            if num_accepted >= num_emitted:  # cut at the limit: what was checked beyond will be drafted again
                num_accepted = num_drafted = num_emitted
            if steered:
                seen.add(plan, num_emitted, num_accepted, num_drafted, origins)
                if self._meters and self._meters[row] is not None:
                    self._meters[row].update(emitted[row])
            due = self._rebuild[row].update(num_emitted, num_accepted, num_drafted)
            if self.lens[row] - full.lens[row] == interval:
                self._flush(row)
            if due and plan.retrieval and self.retrieval.renews and self.retrieval.selected[row]:
                self.retrieval.rebuild(row, at_once=False)
                self._rebuild[row].rebuilt()
        if steered:
            self.controller.update(seen.tokens_a_row, **seen.counts)
        return emitted

    def acceptance_rates(self) -> list[dict[str, float]]:
        """Per row, accepted / drafted since `begin` or `rewind`, by the level that checked. Waits for the device."""
        rates: list[dict[str, float]] = [{} for _ in range(self.batch)]
        for name, level in (("retrieval", self.inner), ("full", self.outer)):
            for row, (accepted, drafted) in enumerate(level.totals.tolist() if level is not None else []):
                if drafted:
                    rates[row][name] = accepted / drafted
        return rates

    def _seat(self, row: int, length: int) -> None:
        """Tail and retrieval view of a row as after a prefill of `length` tokens, which lie in the prefix."""
        self.cache.seat_tail(row, length)
        if self.retrieval is not None:
            self.retrieval.rebuild(row)

    def _start(self, row: int, length: int) -> None:
        """Decoding goes on from `length` tokens of a row, whose caches are in place."""
        self.lens[row] = length
        self.outer.length[row].fill_(length)
        self._drafted_to[row] = length  # the drafters have taken it in
        self._rebuild[row] = RebuildPolicy(self._rebuild_interval)

    def _open(self, max_new_tokens: int) -> None:
        interval = self.settings.flush_interval
        self._ends = [length + max_new_tokens for length in self.lens]
        longest = max(self._ends)
        max_len = min(-(-longest // interval) * interval, self.capacity)
        self.cache.full.fix_extent(max_len)
        if "model" in self.sources:
            self.sources["model"].open(max_len)
        for row in range(self.batch):
            self.outer.limit[row].fill_(self.cache.full.lens[row] + self.settings.flush_interval)
        for level in (self.outer, self.inner, self.one_row):
            if level is not None:
                level.totals.zero_()
        self.num_forwards, self.num_flushes, self.timing_seconds = 0, 0, 0.0
        if self.retrieval is not None:
            self.retrieval.num_rebuilds = 0

    def _flush(self, row: int) -> None:
        self.cache.flush(row)
        self.num_flushes += 1
        if self.retrieval is not None:
            self.retrieval.on_flush(row)
        if "model" in self.sources and not self._draft_left_out:
            self.sources["model"].flush(row, self.lens[row])
        if self.cache.full.lens[row] + self.settings.flush_interval <= self.capacity:
            self.outer.limit[row].fill_(self.cache.full.lens[row] + self.settings.flush_interval)


class Tally:
    """What a round showed of each level's acceptance, over its rows: kept tokens and first rejections only."""

    def __init__(self):
        self.tokens, self.rows, self.counts = 0, 0, {}

    @property
    def tokens_a_row(self) -> float:
        return self.tokens / max(self.rows, 1)

    def observe(self, name: str, hits: int, tests: int) -> None:
        known = self.counts.get(name, (0, 0))
        self.counts[name] = known[0] + hits, known[1] + tests

    def add(self, plan: Plan, num_emitted: int, num_accepted: int, num_drafted: int, origins: list[int]) -> None:
        self.tokens += num_emitted
        self.rows += 1
        checked = "retrieval" if plan.retrieval else plan.source
        if checked is not None and checked != "ngram":  # that one's rates are kept by its meter
            self.observe(checked, num_accepted, num_accepted + (num_accepted < num_drafted))
        if plan.retrieval and plan.source == "model":
            hits, misses = (origins[:num_accepted].count(kind) for kind in (ACCEPTED, MISSED))
            self.observe("model", hits, hits + misses)


def read(outbox: torch.Tensor) -> list[list[int]]:
    """The one place where decoding waits for the device."""
    mode = torch.cuda.get_sync_debug_mode() if outbox.is_cuda else 0
    if mode:
        torch.cuda.set_sync_debug_mode("default")
    values = outbox.tolist()
    if mode:
        torch.cuda.set_sync_debug_mode(mode)
    return values


class RebuildPolicy:
    """When a row's selection is renewed: every `interval` tokens, and when acceptance falls well below its average.

    It sees kept tokens and first rejections only, never what was discarded, so it cannot bias the output.
    """

    def __init__(self, interval: int):
        self.interval, self.tokens, self.recent, self.average = interval, 0, 1.0, None

    def update(self, num_emitted: int, num_accepted: int, num_drafted: int) -> bool:
        self.tokens += num_emitted
        if num_drafted > 0:
            rate = num_accepted / (num_accepted + (num_accepted < num_drafted))
            self.average = rate if self.average is None else 0.95 * self.average + 0.05 * rate
            self.recent = 0.6 * self.recent + 0.4 * rate
        dropped = self.average is not None and self.recent < 0.7 * self.average
        return self.tokens >= self.interval or dropped and self.tokens >= 8

    def rebuilt(self) -> None:
        self.tokens, self.recent = 0, self.average if self.average is not None else 1.0
