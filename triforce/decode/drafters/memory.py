"""What a draft model keeps of a conversation: a sink and the newest tokens, or as much as a target keeps.

Exactness never depends on it. It takes in tokens that are settled, and says what a step of the model attends to.

Shapes: B batch.
"""

from collections import defaultdict

import torch
from torch import Tensor

from ...cache.blocks import TargetBlock, prefill_blocks
from ...cache.kv_cache import KVCache
from ...cache.store import Extent, runs
from ...cache.streaming import StreamingBlock, StreamingCache
from ...cache.views import RetrievalView
from ...model import Transformer
from ...runtime.graphs import Compiler, staged
from ...tree import TokenTree


class StreamingMemory:
    """The first and the newest tokens, at positions that a model of short context knows: see `StreamingCache`."""

    PREFILL_ROWS = 64
    extent = Extent()  # how much of the cache is attended to; a recorded step serves one extent
    goes_on = True  # with a text that has become longer; else each prompt's end chooses anew what is attended to

    def __init__(self, model: Transformer, tokens: Tensor, cache: StreamingCache):
        """tokens: [B, capacity], the tape."""
        self.model, self.tokens, self.cache = model, tokens, cache
        self.nbytes = cache.nbytes

    def open(self, ends: list[int]) -> None:
        """Called once all prompts are in: no row's prefix will outgrow its end."""

    def take_in(self, rows: dict[int, tuple[int, int]]) -> None:
        """rows: by row of the tape, how many tokens are settled, and how many of these are not new. Rows ascend."""
        chunks = {row: self._chunks(row, length, known) for row, (length, known) in rows.items()}
        alike = defaultdict(list)  # rows by the sizes of their chunks
        for row, edges in chunks.items():
            alike[tuple(stop - start for start, stop in edges)].append(row)
        for sizes, members in alike.items():
            for run in runs(members):  # rows side by side
                cache, tape = self.cache.part(run), self.tokens[run]
                begins = [[start for start, _ in chunks[row]] for row in range(run.start, run.stop)]
                starts = staged(begins, tape.device).to(tape.device, non_blocking=True)
                for size, start in zip(sizes, starts.unbind(1), strict=True):
                    tokens = tape.gather(1, start[:, None] + torch.arange(size, device=tape.device))
                    self.model(tokens, StreamingBlock(cache, start, size))

    def _chunks(self, row: int, length: int, known: int) -> list[tuple[int, int]]:
        """[start, stop) of the chunks that take in a row, in order. A row that is taken in as a whole is cleared first,
        so that drafts depend on this tape alone."""
        # A window's worth of context per layer reaches as far as attention over the window can look back.
        reach = max(length - min(self.model.config.n_layer, 4) * self.cache.window_size, 0)
        anew = known == 0 or known < reach
        for tensor in self.cache.tensors() if anew else ():
            tensor[row].zero_()
        starts = list(range(reach if anew else known, length, self.PREFILL_ROWS))
        if anew and reach > 0:
            starts.insert(0, 0)  # the attention sinks
        return [(start, min(start + self.PREFILL_ROWS, length)) for start in starts]

    def flush(self, row: int, length: int) -> bool:
        """The target has just flushed at `length`. Returns whether all tokens before that have been taken in."""
        return False

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        """`kv` of a step: `rows` tokens a row of the batch, at consecutive positions from start [B]."""
        return StreamingBlock(self.cache, start, rows, compiled)


class LongMemory:
    """All tokens, in a cache like the target's: attended to whole ("full"), or those that the prompt's end attends to
    and the newest ("snapkv"). Methods and attributes are those of `StreamingMemory`."""

    def __init__(self, model: Transformer, tokens: Tensor, *, kind: str, capacity: int, block_size: int,
                 flush_interval: int, budget: int, chunk_size: int, recent: float, prefill_chunk_size: int,
                 compiler: Compiler, runs_on: torch.device):
        """tokens: [B, ...], the tape. budget, chunk_size, recent: of the view of "snapkv"; see cache/views.py."""
        self.model, self.tokens, self.prefill_chunk_size = model, tokens, prefill_chunk_size
        common = {"batch": len(tokens), "device": model.device, "dtype": model.dtype}
        self.cache = KVCache(model.config, model.rope, capacity=capacity, block_size=block_size, chunk_size=0,
                                 flush_interval=flush_interval, budget=budget if kind == "snapkv" else 0,
                                 runs_on=runs_on, **common)
        self.choice: RetrievalView | None = None
        if kind == "snapkv":
            self.choice = RetrievalView(self.cache, budget=budget, chunk_size=chunk_size, recent=recent, kind=kind,
                                        compiler=compiler, **common)
        self.view = self.choice or self.cache.prefix
        self.goes_on = self.choice is None
        self.nbytes = self.cache.nbytes + (self.choice.nbytes if self.choice else 0)

    @property
    def extent(self) -> Extent:
        return self.view.extent

    def open(self, ends: list[int]) -> None:
        self.cache.prefix.open(ends)

    def take_in(self, rows: dict[int, tuple[int, int]]) -> None:
        """Computes anew what lies in the tail: its last tokens may not have been settled. Those of the prefix were."""
        cache, interval = self.cache, self.cache.flush_interval
        for row, (length, known) in rows.items():
            start = cache.lens[row] if known else 0
            if length > start:
                blocks = prefill_blocks(cache, range(row, row + 1), start, length, self.prefill_chunk_size,
                                        keep_queries=start == 0)
                self.model.prefill(self.tokens[row, None, start:length], blocks, cache_only=True)
            if self.choice and start > 0:
                for end in range(start + interval, length + 1, interval):  # one after the other
                    cache.prefix.truncate(row, end)
                    self.choice.flush(row)
            cache.truncate(row, length)
            if self.choice and start == 0:
                self.choice.choose(row)

    def flush(self, row: int, length: int) -> bool:
        self.take_in({row: (length, length)})
        return True

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        return TargetBlock(self.cache, self.view, start, TokenTree(rows), extent, False, compiled)
