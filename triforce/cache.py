"""KV caches: the target's prefix and tail, its full view, and the draft's streaming cache. Knows nothing of tokens.

The target's keys and values live in two places. The **prefix** is long, holds whole multiples of `flush_interval`
tokens of a row and needs no mask. The **tail** holds the newest tokens in a static shape: those since the last flush
and the block being computed. Where a token's K/V lie is thus a function of its absolute position alone, so a step of
a given block size computes the same bits whatever was drafted before. To undo drafted tokens is to forget a length:
their slots are overwritten. A **view** is the prefix (or a selection from it) that a level attends to; all views
share the tail, so what the full level verifies, the others see.

A forward pass is given one of the `...Block` objects below as its `kv`: built once a step, it holds what all layers
share (angles, masks, slots). Its `layer(i)` has two methods: `write` takes a layer's new keys and values in and attends
over what is small and static; `read` attends over what is long. `write` is compiled with the layer around it; `read`
calls one fixed kernel, whose lengths may change without anything being compiled anew.

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, T tail slots, D head_dim.
"""

import torch
from torch import Tensor

from . import attention
from .model import ModelConfig, RotaryEmbedding, eager, rotate


class View:
    """A run of keys and values per layer that a level attends to besides the tail.

    Row b sees the first `lens[b]` positions of `k[layer]`, `v[layer]`, each [B, K, capacity, D]. The first
    `dense_len` are seen by every row and go through the fused kernel; those up to `max_len` are masked per row.
    """

    lies_near = False  # its storage is followed by the tail: see TargetCache.near

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, storage=None):
        """storage: per layer K and V, [2, B, K, capacity or more, D]. None: allocated."""
        shape = (batch, config.n_kv_head, capacity, config.head_dim)
        if storage is None:
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
            self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        else:
            self.k, self.v = ([kv[half, :, :, :capacity] for kv in storage] for half in range(2))
        self.lens = [0] * batch
        self.len = torch.zeros(batch, dtype=torch.int64, device=device)  # [B], the same on the device

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
                 flush_interval: int, chunk_size: int, budget: int = 0, device, dtype):
        self.config, self.rope = config, rope
        self.group = config.n_head // config.n_kv_head
        self.capacity, self.flush_interval, self.chunk_size = capacity, flush_interval, chunk_size
        self.full = FullView(config, batch, capacity, device, dtype)
        # The tail has room for a block that starts just before a flush, and for a drafting level that runs ahead.
        slots = flush_interval + 2 * block_size
        layers = range(config.n_layer)
        # On a CPU a retrieval view of `budget` tokens lies right before the tail, so that one call attends over both.
        before = budget if torch.device(device).type == "cpu" and dtype == torch.float32 else 0
        near = [torch.zeros(2, batch, config.n_kv_head, before + slots, config.head_dim, device=device, dtype=dtype)
                for _ in layers]  # K, then V
        self.near = near if before else None
        self.tail = [kv[:, :, :, before:] for kv in near]
        self.tail_k, self.tail_v = [kv[0] for kv in self.tail], [kv[1] for kv in self.tail]
        # What retrieval scores: the mean key of every chunk, and the queries of the block that was last verified.
        chunks = (batch, config.n_kv_head, capacity // chunk_size if chunk_size else 0, config.head_dim)
        self.chunk_keys = [torch.zeros(chunks, device=device, dtype=dtype) for _ in layers]
        rows = (batch, config.n_head, block_size, config.head_dim)
        self.queries = [torch.zeros(rows, device=device, dtype=dtype) for _ in layers]
        # [B, M], 1 for the rows whose tokens were kept
        self.query_weight = torch.zeros(batch, block_size, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (*self.full.k, *self.full.v, *self.tail, *self.chunk_keys, *self.queries)
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


def _target_geometry(rope: RotaryEmbedding, start: Tensor, prefix_len: Tensor, rows: int, tail_slots: int, group: int):
    """What all layers of a block share: cos, sin [B, 1, M, D], slots [B, M], bias [B, 1, G * M, T]."""
    positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
    cos, sin = rope(positions)
    slots = positions - prefix_len[:, None]
    tail = torch.arange(tail_slots, device=start.device)
    return cos[:, None], sin[:, None], slots, attention.fold_mask(tail <= slots[..., None], group)


def _view_bias(view_len: Tensor, start: int, stop: int, rows: int, group: int) -> Tensor:
    """Hides, of positions [start, stop) of a view, those that a row of the batch does not have."""
    held = torch.arange(start, stop, device=view_len.device) < view_len[:, None]  # [B, stop - start]
    return attention.fold_mask(held[:, None].expand(-1, rows, -1), group)


class TargetBlock:
    """`kv` of a decoding step over one view: M rows a row of the batch, at consecutive positions from `start`."""

    def __init__(self, cache: TargetCache, view: View, start: Tensor, rows: int, dense_len: int, max_len: int,
                 keep_queries: bool, compiled=eager):
        """start: [B], the position of each row's first token. dense_len, max_len: see `View`."""
        self.cache, self.view, self.dense_len, self.max_len = cache, view, dense_len, max_len
        self.keep_queries, self.compiled = keep_queries, compiled
        tail_slots = cache.tail_k[0].shape[2]
        self.cos, self.sin, slots, self.tail_bias = compiled(_target_geometry)(
            cache.rope, start, cache.full.len, rows, tail_slots, cache.group)
        self.slots = slots[:, None, :, None].expand(2, -1, cache.config.n_kv_head, -1, cache.config.head_dim)
        self.near = cache.near if view.lies_near else None
        self.ragged_bias = None
        if self.near is not None:
            budget = view.k[0].shape[2]
            self.tail_bias = torch.cat([_view_bias(view.len, 0, budget, rows, cache.group), self.tail_bias], -1)
        elif max_len > dense_len:
            self.ragged_bias = _view_bias(view.len, dense_len, max_len, rows, cache.group)

    def layer(self, i: int) -> "TargetLayer":
        return TargetLayer(self, i)


class TargetLayer:
    """One layer of a TargetBlock."""

    def __init__(self, block: TargetBlock, i: int):
        cache, config = block.cache, block.cache.config
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.cos, self.sin, self.slots, self.tail_bias = block.cos, block.sin, block.slots, block.tail_bias
        self.tail = cache.tail[i]
        self.seen = cache.tail[i] if block.near is None else block.near[i]  # what `write` attends over
        self.queries = cache.queries[i] if block.keep_queries else None
        self._block, self._i = block, i

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D] and what they see in the tail, K and V written."""
        rotated = rotate(heads[:, : -self.n_kv_head], self.cos, self.sin)
        q, k, v = rotated[:, : self.n_head], rotated[:, self.n_head :], heads[:, -self.n_kv_head :]
        if self.queries is not None:
            self.queries[:, :, : q.shape[2]] = q
        self.tail.scatter_(3, self.slots, torch.stack([k, v]))
        q = attention.fold(q, self.n_kv_head)
        return q, [attention.masked(q, self.seen[0], self.seen[1], self.tail_bias, no_empty_rows=True)]

    def read(self, q: Tensor) -> list:
        """What the queries see in the view: a state over its dense part, one over its ragged part, where there are."""
        block = self._block
        if block.near is not None:
            return []
        k, v, dense, longest = block.view.k[self._i], block.view.v[self._i], block.dense_len, block.max_len
        states = []
        if block.ragged_bias is not None:
            states.append(attention.masked(q, k[:, :, dense:longest], v[:, :, dense:longest], block.ragged_bias))
        if dense > 0:
            states.append(attention.partial(q, k[:, :, :dense], v[:, :, :dense]))
        return states


class PrefillBlock:
    """`kv` of a prefill chunk of one row: positions [start, stop), written straight into the prefix."""

    def __init__(self, cache: TargetCache, row: int, start: int, stop: int, keep_queries: bool, compiled=eager):
        self.cache, self.row, self.start, self.stop, self.keep_queries = cache, row, start, stop, keep_queries
        self.compiled = compiled
        self.cos, self.sin = cache.rope(torch.arange(start, stop, device=cache.full.len.device))  # [M, D]

    def layer(self, i: int) -> "PrefillLayer":
        return PrefillLayer(self, i)


class PrefillLayer:
    """One layer of a PrefillBlock."""

    def __init__(self, block: PrefillBlock, i: int):
        cache, config, here = block.cache, block.cache.config, slice(block.start, block.stop)
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.cos, self.sin = block.cos, block.sin
        self._prefix_k, self._prefix_v = cache.full.k[i][block.row, None], cache.full.v[i][block.row, None]
        self.k, self.v = self._prefix_k[:, :, here], self._prefix_v[:, :, here]  # [1, K, M, D]
        self._start = block.start
        self._queries = cache.queries[i][block.row] if block.keep_queries else None

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [1, H + 2K, M, D] -> queries [1, H, M, D]; K and V are written."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        self.k.copy_(rotate(k, self.cos, self.sin))
        self.v.copy_(v)
        return rotate(q, self.cos, self.sin), []

    def read(self, q: Tensor) -> list:
        """The causal square of the chunk, and all that comes before it, unmasked."""
        if self._queries is not None:
            rows = min(self._queries.shape[1], q.shape[2])
            self._queries[:, :rows] = q[0, :, -rows:]
        group = self.n_head // self.n_kv_head
        states = [attention.causal(q, self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1))]
        if self._start > 0:
            before = attention.partial(attention.fold(q, self.n_kv_head), self._prefix_k[:, :, : self._start],
                                       self._prefix_v[:, :, : self._start])
            states.append((attention.unfold(before[0], self.n_head), before[1].reshape(states[0][1].shape)))
        return states


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
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def row(self, row: int) -> "StreamingCache":
        """The same storage, seen as a batch of one."""
        view = object.__new__(StreamingCache)
        view.__dict__.update(self.__dict__)
        view.k, view.v = [k[row, None] for k in self.k], [v[row, None] for v in self.v]
        return view


def _streaming_geometry(rope: RotaryEmbedding, start: Tensor, rows: int, num_sink: int, window_size: int,
                        capacity: int, group: int):
    """What all layers share: cos, sin of the keys [B, 1, capacity, D] and of the rows [B, 1, M, D], slots [B, M], bias
    [B, 1, G * M, capacity]."""
    ring = capacity - num_sink
    positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
    slots = torch.where(positions < num_sink, positions, num_sink + (positions - num_sink) % ring)
    # Which position each slot holds once this block is written: the newest one that maps to it.
    slot = torch.arange(capacity, device=start.device)
    newest = positions[:, -1:]
    held = torch.where(slot < num_sink, slot, newest - (newest - slot) % ring)  # [B, capacity]
    oldest = (start[:, None] - window_size + 1).clamp(min=num_sink)  # [B, 1]
    ranks = [torch.where(p < num_sink, p, num_sink + p - oldest) for p in (held, positions)]
    (key_cos, key_sin), (cos, sin) = rope(ranks[0].clamp(min=0)), rope(ranks[1])
    held, positions = held[:, None], positions[..., None]
    recent = (held > positions - window_size) & (held >= num_sink) | (slot < num_sink)
    bias = attention.fold_mask((held <= positions) & recent, group)
    return key_cos[:, None], key_sin[:, None], cos[:, None], sin[:, None], slots, bias


class StreamingBlock:
    """`kv` of a draft's step: `rows` tokens a row of the batch, at consecutive positions from `start` [B]."""

    def __init__(self, cache: StreamingCache, start: Tensor, rows: int, compiled=eager):
        self.cache, self.compiled = cache, compiled
        config = cache.config
        self.key_cos, self.key_sin, self.cos, self.sin, slots, self.bias = compiled(_streaming_geometry)(
            cache.rope, start, rows, cache.num_sink, cache.window_size, cache.k[0].shape[2],
            config.n_head // config.n_kv_head)
        self.slots = slots[:, None, :, None].expand(-1, config.n_kv_head, -1, config.head_dim)

    def layer(self, i: int) -> "StreamingLayer":
        return StreamingLayer(self, i)


class StreamingLayer:
    """One layer of a StreamingBlock."""

    def __init__(self, block: StreamingBlock, i: int):
        self.n_head, self.n_kv_head = block.cache.config.n_head, block.cache.config.n_kv_head
        self.key_cos, self.key_sin, self.cos, self.sin = block.key_cos, block.key_sin, block.cos, block.sin
        self.slots, self.bias, self.k, self.v = block.slots, block.bias, block.cache.k[i], block.cache.v[i]

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D] and what they see in the whole cache."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        self.k.scatter_(2, self.slots, k)
        self.v.scatter_(2, self.slots, v)
        keys = rotate(self.k, self.key_cos, self.key_sin)
        q = attention.fold(rotate(q, self.cos, self.sin), self.n_kv_head)
        return q, [attention.masked(q, keys, self.v, self.bias, no_empty_rows=True)]

    def read(self, q: Tensor) -> list:
        return []
