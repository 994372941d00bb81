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
from ...cache.streaming import StreamingBlock, StreamingCache, StreamingPrefill
from ...cache.views import RetrievalView
from ...model import Transformer
from ...runtime.graphs import Compiler, staged
from ...tree import TokenTree


class StreamingMemory:
    """The first and the newest tokens, at positions that a model of short context knows: see `StreamingCache`."""

    STEP_ROWS = 64  # that one step may take in: so many can be written ahead of what is attended to
    extent = Extent()  # how much of the cache is attended to; a recorded step serves one extent
    goes_on = True  # with a text that has become longer; else each prompt's end chooses anew what is attended to

    def __init__(self, model: Transformer, tokens: Tensor, cache: StreamingCache, prefill_chunk_size: int):
        """tokens: [B, capacity], the tape."""
        self.model, self.tokens, self.cache, self.prefill_chunk_size = model, tokens, cache, prefill_chunk_size
        self.nbytes = cache.nbytes

    def open(self, ends: list[int]) -> None:
        """Called once all prompts are in: no row's prefix will outgrow its end."""

    def take_in(self, rows: dict[int, tuple[int, int]]) -> None:
        """rows: by row of the tape, how many tokens are settled, and how many of these are not new. Rows ascend."""
        alike = defaultdict(list)  # rows of which nothing stays, by how many tokens are read
        for row, (length, known) in rows.items():
            if known == 0 or length - known >= self.cache.window_size:
                alike[min(length, self.cache.num_sink + self.cache.window_size)].append(row)
                continue
            part = self.cache.part(slice(row, row + 1))
            for start in range(known, length, self.cache.slack):
                tokens = self.tokens[row, None, start : min(start + self.cache.slack, length)]
                at = torch.full((1,), start, device=tokens.device)
                self.model(tokens, StreamingBlock(part, at, tokens.shape[1]))
        alike.pop(0, None)
        for count, members in alike.items():
            most = max(self.prefill_chunk_size // count, 1)
            for run in runs(members):
                for first in range(run.start, run.stop, most):  # rows side by side
                    some = slice(first, min(first + most, run.stop))
                    self._take_in_anew(some, [rows[row][0] for row in range(some.start, some.stop)], count)

    def _take_in_anew(self, rows: slice, lengths: list[int], count: int) -> None:
        """The first and the newest of a row's tokens, `count` in all, as a text of their own."""
        cache, tape = self.cache.part(rows), self.tokens[rows]
        for tensor in cache.tensors():  # what a text that was no number has left would hide behind no mask
            tensor.zero_()
        place = torch.arange(count, device=tape.device)
        moved = staged([length - count for length in lengths], tape.device).to(tape.device, non_blocking=True)
        positions = place + moved[:, None] * (place >= cache.num_sink)  # [B, M]
        self.model.prefill(tape.gather(1, positions), [(0, count, StreamingPrefill(cache, positions))], cache_only=True)

    def flush(self, row: int, length: int) -> bool:
        """The target has just flushed at `length`. Returns whether all tokens before that have been taken in."""
        return False

    def block(self, start: Tensor, rows: int, extent: Extent, compiled):
        """`kv` of a step: `rows` tokens a row of the batch, at consecutive positions from start [B]."""
        return StreamingBlock(self.cache, start, rows, compiled)


class LongMemory:
    """All tokens, in a cache like the target's: attended to whole ("full"), or those that the prompt's end attends to
    and the newest ("snapkv"). Methods and attributes are those of `StreamingMemory`."""

    STEP_ROWS = 0  # what a step writes lies in the tail, which has to be flushed between

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
