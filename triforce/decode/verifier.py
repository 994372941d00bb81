"""A level of the hierarchy: a model over one view of its cache, which checks what a drafter proposes.

    inner = Verifier(target, retrieval view, {"model": ModelDrafter(draft), ...}, ...)
    outer = Verifier(target, prefix,         {"retrieval": inner, ...}, ...)

A verifier is itself a drafter: the tokens it emits follow exactly the distribution of its own model and view, and it
says which one that was. With no drafter it is autoregression.

Everything between two reads of the outbox is enqueued without the host waiting for the device.

Shapes: B batch, S rows of a spine, M rows of its block (see tree.py), n drafted tokens, at most S - 1, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.blocks import TargetBlock
from ..cache.kv_cache import KVCache
from ..cache.store import Extent, View
from ..cache.views import RetrievalView
from ..model import Transformer
from ..runtime.graphs import Compiler, Graphed, put
from ..tree import Shape, TokenTree
from .acceptance import Verdict, match_nodes, match_tree, verify_chain
from .drafters.base import Drafter
from .plan import DraftPlan
from .sampling import ACCEPT, SAMPLE
from .tape import ACCEPTED, BONUS, FULL, LEAF, MISSED, Tape


class RowRound(NamedTuple):
    """What a round of the full level brought for one row."""

    tokens: list[int]  # that were emitted
    origins: list[int]  # of the drafted ones, in order, at least num_accepted
    num_accepted: int
    num_drafted: int
    diverged: bool  # the ranks disagree on it
    beside: int = 0  # accepted after those, beside the chain: a leaf, or rows of a branch
    is_finite: bool = True  # the logits behind the pending token are


class Outbox:
    """What a round leaves for the host, in one buffer: it is read once a round, and the host waits nowhere else."""

    def __init__(self, tape: Tape, rows: int):
        self.rows = rows
        # S tokens, S - 1 origins, four counts, whether the ranks disagree, whether logits are finite, two times
        self.buffer = tape.buffer(2 * rows + 7)
        self.clock = torch.zeros(2, dtype=torch.int64, device=self.buffer.device)  # what this rank has to tell

    def tell(self, timing) -> None:
        """Writes microseconds of the last round for the other ranks: one rank decides for all. None: 0."""
        times = (timing.drafting, timing.checking) if timing else (0, 0)
        for place, milliseconds in zip(self.clock, times, strict=True):
            place.fill_(int(1e3 * milliseconds))

    def write(self, tokens: Tensor, origins: Tensor, counts: Tensor, finite: Tensor,
              ranks: tuple[Tensor, Tensor] | None) -> None:
        """tokens [B, n + 1], origins [B, n], counts [B, 4]: emitted, accepted, drafted, accepted beside the chain.
        finite [B]: see `RowRound`.

        ranks: whether they disagree [B], and the first one's clock [2].
        """
        for i, part in enumerate((tokens, origins)):
            self.buffer[:, i * self.rows : i * self.rows + part.shape[1]] = part
        self.buffer[:, -8:-4] = counts
        self.buffer[:, -3] = finite
        if ranks is not None:
            disagree, clock = ranks
            self.buffer[:, -4] = disagree
            self.buffer[:, -2:] = clock

    def read(self) -> tuple[list[RowRound], list[float]]:
        """What each row brought, and the two times in milliseconds. Decoding waits for the device only here."""
        boxes = self.buffer.tolist()
        rounds = []
        for box in boxes:
            num_emitted, num_accepted, num_drafted, beside, diverged, finite = box[-8:-2]
            if num_accepted >= num_emitted:  # cut at the limit: what was checked beyond will be drafted again
                num_accepted = num_drafted = num_emitted
            rounds.append(RowRound(box[:num_emitted], box[self.rows : -8], num_accepted, num_drafted, bool(diverged),
                                   beside, bool(finite)))
        return rounds, [micros / 1e3 for micros in boxes[0][-2:]]


class Verifier(Drafter):
    """See the module.

    Args:
        view: of the cache's keys and values, which this level attends to besides the tail.
        tree: of the largest block: the pending token and up to S - 1 drafted ones, with their leaves.
        level: keys the noise.
        drafters: those that may propose to this level, by name. All hear what is committed.
        keep_queries: keep each layer's queries for retrieval.
        row_unit: see `cpu.row_unit`. None: padded steps have all rows.
    """

    settled_count = False

    def __init__(self, model: Transformer, cache: KVCache, view: View, tape: Tape, *, level: int, tree: TokenTree,
                 drafters: dict[str, Drafter], keep_queries: bool = False, row_unit: int | None = None,
                 compiler: Compiler):
        self.model, self.cache, self.view, self.tape = model, cache, view, tape
        rows = tree.spine
        self.row_unit = rows if row_unit is None or tree.branches else row_unit
        self.level, self.rows, self.drafters, self.keep_queries = level, rows, drafters, keep_queries
        self.tree = tree
        self.length, self.limit = tape.buffer(), tape.buffer()  # no round moves `length` past `limit`
        self.proposed_from, self.num_drafted, self.asked = tape.buffer(), tape.buffer(), tape.buffer()
        wants_probs = not tape.coupled and any(drafter.emits_probs for drafter in drafters.values())
        wide = torch.promote_types(model.dtype, torch.float32)  # as distributions are, see `Tape.probs`
        self.draft_probs = tape.buffer(rows, tape.vocab_size, dtype=wide) if wants_probs else None
        self.outbox = Outbox(tape, rows) if level == FULL else None
        # Hidden states of the last step, for whoever asks for its logits: they are small, and copied in every step.
        self.hidden = tape.buffer(tree.rows, model.config.dim, dtype=model.dtype) if level == FULL else None
        self.drawn_from = tape.buffer(rows)  # the rows of the last step that its tokens were drawn from
        self.num_rows = rows  # of the last step that checked
        self.totals = tape.buffer(3)  # accepted, drafted, accepted beside the chain, since they were last zeroed
        self._nothing, self.beside = tape.buffer(), tape.buffer()
        # How many tokens were drafted, for `step`: one place for all drafters, else each would have graphs of its own.
        self.checked = tape.buffer()
        self.compiler = compiler
        self.step = self.compiler.step(self._step, num_lengths=2)
        self.gathering: RetrievalView | None = None  # picks its tokens out of the next step's pieces
        # As a drafter: a graph serves any number of rounds. A round that is hardly tried is not worth one, its steps
        # are.
        self._drafting_round = self.compiler.step(self._round, num_lengths=2, warm_up=4)
        self._growing = self.compiler.step(self._grow, num_lengths=2)

    @property
    def is_recorded(self) -> bool:
        """Whether its steps become graphs."""
        return self._records(self.view.extent)

    def round(self, plan: DraftPlan, probs: Tensor | None = None) -> None:
        """Emits 1 to S tokens a row (none where `limit` is reached): on the tape, and in the outbox.

        Args:
            probs: see `Drafter.propose`; written from row length - `proposed_from` on.
        """
        self.check(plan, self.draft(plan), probs)

    def draft(self, plan: DraftPlan) -> Tensor:
        """The first part of a round: starts the step's copies, and has tokens proposed. Returns how many, [B]."""
        self.view.run_ahead()
        if plan.gamma == 0:
            return self._nothing  # without speculation it is the same step, hence the same bits
        if plan.drafter == "custom" and self.draft_probs is not None:
            self.draft_probs.zero_()  # what it does not write must not be what it wrote before
        return self.drafters[plan.drafter].propose(self.length, plan, self.draft_probs)

    def check(self, plan: DraftPlan, num_drafted: Tensor, probs: Tensor | None = None) -> None:
        """The other part of a round: checks the proposed tokens, and emits tokens."""
        self.asked.fill_(plan.gamma)
        self.checked.copy_(num_drafted)
        self.num_rows = self.rows_of(plan, num_drafted)
        if self.tree.cut(self.num_rows).size and not plan.branches:
            self.tape.nodes.take(*self.tape.read_spine(self.length, self.rows), Shape(self.rows - 1))  # a chain alone
        extent = self.view.extent
        step = self.step if self._records(extent) else self._step
        step(*extent, self.num_rows, self.gathering is not None, self.checked, probs)

    def _records(self, extent: Extent) -> bool:
        """Whether a step over an extent becomes a graph. A step that gathers for some rows does not: each set of rows
        would need its own graph."""
        if not isinstance(self.step, Graphed) or not self.view.worth_recording(extent):
            return False
        return self.gathering is None or len(self.gathering.awaiting) in (0, len(self.gathering.lens))

    def rows_of(self, plan: DraftPlan, num_drafted: Tensor) -> int:
        """Rows of the step that checks these.

        Measured times influence the plans, so a step's duration must not reveal tokens that are then discarded. It
        follows a count that settled tokens decide, or else the number of tokens that could have been drafted.
        """
        unit, drafted = self.row_unit if plan.padded else 1, plan.gamma
        if unit == self.rows or self.tree.size and plan.gamma:
            return self.rows
        if plan.gamma and self.level == FULL and self.drafters[plan.drafter].settled_count:
            drafted = int(num_drafted.max())
        return min(-(-(1 + drafted) // unit) * unit, self.rows)

    def propose(self, start: Tensor, plan: DraftPlan, probs: Tensor | None) -> Tensor:
        torch.add(start, plan.gamma, out=self.limit)
        self.proposed_from.copy_(start)
        self.length.copy_(start)
        for _ in range(plan.rounds):
            self._drafting_round(*self.view.extent, plan.inner, probs)
        torch.sub(self.length, start, out=self.num_drafted)
        if plan.branches:  # grow beside the chain that was drafted: each step drafts the next row of all of them
            nodes, spine = self.tape.nodes, self.tape.read_spine(self.proposed_from, self.tape.nodes.tree.spine)
            nodes.take(*spine, nodes.shape_for(plan.gamma, plan.branches)[0])
            for _ in range(nodes.steps):
                self._growing(*self.view.extent)
        return self.num_drafted

    def _grow(self, dense: int, longest: int) -> None:
        compiled, nodes = self.compiler, self.tape.nodes
        tokens = nodes.tokens[:, nodes.here()]
        extent = Extent(dense, longest)
        kv = TargetBlock(self.cache, self.view, self.proposed_from, nodes.growth, extent, False, compiled)
        hidden = self.model(tokens, kv)
        compiled(Verifier._finish_growth)(self, hidden)

    def _finish_growth(self, hidden: Tensor) -> None:
        nodes = self.tape.nodes
        position = self.proposed_from[:, None] + 1 + nodes.depths[nodes.here()]
        nodes.grow(self.tape.rank(self.model.output(hidden), position))

    def _round(self, dense: int, longest: int, plan: DraftPlan, probs: Tensor | None) -> None:
        """`round`, with all that its graph depends on as arguments."""
        self.round(plan, probs)

    def commit(self, length: Tensor) -> None:
        for drafter in self.drafters.values():
            drafter.commit(length)

    def _step(self, dense: int, longest: int, rows: int, gathers: bool, num_drafted: Tensor,
              probs: Tensor | None) -> None:
        compiled, tree = self.compiler, self.tree.cut(rows)
        nodes = self.tape.nodes if tree.size else None
        block = nodes.tokens if nodes else compiled(Verifier._begin)(self, tree)
        kv = TargetBlock(self.cache, self.view, self.length, nodes or tree, Extent(dense, longest),
                         self.keep_queries, compiled, self.gathering.gather if gathers else None)
        hidden = self.model(block, kv)
        if self.hidden is not None:
            self.hidden[:, : tree.rows] = hidden
        compiled(Verifier._finish)(self, hidden, block, tree, num_drafted, probs)
        self.commit(self.length - self.beside if tree.branches else self.length)  # drafters know the chain alone

    def _begin(self, tree: TokenTree) -> Tensor:
        """The pending token and those drafted after it; what lies behind them on the tape pads the block."""
        return self.tape.read(self.length, tree)

    def _finish(self, hidden: Tensor, block: Tensor, tree: TokenTree, num_drafted: Tensor,
                probs: Tensor | None) -> None:
        """hidden [B, M, dim] after the tokens of block [B, M]: checks the drafted ones, emits, moves on."""
        tape, start = self.tape, self.length
        n = tree.spine - 1 if self.drafters else 0
        logits = self.model.output(hidden)  # [B, M, V]
        ahead = torch.arange(n + 1, device=start.device)
        position = start[:, None] + 1 + ahead
        if tape.coupled:
            verdict, own_probs = self._match(tape, logits, block, tree, num_drafted, start), None
        else:
            draft_probs = None if self.draft_probs is None else self.draft_probs[:, :n]
            own_probs = tape.probs(logits[:, : n + 1])
            sample_u = tape.uniform(position, self.level, SAMPLE)
            accept_u = tape.uniform(position[:, :n], self.level, ACCEPT) if n else sample_u[:, :0]
            verdict = verify_chain(block[:, 1 : n + 1], draft_probs, num_drafted, own_probs, accept_u, sample_u)
        beside, tokens = verdict.beside, verdict.tokens[:, : n + 1]
        # Cut at a limit fixed beforehand.
        num_emitted = torch.minimum(verdict.num_accepted + beside + 1, self.limit - start)
        beside = torch.minimum(beside, (num_emitted - verdict.num_accepted).clamp(min=0))

        put(tape.tokens, position, tokens)
        if probs is not None:  # rows past the last one asked for all land in one that nobody reads
            place = (position - 1 - self.proposed_from[:, None]).clamp(max=probs.shape[1] - 1)
            put(probs, place, own_probs)
        if self.level != FULL:
            missed = torch.where(verdict.num_accepted < self.asked, MISSED, BONUS)
            last = torch.where(beside > 0, LEAF, missed)[:, None]
            origin = torch.where(ahead < verdict.num_accepted[:, None], ACCEPTED, last)
            put(tape.origin, position, torch.where(ahead <= verdict.num_accepted[:, None], origin, BONUS))
        self._keep(verdict.rows, num_emitted)
        if tree.branches:  # what was kept moves to the slots of its positions
            self.beside.copy_(beside)
            first = (start - self.cache.prefix.len)[:, None]
            place = (verdict.num_accepted + 1).clamp(max=n)[:, None]  # of a leaf
            place = ahead.expand(len(start), -1) if tree.size else place
            self.cache.tail.move(first + verdict.rows.gather(1, place), first + place)
        counts = torch.stack([num_emitted, verdict.num_accepted, num_drafted, beside], 1)
        is_cut = verdict.num_accepted >= num_emitted  # see `Outbox.read`
        told = [torch.where(is_cut, num_emitted, count) for count in (verdict.num_accepted, num_drafted)]
        self.totals += torch.where((num_emitted > 0)[:, None], torch.stack([*told, beside], 1), 0)
        if self.outbox is not None:
            ranks = None if self.model.group is None else self._exchange(tokens, num_emitted)
            origins = tape.at(tape.origin, position[:, :n])
            finite = logits[:, 0].sum(-1, dtype=torch.float32).isfinite()  # of text alone: a draft may be anything
            self.outbox.write(tokens, origins, counts, finite, ranks)
        self.length.copy_(start + num_emitted)

    def _match(self, tape: Tape, logits: Tensor, block: Tensor, tree: TokenTree, num_drafted: Tensor,
               start: Tensor) -> Verdict:
        """By coupled draws: logits [B, M, V] after block [B, M], which begins at start [B]. A level that drafts notes
        what it would have drawn instead."""
        nodes = tape.nodes
        depths = nodes.depths if tree.size else tree.depths(block.device)
        position = start[:, None] + 1 + depths
        if self.level == FULL:
            drawn = tape.draw(tape.probs(logits), position, self.level)
            return match_nodes(nodes, num_drafted, drawn) if tree.size else match_tree(tree, block, num_drafted, drawn)
        ranked = tape.rank(logits, position)  # [B, M, 1 + k]
        verdict = match_tree(tree, block, num_drafted, ranked[..., 0])
        kept = ranked.gather(1, verdict.rows[..., None].expand(-1, -1, ranked.shape[2]))
        tape.note(position[:, : tree.spine], kept)
        return verdict

    def _keep(self, rows: Tensor, num_emitted: Tensor) -> None:
        """Keeps what others may ask for of this step, for the rows [B, n + 1] that its tokens were drawn from."""
        count, weight = rows.shape[1], self.cache.query_weight
        if self.tree.branches:  # otherwise each is its own
            self.drawn_from[:, :count] = rows
        if self.keep_queries:
            emitted = torch.arange(count, device=rows.device) < num_emitted[:, None]
            weight.copy_(torch.zeros_like(weight).scatter_add(1, rows, emitted.to(weight.dtype)))

    def _exchange(self, tokens: Tensor, num_emitted: Tensor) -> tuple[Tensor, Tensor]:
        """[B], whether the ranks emit different tokens, by a digest of them; [2], the clock of the first rank."""
        weight = torch.arange(1, tokens.shape[1] + 2, device=tokens.device)
        digest = (torch.cat([tokens, num_emitted[:, None]], 1) * weight).sum(1)  # [B]
        told = self.model.group.all_gather(torch.cat([digest, self.outbox.clock])[None])  # [ranks, B + 2]
        digests = told[:, :-2]
        return (digests != digests[0]).any(0), told[0, -2:]
