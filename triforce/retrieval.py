"""The retrieval view: the few thousand tokens of the prefix that the last verified queries attend to most.

Knows nothing of drafting or acceptance: it is told when to rebuild. Selection is by chunk, per KV head: queries of the
last verified rows, pooled over the GQA group, against the mean key of each chunk (TriForce, arXiv 2404.11912,
section 4.1). Exactness never depends on what is selected, only speed does.

Layout of a row's view, `budget` tokens: [sink | recent window, a ring | selected chunks]. While a prefix is no longer
than the budget, the view is the whole prefix, in order.

Shapes: B batch, L layers, K KV heads, G query heads per KV head, M rows of queries, C chunks, D head_dim.
"""

import torch
from torch import Tensor

from .cache import TargetCache, View
from .errors import UserError
from .graphs import Compiler


def plan_view(budget: int, chunk_size: int, flush_interval: int, recent: float = 0.25) -> tuple[int, int]:
    """Splits a budget into (window_size, number of selected chunks): the share `recent` of it, the sink one chunk.

    Raises:
        UserError: the budget is not a multiple of chunk_size, or too small for a sink, a window and one chunk.
    """
    if chunk_size < 1 or flush_interval % chunk_size:
        raise UserError(f"chunk_size ({chunk_size}) must divide {flush_interval}; try 8")
    if budget % chunk_size:
        rounded = max(budget // chunk_size, 1) * chunk_size
        raise UserError(f"budget ({budget}) must be a multiple of chunk_size ({chunk_size}); try {rounded}")
    smallest = flush_interval + 2 * chunk_size
    if budget < smallest:
        raise UserError(f"budget ({budget}) must be at least {smallest}: a sink chunk of {chunk_size}, a recent window "
                        f"of {flush_interval} and one chunk of {chunk_size}")
    most = (budget - 2 * chunk_size) // flush_interval  # leaves a sink chunk and a selected one
    window_size = min(max(int(budget * recent) // flush_interval, 1), most) * flush_interval
    return window_size, (budget - chunk_size - window_size) // chunk_size


class RetrievalView(View):
    def __init__(self, cache: TargetCache, *, budget: int, recent: float = 0.25, batch: int, device, dtype,
                 compiler: Compiler):
        super().__init__(cache.config, batch, budget, device, dtype, cache.near)
        self.lies_near = cache.near is not None
        self.cache, self.budget = cache, budget
        self.chunk_size = cache.chunk_size
        self.window_size, self.num_selected = plan_view(budget, cache.chunk_size,
                                                             cache.flush_interval, recent)
        self.selected = [False] * batch  # per row: a selection, or still the whole prefix
        self.num_rebuilds = 0
        self.compiled = compiler.level("rebuild")
        self._steps = [self.compiled.step(self._select_and_copy) for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def rebuild(self, row: int) -> None:
        """Selects anew for one row, from the queries that the cache kept. No host sync."""
        prefix_len = self.cache.full.lens[row]
        self.selected[row] = prefix_len > self.budget
        self.set_len(row, min(prefix_len, self.budget))
        if self.selected[row]:
            self.num_rebuilds += 1
            self._steps[row](row)
            return
        for k, v, full_k, full_v in zip(self.k, self.v, self.cache.full.k, self.cache.full.v, strict=True):
            k[row, :, :prefix_len] = full_k[row, :, :prefix_len]
            v[row, :, :prefix_len] = full_v[row, :, :prefix_len]

    def _select_and_copy(self, row: int) -> None:
        """One row's selection, in static shapes: what lies beyond the prefix is masked, so a graph can replay it."""
        cache, compiled = self.cache, self.compiled
        prefix_len = cache.full.len[row]
        end = (prefix_len - self.window_size) // self.chunk_size  # chunks from here on lie in the window
        mask = compiled(_chunk_mask)(end, cache.chunk_keys[0].shape[2])
        score = compiled(chunk_scores)
        scores = [score(queries[row], keys[row], cache.query_weight[row], mask)
                  for queries, keys in zip(cache.queries, cache.chunk_keys, strict=True)]
        # One call for all layers: ten times faster on a GPU than one a layer.
        chunks = torch.stack(scores).topk(self.num_selected, dim=-1, sorted=False).indices  # [L, K, num_selected]
        index = compiled(_token_index)(chunks, prefix_len, self.window_size, self.chunk_size)  # [L, K, budget]
        copy = compiled(_copy_tokens)
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            copy(cache.full.k[layer][row], cache.full.v[layer][row], index[layer], k[row], v[row])

    def on_flush(self, row: int) -> None:
        """Takes in the interval that the cache has just flushed, so that drafting never loses the newest tokens."""
        interval = self.cache.flush_interval
        stop = self.cache.full.lens[row]
        start = stop - interval
        if not self.selected[row]:
            if stop > self.budget:
                self.rebuild(row)
                return
            at = start
            self.set_len(row, stop)
        else:
            at = self.chunk_size + start % self.window_size
        for k, v, full_k, full_v in zip(self.k, self.v, self.cache.full.k, self.cache.full.v, strict=True):
            k[row, :, at : at + interval] = full_k[row, :, start:stop]
            v[row, :, at : at + interval] = full_v[row, :, start:stop]


def _chunk_mask(end: Tensor, num_chunks: int) -> Tensor:
    """[C], additive: 0 for the chunks after the sink chunk and before `end`, -inf for all others."""
    chunk = torch.arange(num_chunks, device=end.device)
    return torch.where((chunk >= 1) & (chunk < end), 0.0, float("-inf"))


def chunk_scores(queries: Tensor, chunk_keys: Tensor, weight: Tensor, mask: Tensor) -> Tensor:
    """How much the weighted queries attend to each chunk's mean key, pooled over the GQA group.

    Args:
        queries: [H, M, D]. chunk_keys: [K, C, D]. weight: [M]. mask: [C], additive.

    Returns:
        [K, C] float32.
    """
    n_kv_head, rows = chunk_keys.shape[0], weight.shape[0]
    q = queries.reshape(n_kv_head, -1, queries.shape[-1])  # [K, G * M, D]
    scores = (q @ chunk_keys.transpose(1, 2)).float() * q.shape[-1] ** -0.5 + mask  # [K, G * M, C]
    weights = weight.repeat(q.shape[1] // rows)[:, None]
    return (scores.softmax(-1) * weights).sum(1) + mask  # once more: a far chunk's share may round to the same 0


def _token_index(chunks: Tensor, prefix_len: Tensor, window_size: int, chunk_size: int) -> Tensor:
    """[L, K, num_selected] chunks -> [L, K, budget] positions: the sink chunk, the recent window, the chunks."""
    recent_start = prefix_len - window_size
    # Ring slot j holds the position of the window that is congruent to j, so that a flush overwrites the oldest.
    recent = recent_start + (torch.arange(window_size, device=chunks.device) - recent_start) % window_size
    offsets = torch.arange(chunk_size, device=chunks.device)
    tokens = (chunks[..., None] * chunk_size + offsets).flatten(2)
    return torch.cat([torch.cat([offsets, recent]).expand(*tokens.shape[:2], -1), tokens], 2)


def _copy_tokens(full_k: Tensor, full_v: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    """[K, S, D] -> [K, budget, D], the tokens of index [K, budget]."""
    rows = index[..., None].expand(-1, -1, k.shape[-1])
    k.copy_(full_k.gather(1, rows))
    v.copy_(full_v.gather(1, rows))
