"""KV caches: the target's prefix and tail, its full view, and the draft's streaming cache. Knows nothing of tokens.

The target's keys and values live in two places. The **prefix** is long, holds whole multiples of `flush_interval`
tokens of a row and needs no mask. The **tail** holds the newest tokens in a static shape: those since the last flush
and the block being computed. Where a token's K/V lie is thus a function of its absolute position alone, so a step of
a given block size computes the same bits whatever was drafted before. To undo drafted tokens is to forget a length:
their slots are overwritten. A **view** is the prefix (or a selection from it) that a level attends to; all views
share the tail, so what the full level verifies, the others see.

A forward pass is given one of the `...Block` objects below as its `kv`: built once a step, it holds what all layers
share (angles, masks, slots) and does a layer's work in `attend`.

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, T tail slots, D head_dim.
"""

import torch
from torch import Tensor

from . import attention
from .model import ModelConfig, RotaryEmbedding, rotate


def static(tensor: Tensor) -> Tensor:
    """Marks a tensor whose address never changes, so that CUDA graphs read and write it in place."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


class View:
    """A run of keys and values per layer that a level attends to besides the tail.

    Row b sees the first `lens[b]` positions of `k[layer]`, `v[layer]`, each [B, K, capacity, D]. The first
    `dense_len` are seen by every row and go through the fused kernel; those up to `max_len` are masked per row.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype):
        shape = (batch, config.n_kv_head, capacity, config.head_dim)
        self.k = [static(torch.zeros(shape, device=device, dtype=dtype)) for _ in range(config.n_layer)]
        self.v = [static(torch.zeros(shape, device=device, dtype=dtype)) for _ in range(config.n_layer)]
        self.lens = [0] * batch
        self.len = static(torch.zeros(batch, dtype=torch.int64, device=device))  # [B], the same on the device

    def set_len(self, row: int, length: int) -> None:
        self.lens[row] = length
        self.len[row].fill_(length)

    @property
    def dense_len(self) -> int:
        return min(self.lens)

    @property
    def max_len(self) -> int:
        return max(self.lens)


class FullView(View):
    """The whole prefix.

    A batch's rows flush at different times. So that a row's bits do not depend on when its neighbours do, the dense
    part of a batch stays what it was when the batch began, and the masked part is as long as it may become.
    """

    _batch_bounds: tuple[int, int] | None = None

    def fix_bounds(self, max_len: int) -> None:
        """Called once the prompts are in: no row's prefix will outgrow max_len."""
        self._batch_bounds = (min(self.lens), max_len) if len(self.lens) > 1 else None

    @property
    def dense_len(self) -> int:
        return self._batch_bounds[0] if self._batch_bounds else min(self.lens)

    @property
    def max_len(self) -> int:
        return self._batch_bounds[1] if self._batch_bounds else max(self.lens)


