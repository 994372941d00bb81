"""A small model as a drafter: it draws one token a step, and keeps a sink and the newest tokens.

Shapes: B batch, M tokens of a row, V vocabulary.
"""

from collections import defaultdict

import torch
from torch import Tensor

from ...cache.store import runs
from ...cache.streaming import StreamingBlock, StreamingCache, StreamingPrefill
from ...model import Transformer
from ...runtime.graphs import Compiler, put, staged
from .. import sampling
from ..plan import DraftPlan
from ..sampling import SAMPLE
from ..tape import DRAFT, Tape
from .base import Drafter


class ModelDrafter(Drafter):
    """See the module.

    Args:
        cache: what the model attends to. Exactness never depends on it.
        max_drafted: the most tokens of a proposal.
        prefill_chunk_size: tokens of all rows that are read together, or those of one row.
    """

    # The most tokens that are settled between two proposals and that the draft has not seen: the last drafted one, a
    # bonus token of each level above, and the pending one.
    CATCH_UP_ROWS = 4
    STEP_ROWS = 64  # that one step may take in: so many can be written ahead of what is attended to

    def __init__(self, model: Transformer, cache: StreamingCache, tape: Tape, *, max_drafted: int,
                 prefill_chunk_size: int, compiler: Compiler):
        self.model, self.cache, self.tape, self.prefill_chunk_size = model, cache, tape, prefill_chunk_size
        self.nbytes, self.weight_bytes, self.num_layers = cache.nbytes, model.weight_bytes, model.config.n_layer
        self.length, self.head, self.base = tape.buffer(), tape.buffer(), tape.buffer()  # [B] each
        self.num_drafted = tape.buffer()
        self.noise = None if tape.coupled else tape.buffer(max_drafted, dtype=torch.float64)
        self.compiler = compiler
        self.step = compiler.step(self._step, num_lengths=0)
        self._reading = compiler.step(self._read, num_lengths=0)
        self._seen = [0] * len(tape.tokens)  # tokens of each row that it has taken in for certain
        self._awaited: dict[int, int] = {}  # by row: tokens to take in at `open`
        self._left_out = False  # it was, in the last round
        self._departed: set[int] = set()  # rows whose text went another way in the last round

    def prefill(self, row: int, length: int, fresh: bool = True) -> None:
        if fresh:
            self._seen[row] = 0  # here, since an interrupt may come before `open`
        self._awaited[row] = length

    def open(self, ends: list[int]) -> None:
        self._take_in(self._awaited)
        self._awaited = {}

    def _take_in(self, lengths: dict[int, int]) -> None:
        """Takes in the first tokens of these rows. lengths: their numbers. Rows ascend."""
        alike, most = defaultdict(list), self.cache.num_sink + self.cache.window_size
        for row, length in lengths.items():
            known, self._seen[row] = self._seen[row], 0  # an interrupt leaves what has to be read anew
            if known == 0 or length - known >= self.cache.window_size:  # nothing stays
                alike[min(length, most)].append(row)
                continue
            for start in range(known, length, self.cache.slack):
                tokens = self.tape.tokens[row, None, start : min(start + self.cache.slack, length)]
                at = torch.full((1,), start, device=tokens.device)
                self.model(tokens, StreamingBlock(self.cache.part(slice(row, row + 1)), at, tokens.shape[1]))
        for count in filter(None, alike):
            together = max(self.prefill_chunk_size // count, 1)  # rows side by side
            for run in runs(alike[count]):
                for first in range(run.start, run.stop, together):
                    some = range(first, min(first + together, run.stop))
                    self._take_in_anew(slice(first, some.stop), [lengths[row] for row in some], count)
        for row, length in lengths.items():
            self.length[row].fill_(length)
            self._seen[row] = length

    def _take_in_anew(self, rows: slice, lengths: list[int], count: int) -> None:
        """The first and the newest of a row's tokens, `count` in all, as a text of their own."""
        cache, tape = self.cache.part(rows), self.tape.tokens[rows]
        for tensor in cache.tensors():  # what a text that was no number has left would hide behind no mask
            tensor.zero_()
        place = torch.arange(count, device=tape.device)
        moved = staged([length - count for length in lengths], tape.device).to(tape.device, non_blocking=True)
        positions = place + moved[:, None] * (place >= cache.num_sink)  # [B, M]
        self.model.prefill(tape.gather(1, positions), [(0, count, StreamingPrefill(cache, positions))], cache_only=True)

    def catch_up(self, lengths: list[int]) -> None:
        behind = max(length - seen for length, seen in zip(lengths, self._seen, strict=True))
        if self._left_out and not self._departed and self.compiler.recorder and behind <= self.STEP_ROWS:
            self.head.copy_(staged(lengths, self.head.device), non_blocking=True)
            self._reading()
        else:
            self._take_in({row: length for row, length in enumerate(lengths)
                           if length > self._seen[row] and (self._left_out or row in self._departed)})
        self._seen, self._left_out = list(lengths), False
        self._departed.clear()

    def leave_out(self) -> None:
        self._left_out = True

    def depart(self, row: int) -> None:
        self._departed.add(row)

    def propose(self, start: Tensor, plan: DraftPlan, probs: Tensor | None) -> Tensor:
        self.base.copy_(start)
        self.head.copy_(start)
        self.num_drafted.fill_(plan.gamma)
        for i in range(plan.gamma):
            # Compiled steps have one size.
            self.step(self.CATCH_UP_ROWS if i == 0 or self.compiler.compiles else 1, probs)
        return self.num_drafted

    def commit(self, length: Tensor) -> None:
        self.length.copy_(torch.minimum(self.length, length))

    def _step(self, rows: int, probs: Tensor | None) -> None:
        """Takes in the tape up to `head`, then draws the token at head + 1."""
        compiled = self.compiler
        tokens = compiled(ModelDrafter._begin)(self, rows)
        kv = StreamingBlock(self.cache, self.length, rows, compiled)
        hidden = self.model(tokens, kv)  # [B, rows, dim]
        compiled(ModelDrafter._finish)(self, hidden, probs)

    def _read(self) -> None:
        """Takes in the tape before `head`, at most `STEP_ROWS` tokens. It is recorded as it is written: it runs between
        rounds that take other steps, too seldom for compiling it."""
        rows = self.STEP_ROWS
        index = self.length[:, None] + torch.arange(rows, device=self.head.device)
        tokens = self.tape.tokens.gather(1, torch.minimum(index, self.head[:, None]))
        self.model(tokens, StreamingBlock(self.cache, self.length, rows))
        self.length.copy_(self.head)

    def _begin(self, rows: int) -> Tensor:
        if self.noise is not None and rows > 1:  # the first of a proposal draws the numbers for all
            ahead = self.base[:, None] + 1 + torch.arange(self.noise.shape[1], device=self.base.device)
            self.noise.copy_(self.tape.uniform(ahead, DRAFT, SAMPLE))
        index = self.length[:, None] + torch.arange(rows, device=self.base.device)
        return self.tape.tokens.gather(1, torch.minimum(index, self.head[:, None]))  # padded with a valid token

    def _finish(self, hidden: Tensor, probs: Tensor | None) -> None:
        tape, length, head = self.tape, self.length, self.head
        if hidden.shape[1] > 1:
            hidden = hidden.gather(1, (head - length)[:, None, None].expand(-1, 1, hidden.shape[2]))
        logits, at, position = self.model.output(hidden), (head - self.base)[:, None], head[:, None] + 1
        if self.noise is None:
            token = tape.note(position, tape.rank(logits, position))  # [B, 1]
        else:
            own_probs = tape.probs(logits)  # [B, 1, V]
            token = sampling.sample(own_probs, self.noise.gather(1, at))
            if probs is not None:
                put(probs, at, own_probs)
        head += 1
        put(tape.tokens, head[:, None], token)
        length.copy_(head)
