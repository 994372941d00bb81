"""Sinks and a ring of recent tokens, for a draft model of short context.

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, D head_dim.
"""

import copy

import torch
from torch import Tensor

from .. import attention
from ..attention import rotate
from ..model import ModelConfig, RotaryEmbedding, eager
from ..runtime.graphs import put
from .kv_cache import aligned
from .store import View


class StreamingCache(View):
    """Attention sinks and a ring of recent tokens (StreamingLLM, arXiv 2309.17453), for a draft of short context.

    Keys are stored unrotated and rotated by their rank in the cache whenever they are attended to, so that a model
    trained on 2,048 positions never meets position 124,928. The drafter holds the lengths. The ring holds `window_size
    + slack` tokens: up to `slack` of them may be written ahead and then forgotten.
    """

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, num_sink: int, window_size: int,
                 slack: int, device, dtype):
        capacity = aligned(num_sink + window_size + slack)
        super().__init__(config, batch, capacity, device, dtype)
        self.config, self.rope, self.num_sink, self.window_size, self.slack = config, rope, num_sink, window_size, slack
        positions = torch.tensor(range(capacity), device=device)
        if positions.is_meta:  # a plan of the memory; PyTorch would import its compiler to compute, which takes seconds
            table = positions.new_empty(len(rope.frequencies), capacity, config.head_dim, dtype=torch.float32)
            self.angles = table, table
        else:
            self.angles = rope(positions)  # cos, sin of every rank, [kinds, capacity, D] each

    def part(self, rows: slice) -> "StreamingCache":
        """The same storage, seen as a batch of some of its rows."""
        part = copy.copy(self)
        part.k, part.v = [k[rows] for k in self.k], [v[rows] for v in self.v]
        return part


def _slots(positions: Tensor, num_sink: int, ring: int) -> Tensor:
    return torch.where(positions < num_sink, positions, num_sink + (positions - num_sink) % ring)


def _streaming_geometry(angles: tuple[Tensor, Tensor], start: Tensor, rows: int, num_sink: int, window_size: int,
                        sliding_window: int, group: int, dtype: torch.dtype):
    """What all layers share: cos, sin of the keys [kinds, B, 1, capacity, D] and of the rows [kinds, B, 1, M, D], slots
    [B, M], and biases [B, 1, G * M, capacity] of a dtype, a second one where layers have a window of their own.
    angles: those of every rank, [kinds, capacity, D] each."""
    capacity = angles[0].shape[1]
    ring = capacity - num_sink
    positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
    slots = _slots(positions, num_sink, ring)
    # Which position each slot holds once this block is written: the newest one that maps to it.
    slot = torch.arange(capacity, device=start.device)
    newest = positions[:, -1:]
    held = torch.where(slot < num_sink, slot, newest - (newest - slot) % ring)  # [B, capacity]
    oldest = (start[:, None] - window_size + 1).clamp(min=num_sink)  # [B, 1]
    ranks = [torch.where(p < num_sink, p, num_sink + p - oldest).clamp(min=0) for p in (held, positions)]
    (key_cos, key_sin), (cos, sin) = ([table[:, rank] for table in angles] for rank in ranks)
    held, positions = held[:, None], positions[..., None]
    seen = (held <= positions) & ((held > positions - window_size) & (held >= num_sink) | (slot < num_sink))
    near = [seen & (ranks[0][:, None] > ranks[1][..., None] - sliding_window)] if sliding_window else []
    biases = [attention.fold_mask(x, group, dtype) for x in (seen, *near)]
    return key_cos[:, :, None], key_sin[:, :, None], cos[:, :, None], sin[:, :, None], slots, biases


class StreamingBlock:
    """`kv` of a draft's step: `rows` tokens a row of the batch, at consecutive positions from `start` [B]."""

    def __init__(self, cache: StreamingCache, start: Tensor, rows: int, compiled=eager):
        self.cache, self.compiled, config = cache, compiled, cache.config
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.key_cos, self.key_sin, self.cos, self.sin, self.slots, self.biases = compiled(_streaming_geometry)(
            cache.angles, start, rows, cache.num_sink, cache.window_size,
            config.sliding_window if config.sliding_layers else 0, config.query_group, cache.k[0].dtype)

    def layer(self, i: int) -> "StreamingBlock":
        layer = copy.copy(self)
        layer.k, layer.v = self.cache.k[i], self.cache.v[i]
        layer.bias = self.biases[i in self.cache.config.sliding_layers]
        layer.cos, layer.sin = self.cache.rope.of_layer(i, self.cos, self.sin)
        layer.key_cos, layer.key_sin = self.cache.rope.of_layer(i, self.key_cos, self.key_sin)
        return layer

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D] and what they see in the whole cache."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        put(self.k, self.slots, k.transpose(1, 2), dim=2)
        put(self.v, self.slots, v.transpose(1, 2), dim=2)
        keys = rotate(self.k, self.key_cos, self.key_sin)
        q = attention.fold(rotate(q, self.cos, self.sin), self.n_kv_head)
        return q, [attention.masked(q, keys, self.v, self.bias, no_empty_rows=True)]

    def read(self, q: Tensor) -> list:
        return []


class StreamingPrefill:
    """`kv` of a draft's prefill: the tokens at positions [B, M], the sink's and the newest, are a text of their own."""

    def __init__(self, cache: StreamingCache, positions: Tensor):
        self.cache, config = cache, cache.config
        self.heads, self.config = (config.n_head, config.n_kv_head, config.n_kv_head), config
        self.slots = _slots(positions, cache.num_sink, cache.angles[0].shape[1] - cache.num_sink)
        self.cos, self.sin = (table[:, : positions.shape[1]] for table in cache.angles)

    def layer(self, i: int) -> "StreamingPrefill":
        layer = copy.copy(self)
        layer.k, layer.v = self.cache.k[i], self.cache.v[i]
        layer.cos, layer.sin = self.cache.rope.of_layer(i, self.cos, self.sin)
        layer.window = self.config.sliding_window if i in self.config.sliding_layers else None
        return layer

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, H, M, D]; K and V are written."""
        q, k, v = heads.split(self.heads, dim=1)
        put(self.k, self.slots, k.transpose(1, 2), dim=2)
        put(self.v, self.slots, v.transpose(1, 2), dim=2)
        q, k = (rotate(x, self.cos, self.sin) for x in (q, k))
        if self.window is not None:
            return q, [attention.windowed(q, k, v, self.window)]
        return q, [attention.causal(q, *(x.repeat_interleave(self.config.query_group, 1) for x in (k, v)))]

    def close(self, q: Tensor) -> None:
        """Nothing is left behind but K and V."""

    def read(self, q: Tensor) -> list:
        return []