class TargetCache:
    """The target's K/V for one batch of conversations: allocated once, sized by `capacity` tokens a row."""

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, capacity: int, block_size: int,
                 flush_interval: int, chunk_size: int, device, dtype):
        self.config, self.rope = config, rope
        self.group = config.n_head // config.n_kv_head
        self.capacity, self.flush_interval, self.chunk_size = capacity, flush_interval, chunk_size
        self.full = FullView(config, batch, capacity, device, dtype)
        # The tail has room for a block that starts just before a flush, and for a drafting level that runs ahead.
        tail = (batch, config.n_kv_head, flush_interval + 2 * block_size, config.head_dim)
        layers = range(config.n_layer)
        self.tail_k = [static(torch.zeros(tail, device=device, dtype=dtype)) for _ in layers]
        self.tail_v = [static(torch.zeros(tail, device=device, dtype=dtype)) for _ in layers]
        # What retrieval scores: the mean key of every chunk, and the queries of the block that was last verified.
        chunks = (batch, config.n_kv_head, capacity // chunk_size if chunk_size else 0, config.head_dim)
        self.chunk_keys = [torch.zeros(chunks, device=device, dtype=dtype) for _ in layers]
        rows = (batch, config.n_head, block_size, config.head_dim)
        self.queries = [static(torch.zeros(rows, device=device, dtype=dtype)) for _ in layers]
        # [B, M], 1 for the rows whose tokens were kept
        self.query_weight = static(torch.zeros(batch, block_size, dtype=torch.float32, device=device))

    @property
    def nbytes(self) -> int:
        tensors = (*self.full.k, *self.full.v, *self.tail_k, *self.tail_v, *self.chunk_keys, *self.queries)
        return sum(t.nbytes for t in tensors)

    def seat_tail(self, row: int, length: int) -> None:
        """Starts decoding at `length` tokens: whole flush intervals stay in the prefix, the rest moves to the tail."""
        whole = length - length % self.flush_interval
        for k, v, tail_k, tail_v in zip(self.full.k, self.full.v, self.tail_k, self.tail_v, strict=True):
            tail_k[row, :, : length - whole] = k[row, :, whole:length]
            tail_v[row, :, : length - whole] = v[row, :, whole:length]
        self.full.set_len(row, whole)
        self._score_keys(row, 0, whole)

    def spill_tail(self, row: int) -> None:
        """Copies the tail behind the prefix, so that a prefill can go on from there."""
        start = self.full.lens[row]
        stop = min(start + self.flush_interval, self.capacity)
        for k, v, tail_k, tail_v in zip(self.full.k, self.full.v, self.tail_k, self.tail_v, strict=True):
            k[row, :, start:stop] = tail_k[row, :, : stop - start]
            v[row, :, start:stop] = tail_v[row, :, : stop - start]

    def flush(self, row: int) -> None:
        """Moves a full interval of verified tokens from the tail to the prefix."""
        start = self.full.lens[row]
        self.spill_tail(row)
        self.full.set_len(row, start + self.flush_interval)
        self._score_keys(row, start, start + self.flush_interval)

    def _score_keys(self, row: int, start: int, stop: int) -> None:
        """Mean keys of the chunks in [start, stop), both multiples of chunk_size."""
        if not self.chunk_size or start == stop:
            return
        first, last = start // self.chunk_size, stop // self.chunk_size
        for k, chunk_keys in zip(self.full.k, self.chunk_keys, strict=True):
            chunks = k[row, :, start:stop].unflatten(1, (last - first, self.chunk_size))  # [K, C, chunk, D]
            chunk_keys[row, :, first:last] = chunks.mean(2)


class TargetBlock:
    """`kv` of a decoding step over one view: M rows a row of the batch, at consecutive positions from `start`."""

    def __init__(self, cache: TargetCache, view: View, start: Tensor, rows: int, dense_len: int, max_len: int,
                 keep_queries: bool):
        """start: [B], the position of each row's first token. dense_len, max_len: see `View`."""
        self.cache, self.view, self.dense_len, self.max_len = cache, view, dense_len, max_len
        self.keep_queries = keep_queries
        offsets = torch.arange(rows, device=start.device)
        positions = start[:, None] + offsets  # [B, M]
        cos, sin = cache.rope(positions)
        self.cos, self.sin = cos[:, None], sin[:, None]  # [B, 1, M, D]
        slots = positions - cache.full.len[:, None]  # [B, M]
        self.slots = slots[:, None, :, None].expand(-1, cache.config.n_kv_head, -1, cache.config.head_dim)
        tail = torch.arange(cache.tail_k[0].shape[2], device=start.device)
        self.tail_bias = attention.fold_mask(tail <= slots[..., None], cache.group)  # [B, 1, G * M, T]
        self.ragged_bias = None
        if max_len > dense_len:
            ragged = torch.arange(dense_len, max_len, device=start.device)
            visible = (ragged < view.len[:, None])[:, None].expand(-1, rows, -1)  # [B, M, max_len - dense_len]
            self.ragged_bias = attention.fold_mask(visible, cache.group)

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Unrotated queries, keys and values [B, H + 2K, M, D] -> [B, H, M, D]. Writes K and V into the tail."""
        cache, n_head, n_kv_head = self.cache, self.cache.config.n_head, self.cache.config.n_kv_head
        rotated, v = rotate(heads[:, :-n_kv_head], self.cos, self.sin), heads[:, -n_kv_head:]
        q, k = rotated[:, :n_head], rotated[:, n_head:]
        if self.keep_queries:
            cache.queries[layer][:, :, : q.shape[2]] = q
        tail_k, tail_v = cache.tail_k[layer], cache.tail_v[layer]
        tail_k.scatter_(2, self.slots, k)
        tail_v.scatter_(2, self.slots, v)
        q = attention.fold(q, n_kv_head)  # [B, K, G * M, D]
        state = attention.masked(q, tail_k, tail_v, self.tail_bias, no_empty_rows=True)
        prefix_k, prefix_v = self.view.k[layer], self.view.v[layer]
        if self.ragged_bias is not None:
            ragged = slice(self.dense_len, self.max_len)
            state = attention.merge(state, attention.masked(q, prefix_k[:, :, ragged], prefix_v[:, :, ragged],
                                                            self.ragged_bias))
        out = state[0]
        if self.dense_len > 0:
            dense = attention.partial(q, prefix_k[:, :, : self.dense_len], prefix_v[:, :, : self.dense_len])
            out = attention.merge_last(dense, state)
        return attention.unfold(out, n_head).to(v.dtype)


class PrefillBlock:
    """`kv` of a prefill chunk of one row: positions [start, stop), written straight into the prefix."""

    def __init__(self, cache: TargetCache, row: int, start: int, stop: int, keep_queries: bool):
        self.cache, self.row, self.start, self.stop, self.keep_queries = cache, row, start, stop, keep_queries
        self.cos, self.sin = cache.rope(torch.arange(start, stop, device=cache.full.len.device))  # [M, D]

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Unrotated queries, keys and values [1, H + 2K, M, D] -> [1, H, M, D]."""
        cache, n_head, n_kv_head = self.cache, self.cache.config.n_head, self.cache.config.n_kv_head
        q, k, v = heads.split([n_head, n_kv_head, n_kv_head], dim=1)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        if self.keep_queries:
            queries = cache.queries[layer][self.row]
            rows = min(queries.shape[1], q.shape[2])
            queries[:, :rows] = q[0, :, -rows:]
        prefix_k, prefix_v = cache.full.k[layer][self.row, None], cache.full.v[layer][self.row, None]
        prefix_k[:, :, self.start : self.stop] = k
        prefix_v[:, :, self.start : self.stop] = v
        state = attention.causal(q, k.repeat_interleave(cache.group, 1), v.repeat_interleave(cache.group, 1))
        if self.start > 0:
            before = attention.partial(attention.fold(q, n_kv_head), prefix_k[:, :, : self.start],
                                       prefix_v[:, :, : self.start])
            before = attention.unfold(before[0], n_head), before[1].reshape(state[1].shape)
            state = attention.merge(before, state)
        return state[0].to(v.dtype)


class StreamingCache:
    """Attention sinks and a ring of recent tokens (StreamingLLM, arXiv 2309.17453), for a draft of short context.

    Keys are stored unrotated and rotated by their rank in the cache whenever they are attended to, so that a model
    trained on 2,048 positions never meets position 124,928.

    Args:
        slack: how many tokens may be written ahead and then forgotten. The ring holds `window_size + slack`.
    """

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, num_sink: int, window_size: int,
                 slack: int, device, dtype):
        self.config, self.rope = config, rope
        self.num_sink, self.window_size, self.slack = num_sink, window_size, slack
        shape = (batch, config.n_kv_head, num_sink + window_size + slack, config.head_dim)
        self.k = [static(torch.zeros(shape, device=device, dtype=dtype)) for _ in range(config.n_layer)]
        self.v = [static(torch.zeros(shape, device=device, dtype=dtype)) for _ in range(config.n_layer)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def row(self, row: int) -> "StreamingCache":
        """The same storage, seen as a batch of one."""
        view = object.__new__(StreamingCache)
        view.__dict__.update(self.__dict__)
        view.k, view.v = [k[row, None] for k in self.k], [v[row, None] for v in self.v]
        return view


class StreamingBlock:
    """`kv` of a draft's step: `rows` tokens a row of the batch, at consecutive positions from `start` [B]."""

    def __init__(self, cache: StreamingCache, start: Tensor, rows: int):
        self.cache = cache
        sink, window = cache.num_sink, cache.window_size
        capacity = cache.k[0].shape[2]
        ring = capacity - sink
        positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
        slots = torch.where(positions < sink, positions, sink + (positions - sink) % ring)
        self.slots = slots[:, None, :, None].expand(-1, cache.config.n_kv_head, -1, cache.config.head_dim)
        # Which position each slot holds once this block is written: the newest one that maps to it.
        slot = torch.arange(capacity, device=start.device)
        newest = positions[:, -1:]
        held = torch.where(slot < sink, slot, newest - (newest - slot) % ring)  # [B, capacity]
        oldest = (start[:, None] - window + 1).clamp(min=sink)  # [B, 1]

        def rank(position):
            return torch.where(position < sink, position, sink + position - oldest)

        self.key_cos, self.key_sin = (x[:, None] for x in cache.rope(rank(held).clamp(min=0)))  # [B, 1, capacity, D]
        self.cos, self.sin = (x[:, None] for x in cache.rope(rank(positions)))
        held, positions = held[:, None], positions[..., None]
        recent = (held > positions - window) & (held >= sink) | (slot < sink)
        group = cache.config.n_head // cache.config.n_kv_head
        self.bias = attention.fold_mask((held <= positions) & recent, group)  # [B, 1, G * M, capacity]

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Unrotated queries, keys and values [B, H + 2K, M, D] -> [B, H, M, D]."""
        n_head, n_kv_head = self.cache.config.n_head, self.cache.config.n_kv_head
        q, k, v = heads.split([n_head, n_kv_head, n_kv_head], dim=1)
        cache_k, cache_v = self.cache.k[layer], self.cache.v[layer]
        cache_k.scatter_(2, self.slots, k)
        cache_v.scatter_(2, self.slots, v)
        keys = rotate(cache_k, self.key_cos, self.key_sin)
        rows = attention.fold(rotate(q, self.cos, self.sin), n_kv_head)
        state = attention.masked(rows, keys, cache_v, self.bias, no_empty_rows=True)
        return attention.unfold(state[0], n_head).to(v.dtype)
