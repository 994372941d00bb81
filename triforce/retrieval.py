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


def plan_view(budget: int, chunk_size: int, flush_interval: int) -> tuple[int, int]:
    """Splits a budget into (window_size, number of selected chunks): about a quarter recent, the sink one chunk.

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
    window_size = max(budget // 4 // flush_interval, 1) * flush_interval
    return window_size, (budget - chunk_size - window_size) // chunk_size


class RetrievalView(View):
    def __init__(self, cache: TargetCache, *, budget: int, batch: int, device, dtype):
        super().__init__(cache.config, batch, budget, device, dtype)
        self.cache, self.budget = cache, budget
        self.chunk_size = cache.chunk_size
        self.window_size, self.num_selected = plan_view(budget, cache.chunk_size, cache.flush_interval)
        self.selected = [False] * batch  # per row: a selection, or still the whole prefix
        self.num_rebuilds = 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def rebuild(self, row: int) -> None:
        """Selects anew for one row, from the queries that the cache kept. No host sync."""
        prefix_len = self.cache.full.lens[row]
        self.selected[row] = prefix_len > self.budget
        self.set_len(row, min(prefix_len, self.budget))
        if not self.selected[row]:
            for k, v, full_k, full_v in zip(self.k, self.v, self.cache.full.k, self.cache.full.v, strict=True):
                k[row, :, :prefix_len] = full_k[row, :, :prefix_len]
                v[row, :, :prefix_len] = full_v[row, :, :prefix_len]
            return
        self.num_rebuilds += 1
        device = self.len.device
        recent_start = prefix_len - self.window_size
        # Ring slot j holds the position of the window that is congruent to j, so that a flush overwrites the oldest.
        recent = recent_start + (torch.arange(self.window_size, device=device) - recent_start) % self.window_size
        fixed = torch.cat([torch.arange(self.chunk_size, device=device), recent])
        offsets = torch.arange(self.chunk_size, device=device)
        chunks = self._select(row, recent_start // self.chunk_size)  # [L, K, num_selected]
        tokens = (chunks[..., None] * self.chunk_size + offsets).flatten(2)
        index = torch.cat([fixed.expand(*tokens.shape[:2], -1), tokens], 2)[..., None]  # [L, K, budget, 1]
        for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            rows = index[layer].expand(-1, -1, k.shape[-1])
            torch.gather(self.cache.full.k[layer][row], 1, rows, out=k[row])
            torch.gather(self.cache.full.v[layer][row], 1, rows, out=v[row])

    def _select(self, row: int, end: int) -> Tensor:
        """The best chunks among those after the sink chunk and before chunk `end`: [L, K, num_selected]."""
        cache = self.cache
        weight = cache.query_weight[row]  # [M]
        pooled = []
        for queries, keys in zip(cache.queries, cache.chunk_keys, strict=True):
            q = queries[row].unflatten(0, (-1, cache.group))  # [K, G, M, D]
            scores = torch.einsum("kgmd,kcd->kgmc", q, keys[row, :, 1:end]).float() * q.shape[-1] ** -0.5
            pooled.append(torch.einsum("kgmc,m->kc", scores.softmax(-1), weight))
        # One call for all layers: ten times faster on a GPU than one a layer.
        return torch.stack(pooled).topk(self.num_selected, dim=-1, sorted=False).indices + 1

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
