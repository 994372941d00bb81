"""Drafters, and the speculator that checks them: the hierarchy is their composition. Knows nothing of text or stopping.

    inner = Speculator(target, retrieval view, drafter=ModelDrafter(draft), ...)
    outer = Speculator(target, full view,      drafter=inner, ...)

A speculator is itself a drafter: the tokens it emits follow exactly the law of its own model and view, and it says
which law that was. With no drafter it is autoregression. All levels write on one **tape**, the tokens of each row by
position, and each holds the position up to which it has come. A level's `length` counts the tokens whose K/V it has;
the token at index `length` is known and not yet computed ("pending").

Everything between two reads of `Speculator.outbox` is enqueued without the host waiting for the device.

Shapes: B batch, M rows of a block, n = M - 1 drafted tokens at most, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import sampling
from .acceptance import verify_chain
from .cache import StreamingBlock, StreamingCache, TargetBlock, TargetCache, View, static
from .model import Transformer
from .sampling import ACCEPT, SAMPLE, SamplingParams

DRAFT, RETRIEVAL, FULL = 0, 1, 2  # levels: they key the noise


class Proposal(NamedTuple):
    """What a drafter proposes to follow the pending token. Buffers, valid until the drafter is next called."""

    tokens: Tensor  # [B, n]; those from num_drafted on are padding
    probs: Tensor | None  # [B, n or more, V]: row i is the law that tokens[:, i] was drawn from; None: deterministic
    num_drafted: Tensor  # [B]
    parents: Tensor | None = None  # None: a chain


class Drafter(Protocol):
    """Whether position i is drafted may depend on tokens before i and on the law at i, never on token i itself."""

    probs: Tensor | None

    def prefill(self, row: int, length: int) -> None:
        """The first `length` tokens of a row's tape are settled: take them in."""

    def propose(self, start: Tensor) -> Proposal:
        """Drafts what follows the tape's token at `start` [B]; writes the draft on the tape as well."""

    def commit(self, length: Tensor) -> None:
        """Of what was drafted, tokens before index `length` [B] were kept; the one at `length` is new."""


@dataclass
class Tape:
    """What the levels of one batch of conversations share."""

    tokens: Tensor  # [B, capacity]
    params: SamplingParams
    vocab_size: int  # ids that the tokenizer can name; logits beyond are padding
    filtered: bool = True  # False: no row uses top-k or top-p, and the sort may be skipped

    def law(self, logits: Tensor) -> Tensor:
        return sampling.probabilities(logits[..., : self.vocab_size], self.params, self.filtered)

    def uniform(self, position: Tensor, level: int, purpose: int) -> Tensor:
        return sampling.uniform(self.params.seed, position, level, purpose)

    def after(self, start: Tensor, count: int) -> Tensor:
        """The `count` tokens after index start [B]: [B, count]."""
        return self.tokens.gather(1, start[:, None] + 1 + torch.arange(count, device=start.device))

    def buffer(self, *shape: int, like: Transformer | None = None) -> Tensor:
        """A static zero buffer: int64, or wide enough for probabilities of `like`."""
        dtype = torch.int64 if like is None else torch.promote_types(like.dtype, torch.float32)
        return static(torch.zeros(len(self.tokens), *shape, dtype=dtype, device=self.tokens.device))


class ModelDrafter:
    """A small model over a streaming cache, one token a step.

    Args:
        max_drafted: n of the level that checks it. gamma: how many tokens to propose, at most max_drafted.
    """

    # The most tokens that are settled between two proposals and that the draft has not seen: the last drafted one, a
    # bonus token of each level above, and the pending one.
    CATCH_UP_ROWS = 4
    PREFILL_ROWS = 64

    def __init__(self, model: Transformer, cache: StreamingCache, tape: Tape, *, max_drafted: int, gamma: int,
                 compiler):
        self.model, self.cache, self.tape, self.gamma = model, cache, tape, gamma
        self.length, self.head, self.base = tape.buffer(), tape.buffer(), tape.buffer()  # [B] each
        self.num_drafted = tape.buffer()
        self.max_drafted = max_drafted
        self.probs = tape.buffer(max_drafted, tape.vocab_size, like=model)
        self.step = compiler(self._step, "draft")

    def prefill(self, row: int, length: int) -> None:
        # A window's worth of context per layer reaches as far as attention over the window can look back.
        span = min(self.model.config.n_layer, 4) * self.cache.window_size
        cache, rows = self.cache.row(row), self.PREFILL_ROWS
        for tensor in (*cache.k, *cache.v):  # so that what is drafted depends on this tape alone
            tensor.zero_()
        first = max(length - span, 0)
        starts = list(range(first, length, rows))
        if first > 0:
            starts.insert(0, 0)  # the attention sinks
        for start in starts:
            tokens = self.tape.tokens[row, None, start : min(start + rows, length)]
            position = torch.full((1,), start, device=tokens.device)
            self.model(tokens, StreamingBlock(cache, position, tokens.shape[1]))
        self.length[row].fill_(length)

    def propose(self, start: Tensor) -> Proposal:
        self.base.copy_(start)
        self.head.copy_(start)
        self.num_drafted.fill_(self.gamma)
        for i in range(self.gamma):
            self.step(self.CATCH_UP_ROWS if i == 0 else 1)
        return Proposal(self.tape.after(start, self.max_drafted), self.probs, self.num_drafted)

    def commit(self, length: Tensor) -> None:
        self.length.copy_(torch.minimum(self.length, length))

    def _step(self, rows: int) -> None:
        """Takes in the tape up to `head`, then draws the token at head + 1."""
        tape, length, head = self.tape, self.length, self.head
        index = length[:, None] + torch.arange(rows, device=length.device)
        tokens = tape.tokens.gather(1, torch.minimum(index, head[:, None]))  # padded with a valid token
        hidden = self.model(tokens, StreamingBlock(self.cache, length, rows))  # [B, rows, dim]
        last = (head - length)[:, None, None].expand(-1, 1, hidden.shape[2])
        law = tape.law(self.model.output(hidden.gather(1, last)))  # [B, 1, V]
        position = head[:, None] + 1
        token = sampling.sample(law, tape.uniform(position, DRAFT, SAMPLE))  # [B, 1]
        tape.tokens.scatter_(1, position, token)
        self.probs.scatter_(1, (head - self.base)[:, None, None].expand(-1, 1, law.shape[2]), law)
        length.copy_(position[:, 0])
        head.copy_(position[:, 0])


