"""A level of the hierarchy: a model over one view of its cache, which checks what a drafter proposes.

    inner = Speculator(target, retrieval view, {"model": ModelDrafter(draft), ...}, ...)
    outer = Speculator(target, prefix,         {"retrieval": inner, ...}, ...)

A speculator is itself a drafter: the tokens it emits follow exactly the law of its own model and view, and it says
which law that was. With no drafter it is autoregression.

Everything between two reads of the outbox is enqueued without the host waiting for the device.

Once rows of the batch have ended, a step may compute the others alone, see `Speculator.compute_for`, or leave out a
part of the work for those that have ended, see `Speculator.attend_for`.

Shapes: B batch, S rows of a spine, M rows of its block (see tree.py), n drafted tokens, at most S - 1, V vocabulary. In
a step, B are the rows that it computes.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .acceptance import TreeVerdict, match_nodes, match_tree, verify_chain
from .drafting.protocol import Drafter
from .graphs import Compiler, Graphed, finish, give, preparations, staged, take
from .kv.blocks import TargetBlock
from .kv.store import Extent, View
from .kv.target import TargetCache
from .kv.views import RetrievalView
from .model import Transformer
from .plan import Plan
from .sampling import ACCEPT, SAMPLE
from .tape import ACCEPTED, BONUS, FULL, LEAF, MISSED, Tape
from .tree import Shape, TokenTree


class RowRound(NamedTuple):
    """What a round of the full level brought for one row."""

    tokens: list[int]  # that were emitted
    origins: list[int]  # of the drafted ones, in order, at least num_accepted
    num_accepted: int
    num_drafted: int
    diverged: bool  # the ranks disagree on it
    is_finite: bool  # the logits behind the pending token are
    beside: int = 0  # accepted after those, beside the chain: a leaf, or rows of a branch
    path: Sequence[int] = ()  # rows of the block that the tokens were drawn from, the pending one's first


class Outbox:
    """What a round leaves for the host, in one buffer: it is read once a round, and the host waits nowhere else."""

    def __init__(self, tape: Tape, rows: int):
        self.rows = rows
        # S tokens, S rows, S - 1 origins, four counts, whether the ranks disagree, whether logits are finite, two times
        self.buffer = tape.buffer(3 * rows + 7)
        self.clock = torch.zeros(2, dtype=torch.int64, device=self.buffer.device)  # what this rank has to tell

    def tell(self, timing) -> None:
        """Microseconds of the last round, for the other ranks: one of them decides for all. None: 0."""
        times = (timing.drafting, timing.checking) if timing else (0, 0)
        for place, milliseconds in zip(self.clock, times, strict=True):
            place.fill_(int(1e3 * milliseconds))

    def write(self, of: Tensor | None, tokens: Tensor, rows: Tensor, origins: Tensor, counts: Tensor, finite: Tensor,
              ranks: tuple[Tensor, Tensor] | None) -> None:
        """tokens [B, n + 1], rows [B, n + 1] that they were drawn from, origins [B, n], counts [B, 4]: emitted,
        accepted, drafted, accepted beside the chain. finite [B]: see `RowRound`.

        of: [B], the rows of the batch that these are. None: all.
        ranks: whether they disagree [B], and the first one's clock [2].
        """
        for i, part in enumerate((tokens, rows, origins)):
            give(self.buffer[:, i * self.rows : i * self.rows + part.shape[1]], of, part)
        give(self.buffer[:, -8:-4], of, counts)
        give(self.buffer[:, -3], of, finite.long())
        if ranks is not None:
            disagree, clock = ranks
            give(self.buffer[:, -4], of, disagree.long())
            self.buffer[:, -2:] = clock

    def read(self) -> tuple[list[RowRound], list[float]]:
        """What each row brought, and the two times in milliseconds. Here alone decoding waits for the device."""
        mode = torch.cuda.get_sync_debug_mode() if self.buffer.is_cuda else 0
        if mode:
            torch.cuda.set_sync_debug_mode("default")
        boxes = self.buffer.tolist()
        if mode:
            torch.cuda.set_sync_debug_mode(mode)
        rounds = []
        for box in boxes:
            num_emitted, num_accepted, num_drafted, beside, diverged, finite = box[-8:-2]
            if num_accepted >= num_emitted:  # cut at the limit: what was checked beyond will be drafted again
                num_accepted = num_drafted = num_emitted
            rounds.append(RowRound(box[:num_emitted], box[2 * self.rows : -8], num_accepted, num_drafted,
                                   bool(diverged), bool(finite), beside, box[self.rows : self.rows + num_emitted]))
        return rounds, [micros / 1e3 for micros in boxes[0][-2:]]


class Speculator(Drafter):
    """See the module.

    Args:
        tree: of the largest block: the pending token and up to S - 1 drafted ones, with their leaves.
        level: keys the noise.
        drafters: those that may propose to this level, by name. All hear what is committed.
        keep_queries: keep each layer's queries for retrieval.
        row_unit: see `rows.py`. None: padded steps have all rows.
    """

    settled_count = False

    def __init__(self, model: Transformer, cache: TargetCache, view: View, tape: Tape, *, level: int, tree: TokenTree,
                 drafters: dict[str, Drafter], keep_queries: bool = False, keep_logits: bool = False,
                 row_unit: int | None = None, compiler: Compiler):
        self.model, self.cache, self.view, self.tape = model, cache, view, tape
        rows = tree.spine
        self.row_unit = rows if row_unit is None or tree.branches else row_unit
        self.level, self.rows, self.drafters, self.keep_queries = level, rows, drafters, keep_queries
        self.tree = tree
        self.length, self.limit = tape.buffer(), tape.buffer()  # no round moves `length` past `limit`
        self.base, self.num_drafted, self.asked = tape.buffer(), tape.buffer(), tape.buffer()
        wants_laws = not tape.coupled and any(drafter.emits_laws for drafter in drafters.values())
        self.draft_probs = tape.buffer(rows, tape.vocab_size, like=model) if wants_laws else None
        self.logits = tape.buffer(rows, model.config.vocab_size, like=model) if keep_logits else None
        self.outbox = Outbox(tape, rows) if level == FULL else None
        # Of the last step, for whoever asks for its logits: they are small, and copied in every step.
        self.hidden = tape.buffer(tree.rows, model.config.dim, dtype=model.dtype) if level == FULL else None
        self.drawn_from = tape.buffer(rows)  # the rows of the last step that its tokens were drawn from
        self.num_rows = rows  # of the last step that checked
        self.totals = tape.buffer(3)  # accepted, drafted, accepted beside the chain, since they were last zeroed
        self._nothing, self.beside = tape.buffer(), tape.buffer()
        # How many were drafted, for `step`: one place for all drafters, or each would have graphs of its own.
        self.checked = tape.buffer()
        self._compiler, self._levels = compiler, {}
        steps = compiler.level(f"level{level}")
        self.step = steps.step(self._step, num_lengths=2)
        self.gathering: RetrievalView | None = None  # takes what it awaits out of what the next step streams past
        # Rows of the batch, and how many of these count, see `compute_for` and `attend_for`. None: neither was called.
        self._chosen, self._of, self.num_computed, self.num_attending = tape.buffer(), [], None, None
        # As a drafter: one graph a round, however many there are. What is hardly tried is not worth one, its steps are.
        self._drafting_round = steps.step(self._round, num_lengths=2, warm_up=4)
        self._growing = steps.step(self._grow, num_lengths=2)

    @property
    def is_recorded(self) -> bool:
        """Whether its steps become graphs."""
        return self._records(self.view.extent)

    def round(self, plan: Plan, probs: Tensor | None = None) -> None:
        """Emits 1 to S tokens a row (none where `limit` is reached): on the tape, and in the outbox.

        Args:
            probs: see `Drafter.propose`; written from row length - base on.
        """
        self.check(plan, self.draft(plan), probs)

    def draft(self, plan: Plan) -> Tensor:
        """The first part of a round: tokens are proposed, and what the step reads runs ahead. Returns how many, [B]."""
        self.view.run_ahead()
        if plan.gamma == 0:
            return self._nothing  # without speculation it is the same step, hence the same bits
        return self.drafters[plan.drafter].propose(self.length, plan, self.draft_probs)

    def check(self, plan: Plan, num_drafted: Tensor, probs: Tensor | None = None) -> None:
        """The other part: they are checked, and tokens are emitted."""
        self.asked.fill_(plan.gamma)
        self.checked.copy_(num_drafted)
        self.num_rows = self.rows_of(plan, num_drafted)
        if self.tree.cut(self.num_rows).size and not plan.branches:
            self.tape.nodes.take(*self.tape.read_spine(self.length, self.rows), Shape(self.rows - 1))
        self._run(self.num_rows, probs)

    def _run(self, rows: int, probs: Tensor | None) -> None:
        """A step, as a graph if that is of use."""
        extent = self.view.extent
        step = self._step if isinstance(self.step, Graphed) and not self._records(extent) else self.step
        finish(step(*extent, rows, bool(self._awaiting), self.num_computed, self.num_attending, self.checked, probs))

    @property
    def _awaiting(self) -> list[int]:
        return [] if self.gathering is None else self.gathering.awaiting

    def _records(self, extent: Extent) -> bool:
        """Whether a step over an extent is to be a graph. One that gathers for some rows is not: each set of rows would
        need its own."""
        if not isinstance(self.step, Graphed) or not self.view.worth_recording(extent):
            return False
        return not self._awaiting or len(self._awaiting) == len(self.gathering.lens)

    def look_ahead(self, plan: Plan, extent: Extent) -> None:
        """Prepares `check` for another extent of the view, while the device is busy with the present one."""
        for prepare in self._preparations_of_check(plan, extent):
            prepare()

    def _preparations_of_check(self, plan: Plan, extent: Extent, probs: Tensor | None = None):
        rows = self.rows_of(plan) if self._records(extent) else None
        if rows is not None:
            yield from preparations(self.step, *extent, rows, bool(self._awaiting), self.num_computed,
                                    self.num_attending, self.checked, probs)

    def has_recorded(self, plan: Plan, width: int) -> bool:
        """Whether the step that checks what a plan drafts is a graph for so many rows of the batch."""
        return isinstance(self.step, Graphed) and self.step.has(*self._narrower(plan, width))

    def record_narrower(self, plan: Plan, width: int, until: float) -> None:
        """Records a part of that step, see `Graphed.prepare`."""
        if isinstance(self.step, Graphed):
            self.step.prepare(*self._narrower(plan, width), until=until)

    def _narrower(self, plan: Plan, width: int) -> tuple:
        """What `step` is called with."""
        numbers = (width, None) if self.num_attending is None else (None, width)
        return *self.view.extent, self.rows_of(plan) or self.rows, bool(self._awaiting), *numbers, self.checked, None

    def preparations_of_round(self, plan: Plan, probs: Tensor | None = None) -> Iterator[Callable[[], None]]:
        """What records the steps of `round`; see `graphs.preparations`."""
        yield from self._preparations_of_check(plan, self.view.extent, probs)
        if plan.gamma:
            yield from self.drafters[plan.drafter].preparations(plan, self.draft_probs)

    def rows_of(self, plan: Plan, num_drafted: Tensor | None = None) -> int | None:
        """Rows of the step that checks these. None where they decide, and are not drafted yet.

        Measured times influence the plans, so a step's duration must not reveal tokens that are then discarded: only
        a count that settled tokens decide is looked at. Elsewhere a step has as many rows as could have been drafted.
        """
        unit, drafted = self.row_unit if plan.padded else 1, plan.gamma
        if unit == self.rows or self.tree.size and plan.gamma:
            return self.rows
        if plan.gamma and self.level == FULL and self.drafters[plan.drafter].settled_count:
            if num_drafted is None:
                return None
            drafted = int(num_drafted.max())
        return min(-(-(1 + drafted) // unit) * unit, self.rows)

    def propose(self, start: Tensor, plan: Plan, probs: Tensor | None) -> Tensor:
        torch.add(start, plan.gamma, out=self.limit)
        self.base.copy_(start)
        self.length.copy_(start)
        for _ in range(plan.rounds):
            self._drafting_round(*self.view.extent, plan.inner, probs)
        torch.sub(self.length, start, out=self.num_drafted)
        if plan.branches:
            self._branch(plan.shape)
        return self.num_drafted

    def preparations(self, plan: Plan, probs: Tensor | None) -> Iterator[Callable[[], None]]:
        yield from self.preparations_of_round(plan.inner, probs)

    def _branch(self, shape: Shape) -> None:
        """Grows branches beside the chain that was drafted: each step drafts the next row of all of them."""
        nodes = self.tape.nodes
        nodes.take(*self.tape.read_spine(self.base, nodes.tree.spine), shape)
        for _ in range(nodes.steps):
            self._growing(*self.view.extent)

    def _grow(self, dense: int, longest: int, starts: tuple) -> None:
        compiled = self._compiler.level(f"level{self.level}_growth")
        growth = self.tape.nodes.growth
        tokens = compiled(Speculator._begin_growth)(self)
        kv = TargetBlock(self.cache, self.view, self.base, growth, Extent(dense, longest, starts), False, compiled)
        hidden = self.model(tokens, kv)
        compiled(Speculator._finish_growth)(self, hidden)

    def _begin_growth(self) -> Tensor:
        nodes = self.tape.nodes
        return nodes.tokens[:, nodes.here()]

    def _finish_growth(self, hidden: Tensor) -> None:
        nodes = self.tape.nodes
        position = self.base[:, None] + 1 + nodes.depths[nodes.here()]
        nodes.grow(self.tape.rank(self.model.output(hidden), position))

    def _round(self, dense: int, longest: int, starts: tuple, plan: Plan, probs: Tensor | None) -> None:
        """`round`, with all that its graph depends on as arguments."""
        self.round(plan, probs)

    def commit(self, length: Tensor) -> None:
        for drafter in self.drafters.values():
            drafter.commit(length)

    @contextlib.contextmanager
    def rehearsal(self):
        """Rounds within leave no trace. What they write from the pending token on is written anew by later rounds."""
        touched = [self.length, self.limit, self.totals]
        if self.keep_queries:
            touched += [self.cache.query_weight, *self.cache.queries]
        before = [x.clone() for x in touched]
        try:
            yield
        finally:
            for x, value in zip(touched, before, strict=True):
                x.copy_(value)

    def rehearse(self, here: Tensor, rows: int, probs: Tensor | None = None) -> None:
        """A step of `rows` rows from position `here` [B], all of them drafted. To be called in a rehearsal."""
        self.checked.fill_(rows - 1)
        self.length.copy_(here)
        self.base.copy_(here)
        torch.add(here, self.rows, out=self.limit)
        self.view.run_ahead()
        self._run(rows, probs)

    def rehearse_growth(self) -> None:
        """A step that grows branches from where the last rehearsal was."""
        self._growing(*self.view.extent)

    def _level(self, rows: int):
        """The compiler of steps of so many rows: their shapes are constant."""
        if rows not in self._levels:
            self._levels[rows] = self._compiler.level(f"level{self.level}_rows{rows}")
        return self._levels[rows]

    def compute_for(self, rows: list[int] | None, places: int = 0) -> None:
        """Steps compute these rows of the batch alone. For the others a round brings nothing: they have to have ended.
        Steps of trees have to compute all rows.

        Args:
            rows: None: all.
            places: rows of such a step, if they are more. In those that are left over is one that has ended.
        """
        if rows is None or self.num_attending is not None:
            self.num_computed, self.num_attending, self._of = None, None, []
        if rows is None:
            return
        assert not self.tree.branches
        others = [row for row in range(len(self.length)) if row not in rows]
        if not self._choose(rows, others, places):
            return
        self.num_computed = len(self._of)
        for row in others:
            if self.outbox is not None:
                self.outbox.buffer[row].zero_()
            if self.keep_queries:  # no view is chosen by those of rows that have ended
                self.cache.query_weight[row].zero_()

    def attend_for(self, rows: list[int] | None, places: int = 0) -> None:
        """Steps compute all rows of the batch, and these alone attend to what all share. Its keys are split alike for
        any number of rows, so that the bits of no row depend on which others go on. Rows, places: as those of
        `compute_for`."""
        self.num_computed = None
        if rows is None:
            self.num_attending = len(self.length)
            return
        self._choose(rows, [row for row in range(len(self.length)) if row not in rows], places)
        self.num_attending = len(self._of)

    def _choose(self, rows: list[int], others: list[int], places: int) -> bool:
        """Returns whether these are not the rows that were chosen before."""
        of = rows + others[:1] * (places - len(rows))
        if of == self._of:
            return False
        self._of = of
        self._chosen[: len(of)].copy_(staged(of, self._chosen.device), non_blocking=True)
        return True

    def _step(self, dense: int, longest: int, starts: tuple, rows: int, gathers: bool, num_computed: int | None,
              num_attending: int | None, num_drafted: Tensor, probs: Tensor | None) -> Generator[None, None, None]:
        """Pauses after each layer."""
        compiled, tree = self._level(rows), self.tree.cut(rows)
        nodes = self.tape.nodes if tree.size else None
        of = None if num_computed is None else self._chosen[:num_computed]
        attending = None if num_attending in (None, len(self.length)) else self._chosen[:num_attending]
        block = nodes.tokens if nodes else compiled(Speculator._begin)(self, tree, of)
        kv = TargetBlock(self.cache, self.view, take(self.length, of), nodes or tree, Extent(dense, longest, starts),
                         self.keep_queries, compiled, self.gathering.gather if gathers else None, of,
                         even=num_attending is not None, attending=attending)
        hidden = yield from self.model(block, kv, pauses=True)
        if self.hidden is not None:
            give(self.hidden[:, : tree.rows], of, hidden)
        compiled(Speculator._finish)(self, hidden, block, tree, take(num_drafted, of), probs, of)
        self.commit(self.length - self.beside if tree.branches else self.length)  # drafters know the chain alone

    def _begin(self, tree: TokenTree, of: Tensor | None) -> Tensor:
        """The pending token and those drafted after it; what lies behind them on the tape pads the block."""
        return self.tape.part(of).read(take(self.length, of), tree)

    def _finish(self, hidden: Tensor, block: Tensor, tree: TokenTree, num_drafted: Tensor,
                probs: Tensor | None, of: Tensor | None) -> None:
        """hidden [B, M, dim] after the tokens of block [B, M]: checks the drafted ones, emits, moves on."""
        tape, start = self.tape.part(of), take(self.length, of)
        n = tree.spine - 1 if self.drafters else 0
        logits = self.model.output(hidden)  # [B, M, V]
        ahead = torch.arange(n + 1, device=start.device)
        position = start[:, None] + 1 + ahead
        if tape.coupled:
            verdict, law = self._match(tape, logits, block, tree, num_drafted, start), None
        else:
            draft_probs = None if self.draft_probs is None else take(self.draft_probs[:, :n], of)
            verdict, law = self._verify(tape, logits[:, : n + 1], block[:, 1 : n + 1], draft_probs, num_drafted,
                                        position)
        beside, tokens = verdict.beside, verdict.tokens[:, : n + 1]
        # Cut at a limit fixed beforehand.
        num_emitted = torch.minimum(verdict.num_accepted + beside + 1, take(self.limit, of) - start)
        beside = torch.minimum(beside, (num_emitted - verdict.num_accepted).clamp(min=0))

        tape.write(tape.tokens, position, tokens)
        if probs is not None:  # rows past the last that is asked for all land in one that nobody reads
            place = (position - 1 - take(self.base, of)[:, None]).clamp(max=probs.shape[1] - 1)
            tape.write(probs, place, law)
        if self.level != FULL:
            missed = torch.where(verdict.num_accepted < take(self.asked, of), MISSED, BONUS)
            last = torch.where(beside > 0, LEAF, missed)[:, None]
            origin = torch.where(ahead < verdict.num_accepted[:, None], ACCEPTED, last)
            tape.write(tape.origin, position, torch.where(ahead <= verdict.num_accepted[:, None], origin, BONUS))
        self._keep(of, verdict.rows, logits, num_emitted)
        if tree.branches:  # what was kept moves to the slots of its positions
            self.beside.copy_(beside)
            first = (start - self.cache.prefix.len)[:, None]
            place = (verdict.num_accepted + 1).clamp(max=n)[:, None]  # of a leaf
            place = ahead.expand(len(start), -1) if tree.size else place
            self.cache.tail.move(first + verdict.rows.gather(1, place), first + place)
        counts = torch.stack([num_emitted, verdict.num_accepted, num_drafted, beside], 1)
        is_cut = verdict.num_accepted >= num_emitted  # see `Outbox.read`
        told = [torch.where(is_cut, num_emitted, count) for count in (verdict.num_accepted, num_drafted)]
        told = torch.where((num_emitted > 0)[:, None], torch.stack([*told, beside], 1), 0)
        give(self.totals, of, take(self.totals, of) + told)
        if self.outbox is not None:
            ranks = None if self.model.group is None else self._exchange(tokens, num_emitted)
            origins = tape.at(tape.origin, position[:, :n])
            finite = logits[:, 0].sum(-1, dtype=torch.float32).isfinite()  # of text alone: a draft is anything
            self.outbox.write(of, tokens, verdict.rows[:, : n + 1], origins, counts, finite, ranks)
        give(self.length, of, start + num_emitted)

    def _verify(self, tape: Tape, logits: Tensor, tokens: Tensor, draft_probs: Tensor | None, num_drafted: Tensor,
                position: Tensor):
        """By rejection: logits [B, n + 1, V], tokens [B, n], position [B, n + 1] -> the verdict, and the law."""
        n = tokens.shape[1]
        law = tape.law(logits, drafts=self.level != FULL)
        sample_u = tape.uniform(position, self.level, SAMPLE)
        accept_u = tape.uniform(position[:, :n], self.level, ACCEPT) if n else sample_u[:, :0]
        verdict = verify_chain(tokens, draft_probs, num_drafted, law, accept_u, sample_u)
        rows = torch.arange(n + 1, device=logits.device).expand(len(logits), -1)
        return TreeVerdict(*verdict, torch.zeros_like(num_drafted), rows), law

    def _match(self, tape: Tape, logits: Tensor, block: Tensor, tree: TokenTree, num_drafted: Tensor,
               start: Tensor) -> TreeVerdict:
        """By coupled draws: logits [B, M, V] after block [B, M], which begins at start [B]. A level that drafts notes
        what it would have drawn instead."""
        nodes = tape.nodes
        depths = nodes.depths if tree.size else tree.depths(block.device)
        position = start[:, None] + 1 + depths
        if self.level == FULL:
            drawn = tape.draw(tape.law(logits), position, self.level)
            return match_nodes(nodes, num_drafted, drawn) if tree.size else match_tree(tree, block, num_drafted, drawn)
        ranked = tape.rank(logits, position)  # [B, M, 1 + k]
        verdict = match_tree(tree, block, num_drafted, ranked[..., 0])
        kept = ranked.gather(1, verdict.rows[..., None].expand(-1, -1, ranked.shape[2]))
        tape.note(position[:, : tree.spine], kept)
        return verdict

    def _keep(self, of: Tensor | None, rows: Tensor, logits: Tensor, num_emitted: Tensor) -> None:
        """What others may ask for of this step, of the rows [B, n + 1] that its tokens were drawn from."""
        count, weight = rows.shape[1], self.cache.query_weight
        if self.tree.branches:  # otherwise each is its own
            self.drawn_from[:, :count] = rows
        if self.logits is not None:
            give(self.logits[:, :count], of, logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[2])))
        if self.keep_queries:
            emitted = torch.arange(count, device=rows.device) < num_emitted[:, None]
            weightless = weight.new_zeros(len(rows), weight.shape[1])
            give(weight, of, weightless.scatter_add(1, rows, emitted.to(weight.dtype)))

    def _exchange(self, tokens: Tensor, num_emitted: Tensor) -> tuple[Tensor, Tensor]:
        """[B], whether the ranks emit different tokens, by a digest of them; [2], the clock of the first rank."""
        weight = torch.arange(1, tokens.shape[1] + 2, device=tokens.device)
        digest = (torch.cat([tokens, num_emitted[:, None]], 1) * weight).sum(1)  # [B]
        told = self.model.group.all_gather(torch.cat([digest, self.outbox.clock])[None])  # [ranks, B + 2]
        digests = told[:, :-2]
        return (digests != digests[0]).any(0), told[0, -2:]
