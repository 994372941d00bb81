"""Drafters, and the speculator that checks them: the hierarchy is their composition. Knows nothing of text or stopping.

    inner = Speculator(target, retrieval view, drafters=(ModelDrafter(draft), ...), ...)
    outer = Speculator(target, full view,      drafters=(inner, ...), ...)

A speculator is itself a drafter: the tokens it emits follow exactly the law of its own model and view, and it says
which law that was. With no drafter it is autoregression. All levels write on one **tape**, the tokens of each row by
position, and each holds the position up to which it has come. A level's `length` counts the tokens whose K/V it has;
the token at index `length` is known and not yet computed ("pending").

Everything between two reads of `Speculator.outbox` is enqueued without the host waiting for the device.

Shapes: B batch, M rows of a block, n drafted tokens, at most M - 1, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import sampling
from .acceptance import verify_chain
from .cache import TargetBlock, TargetCache, View
from .draft_memory import DraftMemory
from .graphs import Compiler, Graphed, put
from .model import Transformer
from .sampling import ACCEPT, SAMPLE, SamplingParams

DRAFT, RETRIEVAL, FULL = 0, 1, 2  # levels: they key the noise
BONUS, ACCEPTED, MISSED = 0, 1, 2  # where a token of the inner level came from: not drafted, drafted, drafted in vain


class Drafter(Protocol):
    """Whether position i is drafted may depend on tokens before i and on the law at i, never on token i itself."""

    gamma: int  # how many tokens to propose; may change between proposals
    settled_count: bool  # how many it does propose follows from gamma and the tokens up to `start`

    def propose(self, start: Tensor, n: int, probs: Tensor | None) -> Tensor:
        """Drafts, on the tape, what follows its token at `start` [B], at most n tokens.

        Args:
            probs: [B, n + 1, V], written: row i the law that token i was drawn from; the last row may hold anything.
                None: the proposal must be deterministic.

        Returns:
            how many were drafted, [B]: a buffer, valid until the next call.
        """

    def commit(self, length: Tensor) -> None:
        """Of what was drafted, tokens before index `length` [B] were kept; the one at `length` is new."""


@dataclass
class Tape:
    """What the levels of one batch of conversations share."""

    tokens: Tensor  # [B, capacity]
    origin: Tensor  # [B, capacity]: BONUS, ACCEPTED or MISSED, for tokens that the inner level emitted
    params: SamplingParams
    vocab_size: int  # ids that the tokenizer can name; logits beyond are padding

    def law(self, logits: Tensor) -> Tensor:
        return sampling.probabilities(logits[..., : self.vocab_size], self.params)

    def uniform(self, position: Tensor, level: int, purpose: int) -> Tensor:
        return sampling.uniform(self.params.seed, position, level, purpose)

    def read(self, start: Tensor, count: int) -> Tensor:
        """`count` tokens from index start [B] on: [B, count]."""
        return self.tokens.gather(1, start[:, None] + torch.arange(count, device=start.device))

    def buffer(self, *shape: int, like: Transformer | None = None, dtype=torch.int64) -> Tensor:
        """A zero buffer with a row for each of the batch: int64, or wide enough for probabilities of `like`."""
        dtype = dtype if like is None else torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(len(self.tokens), *shape, dtype=dtype, device=self.tokens.device)


class ModelDrafter:
    """A small model, one token a step.

    Args:
        memory: what the model attends to.
        max_drafted: the most tokens of a proposal. gamma: how many to propose now.
    """

    settled_count = True
    # The most tokens that are settled between two proposals and that the draft has not seen: the last drafted one, a
    # bonus token of each level above, and the pending one.
    CATCH_UP_ROWS = 4

    def __init__(self, model: Transformer, memory: DraftMemory, tape: Tape, *, max_drafted: int, gamma: int,
                 compiler: Compiler):
        self.model, self.memory, self.tape, self.gamma = model, memory, tape, gamma
        self.length, self.head, self.base = tape.buffer(), tape.buffer(), tape.buffer()  # [B] each
        self.num_drafted = tape.buffer()
        self.noise = tape.buffer(max_drafted, dtype=torch.float64)
        self.levels = {rows: compiler.level(f"draft{rows}") for rows in (1, self.CATCH_UP_ROWS)}
        self.steps = {rows: level.step(self._step, num_lengths=2) for rows, level in self.levels.items()}

    def prefill(self, row: int, length: int, known: int = 0) -> None:
        """Takes in a tape of which the first `length` tokens are settled, and the first `known` not new to it."""
        self.memory.take_in(row, length, known)
        self.length[row].fill_(length)

    def rewind(self, row: int, length: int) -> None:
        """Back to the first `length` tokens, where `open` was called."""
        self.memory.rewind(row, length)
        self.length[row].fill_(length)

    def open(self, max_len: int) -> None:
        """Called once all prompts are in: no row's prefix will outgrow max_len."""
        self.memory.open(max_len)

    def flush(self, row: int, length: int) -> None:
        """The target has just flushed a row at `length`."""
        if self.memory.flush(row, length):
            self.length[row].fill_(length)

    def propose(self, start: Tensor, n: int, probs: Tensor | None) -> Tensor:
        self.base.copy_(start)
        self.head.copy_(start)
        count = min(self.gamma, n)
        self.num_drafted.fill_(count)
        for i in range(count):
            rows = self.CATCH_UP_ROWS if i == 0 else 1
            self.steps[rows](*self.memory.extent, rows, probs)
        return self.num_drafted

    def commit(self, length: Tensor) -> None:
        self.length.copy_(torch.minimum(self.length, length))

    def _step(self, dense_len: int, max_len: int, starts: tuple, rows: int, probs: Tensor) -> None:
        """Takes in the tape up to `head`, then draws the token at head + 1."""
        compiled = self.levels[rows]
        tokens = compiled(ModelDrafter._begin)(self, rows)
        kv = self.memory.block(self.length, rows, (dense_len, max_len, starts), compiled)
        hidden = self.model(tokens, kv)  # [B, rows, dim]
        compiled(ModelDrafter._finish)(self, hidden, probs)

    def _begin(self, rows: int) -> Tensor:
        if rows > 1:  # the first of a proposal draws the numbers for all
            ahead = self.base[:, None] + 1 + torch.arange(self.noise.shape[1], device=self.base.device)
            self.noise.copy_(self.tape.uniform(ahead, DRAFT, SAMPLE))
        index = self.length[:, None] + torch.arange(rows, device=self.base.device)
        return self.tape.tokens.gather(1, torch.minimum(index, self.head[:, None]))  # padded with a valid token

    def _finish(self, hidden: Tensor, probs: Tensor) -> None:
        tape, length, head = self.tape, self.length, self.head
        if hidden.shape[1] > 1:
            hidden = hidden.gather(1, (head - length)[:, None, None].expand(-1, 1, hidden.shape[2]))
        law = tape.law(self.model.output(hidden))  # [B, 1, V]
        at = (head - self.base)[:, None]
        token = sampling.sample(law, self.noise.gather(1, at))  # [B, 1]
        head += 1
        put(tape.tokens, head[:, None], token)
        put(probs, at, law)
        length.copy_(head)