class Speculator:
    """A model over one view of its cache, which checks what a drafter proposes and emits tokens of its own law.

    Args:
        rows: M, the block's size: the pending token and up to M - 1 drafted ones.
        level: keys the noise.
        max_drafted, gamma, rounds: in the role of a drafter: n of the level above, how many tokens to propose, and
            in how many rounds of its own (fixed, so that no host sync is needed).
        keep_queries: keep each layer's queries for retrieval.
        position: (length, limit), [B] each, to share with another speculator over the same conversation.
    """

    def __init__(self, model: Transformer, cache: TargetCache, view: View, tape: Tape, *, level: int, rows: int,
                 drafter: Drafter | None = None, max_drafted: int = 0, gamma: int = 0, rounds: int = 0,
                 keep_queries: bool = False, keep_logits: bool = False, position=None, compiler):
        self.model, self.cache, self.view, self.tape = model, cache, view, tape
        self.level, self.rows, self.drafter, self.keep_queries = level, rows, drafter, keep_queries
        self.max_drafted, self.gamma, self.rounds = max_drafted, gamma, rounds
        # No round moves `length` past `limit`.
        self.length, self.limit = position or (tape.buffer(), tape.buffer())
        self.base, self.num_drafted = tape.buffer(), tape.buffer()
        self.probs = tape.buffer(max_drafted + 1, tape.vocab_size, like=model) if max_drafted else None
        self.logits = tape.buffer(rows, model.config.vocab_size, like=model) if keep_logits else None
        self.outbox = tape.buffer(rows + 3)  # M tokens, then num_emitted, num_accepted, num_drafted of the last round
        self.totals = tape.buffer(2)  # accepted, drafted since the counters were last zeroed
        self.speculate = True
        self._nothing = tape.buffer(rows - 1), tape.buffer()
        self.step = compiler(self._step, f"level{level}_rows{rows}")

    def prefill(self, row: int, length: int) -> None:
        if self.drafter is not None:
            self.drafter.prefill(row, length)

    def round(self) -> None:
        """Emits 1 to M tokens a row (none where `limit` is reached): on the tape, and in `outbox`."""
        tokens, probs, num_drafted = None, None, None
        if self.drafter is not None:
            if self.speculate:
                tokens, probs, num_drafted, _ = self.drafter.propose(self.length)
            else:  # the same step, hence the same bits, with nothing to accept
                (tokens, num_drafted), probs = self._nothing, self.drafter.probs
        self.step(self.view.dense_len, self.view.max_len, tokens, probs, num_drafted)

    def propose(self, start: Tensor) -> Proposal:
        self.base.copy_(start)
        self.length.copy_(start)
        torch.add(start, self.gamma, out=self.limit)
        for _ in range(self.rounds):
            self.round()
        torch.sub(self.length, start, out=self.num_drafted)
        return Proposal(self.tape.after(start, self.max_drafted), self.probs, self.num_drafted)

    def commit(self, length: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.commit(length)

    def _step(self, dense_len: int, max_len: int, tokens: Tensor | None, probs: Tensor | None,
              num_drafted: Tensor | None) -> None:
        tape, start = self.tape, self.length
        rows = torch.arange(self.rows, device=start.device)
        pending = tape.tokens.gather(1, start[:, None])
        if tokens is None:  # autoregression, in a block padded to M rows
            block = pending.expand(-1, self.rows)
            tokens, num_drafted = pending[:, :0], torch.zeros_like(start)
        else:
            block = torch.cat([pending, tokens], 1)  # [B, M]
        n = tokens.shape[1]
        kv = TargetBlock(self.cache, self.view, start, self.rows, dense_len, max_len, self.keep_queries)
        logits = self.model.output(self.model(block, kv))  # [B, M, V]
        if self.logits is not None:
            self.logits.copy_(logits)
        law = tape.law(logits[:, : n + 1])
        position = start[:, None] + 1 + rows[: n + 1]
        accept_u = tape.uniform(position[:, :n], self.level, ACCEPT)
        sample_u = tape.uniform(position, self.level, SAMPLE)
        verdict = verify_chain(tokens, None if probs is None else probs[:, :n], num_drafted, law, accept_u, sample_u)
        num_emitted = torch.minimum(verdict.num_accepted + 1, self.limit - start)  # cut at a limit fixed beforehand

        tape.tokens.scatter_(1, position, verdict.tokens)
        if self.probs is not None:  # rows past the last that is asked for all land in one that nobody reads
            at = (position - 1 - self.base[:, None]).clamp(max=self.max_drafted)
            self.probs.scatter_(1, at[..., None].expand_as(law), law)
        if self.keep_queries:
            self.cache.query_weight.copy_(rows < num_emitted[:, None])
        live = num_emitted > 0
        counts = torch.stack([num_emitted, verdict.num_accepted, num_drafted], 1)
        self.totals += torch.where(live[:, None], counts[:, 1:], 0)
        self.outbox[:, : n + 1] = verdict.tokens
        self.outbox[:, self.rows :] = counts
        start += num_emitted
        self.commit(start)
