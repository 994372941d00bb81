"""What a draft model keeps of a conversation: a sink and the newest tokens.

Exactness never depends on it. It takes in tokens that are settled, and says what a step of the model attends to.

Shapes: B batch, M tokens of a row.
"""

from collections import defaultdict

import torch
from torch import Tensor

from ...cache.store import runs
from ...cache.streaming import StreamingBlock, StreamingCache, StreamingPrefill
from ...model import Transformer
from ...runtime.graphs import staged


class StreamingMemory:
    """The first and the newest tokens, at positions that a model of short context knows: see `StreamingCache`."""

    STEP_ROWS = 64  # that one step may take in: so many can be written ahead of what is attended to

    def __init__(self, model: Transformer, tokens: Tensor, cache: StreamingCache, prefill_chunk_size: int):
        """tokens: [B, capacity], the tape."""
        self.model, self.tokens, self.cache, self.prefill_chunk_size = model, tokens, cache, prefill_chunk_size
        self.nbytes = cache.nbytes

    def take_in(self, rows: dict[int, tuple[int, int]]) -> None:
        """rows: by row of the tape, how many tokens are settled, and how many of these are not new. Rows ascend."""
        alike, most = defaultdict(list), self.cache.num_sink + self.cache.window_size
        for row, (length, known) in rows.items():
            if known == 0 or length - known >= self.cache.window_size:  # nothing stays
                alike[min(length, most)].append(row)
                continue
            part = self.cache.part(slice(row, row + 1))
            for start in range(known, length, self.cache.slack):
                tokens = self.tokens[row, None, start : min(start + self.cache.slack, length)]
                at = torch.full((1,), start, device=tokens.device)
                self.model(tokens, StreamingBlock(part, at, tokens.shape[1]))
        alike.pop(0, None)
        for count, members in alike.items():
            together = max(self.prefill_chunk_size // count, 1)  # rows side by side
            for run in runs(members):
                for first in range(run.start, run.stop, together):
                    some = range(first, min(first + together, run.stop))
                    self._take_in_anew(slice(first, some.stop), [rows[row][0] for row in some], count)

    def _take_in_anew(self, rows: slice, lengths: list[int], count: int) -> None:
        """The first and the newest of a row's tokens, `count` in all, as a text of their own."""
        cache, tape = self.cache.part(rows), self.tokens[rows]
        for tensor in cache.tensors():  # what a text that was no number has left would hide behind no mask
            tensor.zero_()
        place = torch.arange(count, device=tape.device)
        moved = staged([length - count for length in lengths], tape.device).to(tape.device, non_blocking=True)
        positions = place + moved[:, None] * (place >= cache.num_sink)  # [B, M]
        self.model.prefill(tape.gather(1, positions), [(0, count, StreamingPrefill(cache, positions))], cache_only=True)