class Speculator:
    """A model over one view of its cache, which checks what a drafter proposes and emits tokens of its own law.

    Args:
        rows: M, the block's size: the pending token and up to M - 1 drafted ones.
        level: keys the noise.
        drafters: those that may propose to this level, the first of them now. All hear what is committed.
        dense: the proposals come with laws; False: all of them are deterministic.
        gamma, rounds: in the role of a drafter: how many tokens to propose, and in how many rounds of its own (fixed
            beforehand, so that no host sync is needed).
        keep_queries: keep each layer's queries for retrieval.
        position: (length, limit), [B] each, to share with another speculator over the same conversation.
    """

    settled_count = False

    def __init__(self, model: Transformer, cache: TargetCache, view: View, tape: Tape, *, level: int, rows: int,
                 drafters: tuple[Drafter, ...] = (), dense: bool = True, gamma: int = 0, rounds: int = 0,
                 keep_queries: bool = False, keep_logits: bool = False, position=None, compiler: Compiler):
        self.model, self.cache, self.view, self.tape = model, cache, view, tape
        self.level, self.rows, self.drafters, self.keep_queries = level, rows, drafters, keep_queries
        self.drafter = drafters[0] if drafters else None
        self.gamma, self.rounds = gamma, rounds
        # No round moves `length` past `limit`.
        self.length, self.limit = position or (tape.buffer(), tape.buffer())
        self.base, self.num_drafted, self.asked = tape.buffer(), tape.buffer(), tape.buffer()
        self.draft_probs = tape.buffer(rows, tape.vocab_size, like=model) if drafters and dense else None
        self.logits = tape.buffer(rows, model.config.vocab_size, like=model) if keep_logits else None
        # M tokens, the origins of the drafted ones, then num_emitted, num_accepted, num_drafted of the last round, and
        # whether the ranks disagree on any of it.
        self.outbox = tape.buffer(2 * rows + 3)
        self.totals = tape.buffer(2)  # accepted, drafted since the counters were last zeroed
        self.speculate = True
        # Steps of no more rows than may be drafted, instead of M: on a CPU a padded row costs.
        self.tight = False
        self._nothing = tape.buffer()
        # How many were drafted, for `step`: one place for all drafters, or each would have graphs of its own.
        self.checked = tape.buffer()
        self.compiled = compiler.level(f"level{level}_rows{rows}")
        # What streams from the host takes a second, beside which enqueueing it anew takes nothing: no graph.
        self.step = self._step if view.offload is not None else self.compiled.step(self._step, num_lengths=2)
        self.on_piece = None  # see TargetBlock
        # As a drafter: one graph a round, however many there are. What is hardly tried is not worth one, its steps are.
        self._drafting_round = self.compiled.step(self._round, num_lengths=2, warm_up=4)

    def round(self, probs: Tensor | None = None) -> None:
        """Emits 1 to M tokens a row (none where `limit` is reached): on the tape, and in `outbox`.

        Args:
            probs: see `Drafter.propose`; written from row length - base on.
        """
        num_drafted = self._nothing  # without speculation it is the same step, hence the same bits
        self.asked.zero_()
        if self.speculate and self.drafter is not None:
            self.asked.fill_(self.drafter.gamma)
            num_drafted = self.drafter.propose(self.length, self.rows - 1, self.draft_probs)
        self.checked.copy_(num_drafted)
        self.step(*self.view.extent, self._rows_of(num_drafted), self.checked, probs)

    def look_ahead(self, extent: tuple) -> None:
        """Prepares `round` for another extent of the view, while the device is busy with the present one."""
        if isinstance(self.step, Graphed):
            self.step.prepare(*extent, self.rows, self.checked, None)

    def _rows_of(self, num_drafted: Tensor) -> int:
        """Rows of the step that checks these. The controller goes by how long rounds take, so of tokens that are
        discarded nothing may show in that: only a count that settled tokens decide is looked at."""
        if not self.tight:
            return self.rows
        if num_drafted is self._nothing:
            return 1
        if self.level == FULL and self.drafter.settled_count:
            return 1 + int(num_drafted.max())
        return 1 + min(self.drafter.gamma, self.rows - 1)

    def propose(self, start: Tensor, n: int, probs: Tensor | None) -> Tensor:
        torch.add(start, min(self.gamma, n), out=self.limit)
        self.base.copy_(start)
        self.length.copy_(start)
        source = self.drafters.index(self.drafter) if self.speculate and self.drafter is not None else -1
        for _ in range(self.rounds):
            self._drafting_round(*self.view.extent, probs, source, self.drafter.gamma if source >= 0 else 0)
        torch.sub(self.length, start, out=self.num_drafted)
        return self.num_drafted

    def _round(self, dense_len: int, max_len: int, starts: tuple, probs: Tensor | None, source: int,
               gamma_inner: int) -> None:
        """`round`, with all that its graph depends on as arguments."""
        self.round(probs)

    def commit(self, length: Tensor) -> None:
        for drafter in self.drafters:
            drafter.commit(length)

    def _step(self, dense_len: int, max_len: int, starts: tuple, rows: int, num_drafted: Tensor,
              probs: Tensor | None) -> None:
        compiled = self.compiled
        block = compiled(Speculator._begin)(self, rows)
        kv = TargetBlock(self.cache, self.view, self.length, rows, (dense_len, max_len, starts), self.keep_queries,
                         compiled, self.on_piece)
        compiled(Speculator._finish)(self, self.model(block, kv), block, num_drafted, probs)

    def _begin(self, rows: int) -> Tensor:
        """The pending token and those drafted after it; what lies behind them on the tape pads the block."""
        return self.tape.read(self.length, rows)

    def _finish(self, hidden: Tensor, block: Tensor, num_drafted: Tensor, probs: Tensor | None) -> None:
        """hidden [B, M, dim] after the tokens of block [B, M]: checks the drafted ones, emits, moves on."""
        tape, start = self.tape, self.length
        tokens = block[:, 1:] if self.drafters else block[:, :0]
        n = tokens.shape[1]
        logits = self.model.output(hidden)  # [B, M, V]
        if self.logits is not None:
            self.logits[:, : block.shape[1]] = logits
        law = tape.law(logits[:, : n + 1])
        ahead = torch.arange(n + 1, device=start.device)
        position = start[:, None] + 1 + ahead
        sample_u = tape.uniform(position, self.level, SAMPLE)
        accept_u = tape.uniform(position[:, :n], self.level, ACCEPT) if n else sample_u[:, :0]
        draft_probs = None if self.draft_probs is None else self.draft_probs[:, :n]
        verdict = verify_chain(tokens, draft_probs, num_drafted, law, accept_u, sample_u)
        num_emitted = torch.minimum(verdict.num_accepted + 1, self.limit - start)  # cut at a limit fixed beforehand

        put(tape.tokens, position, verdict.tokens)
        if probs is not None:  # rows past the last that is asked for all land in one that nobody reads
            place = (position - 1 - self.base[:, None]).clamp(max=probs.shape[1] - 1)
            put(probs, place, law)
            missed = torch.where(verdict.num_accepted < self.asked, MISSED, BONUS)[:, None]
            put(tape.origin, position, torch.where(ahead < verdict.num_accepted[:, None], ACCEPTED, missed))
        if self.level == FULL:
            self.outbox[:, self.rows : self.rows + n] = tape.origin.gather(1, position[:, :n])
        if self.keep_queries:
            kept = torch.arange(self.cache.query_weight.shape[1], device=start.device) < num_emitted[:, None]
            self.cache.query_weight.copy_(kept)
        counts = torch.stack([num_emitted, verdict.num_accepted, num_drafted], 1)
        self.totals += torch.where((num_emitted > 0)[:, None], counts[:, 1:], 0)
        self.outbox[:, : n + 1] = verdict.tokens
        self.outbox[:, -4:-1] = counts
        if self.level == FULL and self.model.group is not None:
            weight = torch.arange(1, n + 3, device=start.device)
            digest = (torch.cat([verdict.tokens, num_emitted[:, None]], 1) * weight).sum(1)  # [B]
            digests = self.model.group.all_gather(digest[None])  # [ranks, B]
            self.outbox[:, -1] = (digests != digests[0]).any(0)
        start += num_emitted
        self.commit(start)
