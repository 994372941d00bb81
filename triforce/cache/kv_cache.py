"""A target's keys and values for one batch: a long prefix and a short tail, shared by the levels that it runs.

The **prefix** holds whole multiples of `flush_interval` tokens of a row and needs no mask. The **tail** holds the
newest tokens in a static shape: those after the last flush and the block being computed. A token's position alone
decides where its K/V lie, so a step computes the same bits whatever was drafted before. A smaller length undoes drafted
tokens. All views share the tail, so the other levels see what the full level verifies.

Shapes: B batch, K KV heads, T tail slots, M rows of a block, C chunks, D head_dim.
"""

import torch
from torch import Tensor

from .. import attention
from ..model import ModelConfig, RotaryEmbedding
from .offload import Offload
from .prefix import PrefixStore
from .store import Store

LONG_VIEW = 24576  # tokens of four KV heads or more, beyond which a GPU reads a view as it reads the prefix
ALIGNED = 8 * attention.SPLIT  # tokens: tensor cores load 8 at a time, of each part of a product


def aligned(tokens: int) -> int:
    """This number of tokens or a few more, over which a GPU's products are fast."""
    return -(-tokens // ALIGNED) * ALIGNED


class Tail(Store):
    """The newest tokens of every row, behind room for a view, so that one call attends over both.

    Args:
        slots: tokens. room: tokens of the view, 0 for none.
    """

    def __init__(self, config: ModelConfig, batch: int, slots: int, room: int, device, dtype):
        shape = (config.n_layer, 2, batch, config.n_kv_head, room + slots, config.head_dim)  # K, then V
        self.whole = torch.zeros(shape, device=device, dtype=dtype)
        self.storage = list(self.whole)  # by layer
        self.kv = [kv[:, :, :, room:] for kv in self.storage]  # per layer [2, B, K, T, D]
        self.slots, self.room = slots, room  # the levels hold the tail's lengths

    def tensors(self) -> list[Tensor]:
        return self.kv

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copies slots to others in all layers: source, target [B, n]. All are read before any is written."""
        rows = torch.arange(len(source), device=source.device)[:, None]
        kv = self.whole[:, :, rows, :, self.room + source]  # [B, n, L, 2, K, D]
        torch.ops.aten.index_put_(self.whole, [None, None, rows, None, self.room + target], kv)

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        return self.kv[i][:, row, :, start:stop]

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        self.kv[i][:, row, :, start : start + kv.shape[2]] = kv


class KVCache(Store):
    """Prefix, tail, and the newest queries: allocated once, sized by `capacity` tokens a row.

    Args:
        budget: tokens of a view, which is to lie before the tail unless it is long; 0: none.
        chunk_size: tokens whose mean key is kept; 0: none is.
        newest: queries that a view is chosen by, at most. None: block_size.
        ahead: slots of the tail behind those of a flush interval, for what is drafted ahead. None: 2 * block_size.
        resident_layers: of those that see all keys, on the device; the others are offloaded, in pieces of `piece`
            tokens (see `Offload`). None: all are on the device.
        shared: the prefix that all rows have in common.
        runs_on: the device whose kernels will read it, if it is not the one that it is allocated on.
    """

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, capacity: int, block_size: int,
                 flush_interval: int, chunk_size: int, budget: int = 0, newest: int | None = None,
                 ahead: int | None = None, resident_layers: int | None = None, piece: int | None = None,
                 shared: PrefixStore | None = None, device, dtype, runs_on: torch.device | None = None):
        self.config, self.rope, self.group = config, rope, config.query_group
        self.capacity, self.flush_interval = capacity, flush_interval
        offload = None
        if resident_layers is not None and resident_layers < len(config.full_layers):
            offload = Offload(config, resident_layers, batch=batch, capacity=capacity, interval=flush_interval,
                              device=device, dtype=dtype, piece=piece, runs_on=runs_on)
        runs_on = torch.device(device if runs_on is None else runs_on)
        spans = attention.spans(runs_on, dtype, config.head_dim)
        self.prefix = PrefixStore(config, batch, capacity, device, dtype, offload=offload, chunk_size=chunk_size,
                                  length_on_device=spans, shared=shared, interval=flush_interval)
        self.lens = self.prefix.lens  # tokens of each row's prefix
        # Of long views, and in bf16 on a CPU, the kernel for unmasked keys is worth more than one call over both.
        joins = runs_on.type == "cuda" or dtype == torch.float32
        self.joins_view = joins and budget > 0 and not (spans and budget > LONG_VIEW * max(4 // config.n_kv_head, 1))
        slots = aligned(flush_interval + (2 * block_size if ahead is None else ahead))
        self.tail = Tail(config, batch, slots, aligned(budget) if self.joins_view else 0, device, dtype)
        # The queries of the block that was last verified: they choose views.
        rows = (batch, config.n_head, block_size, config.head_dim)
        self.queries = list(torch.zeros(config.n_layer, *rows, device=device, dtype=dtype))  # by layer
        self.query_weight = torch.zeros(batch, block_size, dtype=torch.float32, device=device)  # [B, M]: 1 if kept
        self.newest = block_size if newest is None else newest

    def tensors(self) -> list[Tensor]:
        return [*self.prefix.tensors(), *self.tail.tensors(), *self.queries, self.query_weight]

    def whole(self, length: int) -> int:
        """How many of `length` tokens lie in the prefix: whole flush intervals."""
        return length - length % self.flush_interval

    def truncate(self, row: int, length: int) -> None:
        """Goes on from `length` tokens, which all lie in the prefix: those past `whole` move to the tail."""
        whole = self.whole(length)
        self.prefix.truncate(row, whole, length - whole)
        for i in range(self.config.n_layer):
            self.tail.store(i, row, 0, self.prefix.load(i, row, whole, length))

    def spill_tail(self, row: int) -> None:
        """Copies the tail behind the prefix, so that a prefill can go on from there."""
        start = self.lens[row]
        tokens = min(self.flush_interval, self.capacity - start)
        for i in range(self.config.n_layer):
            self.prefix.store(i, row, start, self.tail.load(i, row, 0, tokens))

    def flush(self, row: int) -> None:
        """A flush interval of a row's verified tokens leaves the tail for the prefix."""
        start = self.lens[row]
        self.spill_tail(row)
        self.prefix.truncate(row, start + self.flush_interval)
        for i in range(self.config.n_layer):
            self.prefix.score(i, row, start, self.tail.load(i, row, 0, self.flush_interval)[0])
