"""What a draft model keeps of a conversation: a sink and the newest tokens, or as much as a target keeps.

Exactness never depends on it. Knows nothing of drafting: it takes in tokens that are settled, and says what a step of
the model attends to.

Shapes: B batch.
"""

from typing import Protocol

import torch
from torch import Tensor

from ..graphs import Compiler
from ..kv.blocks import TargetBlock, prefill_blocks
from ..kv.store import Extent
from ..kv.streaming import StreamingBlock, StreamingCache
from ..kv.target import TargetCache
from ..kv.views import RetrievalView
from ..model import Transformer
from ..tree import TokenTree


class DraftMemory(Protocol):
    extent: Extent  # how much of the cache is attended to now; a recorded step serves one extent
    nbytes: int

    def open(self, max_len: int) -> None:
        """Called once all prompts are in: no row's prefix will outgrow max_len."""

    def rewind(self, row: int, length: int) -> None:
        """Back to the first `length` tokens, where `open` was called."""

    def take_in(self, row: int, length: int, known: int = 0) -> None:
        """The first `length` tokens of a row of the tape are settled, and the first `known` of them not new."""

    def flush(self, row: int, length: int) -> bool:
        """The target has just flushed at `length`. Returns whether all tokens before are taken in now."""

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        """`kv` of a step: `rows` tokens a row of the batch, at consecutive positions from start [B]."""


class StreamingMemory:
    """The first and the newest tokens, at positions that a model of short context knows: see `StreamingCache`."""

    PREFILL_ROWS = 64
    extent = Extent()

    def __init__(self, model: Transformer, tokens: Tensor, cache: StreamingCache):
        """tokens: [B, capacity], the tape."""
        self.model, self.tokens, self.cache = model, tokens, cache
        self.nbytes = cache.nbytes

    def open(self, max_len: int) -> None:
        """It never grows."""

    def take_in(self, row: int, length: int, known: int = 0) -> None:
        # A window's worth of context per layer reaches as far as attention over the window can look back.
        span = min(self.model.config.n_layer, 4) * self.cache.window_size
        cache, rows = self.cache.row(row), self.PREFILL_ROWS
        anew = known == 0 or known < length - span
        first = max(length - span, 0) if anew else known
        starts = list(range(first, length, rows))
        if anew:
            for tensor in (*cache.k, *cache.v):  # so that what is drafted depends on this tape alone
                tensor.zero_()
        if anew and first > 0:
            starts.insert(0, 0)  # the attention sinks
        for start in starts:
            tokens = self.tokens[row, None, start : min(start + rows, length)]
            position = torch.full((1,), start, device=tokens.device)
            self.model(tokens, StreamingBlock(cache, position, tokens.shape[1]))

    def rewind(self, row: int, length: int) -> None:
        self.take_in(row, length)

    def flush(self, row: int, length: int) -> bool:
        return False

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        return StreamingBlock(self.cache, start, rows, compiled)


class LongMemory:
    """All tokens, in a cache like the target's: attended to whole ("full"), or those that the prompt's end attends to
    and the newest ("snapkv")."""

    def __init__(self, model: Transformer, tokens: Tensor, *, kind: str, capacity: int, block_size: int,
                 flush_interval: int, budget: int, chunk_size: int, recent: float, prefill_chunk_size: int,
                 compiler: Compiler, runs_on: torch.device):
        """tokens: [B, ...], the tape. budget, chunk_size, recent: of the view of "snapkv"; see kv/views.py."""
        self.model, self.tokens, self.prefill_chunk_size = model, tokens, prefill_chunk_size
        common = {"batch": len(tokens), "device": model.device, "dtype": model.dtype}
        self.cache = TargetCache(model.config, model.rope, capacity=capacity, block_size=block_size, chunk_size=0,
                                 flush_interval=flush_interval, budget=budget if kind == "snapkv" else 0,
                                 runs_on=runs_on, **common)
        self.choice: RetrievalView | None = None
        if kind == "snapkv":
            self.choice = RetrievalView(self.cache, budget=budget, chunk_size=chunk_size, recent=recent, kind=kind,
                                        compiler=compiler, **common)
        self.view = self.choice or self.cache.prefix
        self.nbytes = self.cache.nbytes + (self.choice.nbytes if self.choice else 0)
        self._opened: list[Tensor] = []  # the tails at `open`

    @property
    def extent(self) -> Extent:
        return self.view.extent

    def open(self, max_len: int) -> None:
        self.cache.prefix.open(max_len)
        self._opened = [tail.clone() for tail in self.cache.tail.kv]

    def take_in(self, row: int, length: int, known: int = 0) -> None:
        """Computes anew what lies in the tail: the model is small, and its last tokens may not have been settled. What
        lies in the prefix was."""
        cache, interval = self.cache, self.cache.flush_interval
        start = cache.lens[row] if known else 0
        if length > start:
            blocks = prefill_blocks(cache, range(row, row + 1), start, length, self.prefill_chunk_size,
                                    keep_queries=start == 0)
            self.model.prefill(self.tokens[row, None, start:length], blocks, cache_only=True)
        if self.choice and start > 0:
            for end in range(start + interval, length + 1, interval):  # one after the other
                cache.prefix.truncate(row, end)
                for i in range(self.model.config.n_layer):
                    cache.tail.store(i, row, 0, cache.prefix.load(i, row, end - interval, end))
                self.choice.flush(row)
        cache.truncate(row, length)
        if self.choice and start == 0:
            self.choice.rebuild(row)

    def rewind(self, row: int, length: int) -> None:
        self.cache.prefix.truncate(row, self.cache.whole(length))
        for i, opened in enumerate(self._opened):
            self.cache.tail.store(i, row, 0, opened[:, row])
        if self.choice:
            self.choice.rebuild(row)  # from the prompt's queries: the same selection

    def flush(self, row: int, length: int) -> bool:
        self.take_in(row, length, length)
        return True

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        return TargetBlock(self.cache, self.view, start, TokenTree(rows), extent, False, compiled)
