"""The long part of a target's keys and values: whole flush intervals, on the device or in host memory.

Conversations about one document share its keys and values. A **shared** prefix has one row and no tail. It lies before
the prefixes of all rows of a batch, which begin where it ends, at position `base`.

Shapes: B batch, K KV heads, S capacity less base, C chunks, D head_dim.
"""

import copy

import torch
from torch import Tensor

from .. import attention
from ..cpu import MIN_TOKENS, PackedPrefix
from ..model import ModelConfig
from .offload import Offload
from .store import Extent, View

GROWTH = 1024  # tokens of a batch's masked part that are attended to together
STRIDE = 512  # tokens of a prefix for which the same graph serves, where a kernel reads lengths on the device


class PrefixStore(View):
    """The first layers lie on the device, in `k` and `v`, the others, if any, in `offload`.

    A row's bits must not depend on when its neighbours flush. A kernel that reads each row's length on the device has a
    bound that no row will outgrow. Elsewhere the unmasked part stays as it was when the batch began. The masked part
    grows in steps of GROWTH, each a state of its own: a shorter row adds nothing there.

    Args:
        capacity: tokens of a row, those of the shared prefix among them.
        chunk_size: tokens whose mean key is kept, for views to choose by; 0: none is.
        shared: the store that lies before all rows. Nothing writes to it.
    """

    _batch_extent: Extent | None = None  # of a batch, at its widest

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, *, offload: Offload | None = None,
                 length_on_device: bool = False, chunk_size: int = 0, shared: "PrefixStore | None" = None):
        self.shared, self.base = shared, shared.lens[0] if shared is not None else 0
        slots = capacity - self.base
        super().__init__(config, batch, slots, device, dtype, num_layers=offload and offload.num_resident)
        self.offload, self.capacity, self.chunk_size = offload, capacity, chunk_size
        self.num_resident = len(self.k)  # how many of the first layers lie on the device
        self.streams = offload if shared is None else shared.offload
        self.length_on_device = length_on_device and offload is None
        self.places = attention.places(self.k[0]) if self.k else None
        chunks = (batch, config.n_kv_head, slots // chunk_size if chunk_size else 0, config.head_dim)
        # By layer [B, K, C, D]: the mean key of every chunk.
        self.chunk_keys = list(torch.zeros(config.n_layer, *chunks, device=device, dtype=dtype))
        self.own_len = torch.zeros(batch, dtype=torch.int32, device=device)  # [B], `len` without the base; see `close`
        for row in range(batch):
            self.truncate(row, self.base)

    def tensors(self) -> list[Tensor]:
        host = [] if self.offload is None else self.offload.host.values()
        return [*super().tensors(), *host, *self.chunk_keys]

    def part(self, length: int) -> "PrefixStore":
        """The same storage, seen as one row of `length` tokens, for others to share."""
        part = copy.copy(self)
        part.lens, part.len, part.packed = [length], torch.full_like(self.len, length), None
        part.own_len, part.length_on_device = part.len, False
        return part

    def truncate(self, row: int, length: int) -> None:
        super().truncate(row, length)
        self.own_len[row].fill_(length - self.base)

    def close(self, row: int) -> None:
        """The row's output is not used until it is truncated: a kernel that reads lengths reads one key of it."""
        if self.length_on_device:
            self.own_len[row].clamp_(max=1)

    @property
    def own_lens(self) -> list[int]:
        """`lens` without the base."""
        return [length - self.base for length in self.lens]

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        if start < self.base:
            common = self.shared.load(i, 0, start, min(stop, self.base))
            return common if stop <= self.base else torch.cat([common, self.load(i, row, self.base, stop)], 2)
        if i < self.num_resident:
            return super().load(i, row, start - self.base, stop - self.base)
        return self.offload.load(i, row, start, stop)

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        if i < self.num_resident:
            super().store(i, row, start - self.base, kv)
        else:
            self.offload.store(i, row, start, kv)

    def score(self, i: int, row: int, start: int, k: Tensor) -> None:
        """Keeps the mean keys of the chunks in k [K, n, D], which begin at `start`: whole chunks."""
        if self.chunk_size and k.shape[1]:
            means = k.unflatten(1, (-1, self.chunk_size)).mean(2)  # [K, C, D]
            first = (start - self.base) // self.chunk_size
            self.chunk_keys[i][row, :, first : first + means.shape[1]] = means

    def score_layer(self, i: int, rows: range, start: int, stops: list[int]) -> None:
        """`score` of tokens [start, stop) of some rows, in a layer that a prefill has just written."""
        for row, k, stop in zip(rows, self.working_layer(i, rows)[0], stops, strict=True):
            self.score(i, row, start, k[:, start - self.base : stop - self.base])

    def layer(self, i: int, row: int) -> tuple[Tensor, Tensor]:
        """K and V of layer i as they lie, from `base` on: [K, S, D] each, on the device or on the host."""
        if i < self.num_resident:
            return self.k[i][row], self.v[i][row]
        k, v = self.offload.host[i][:, row].transpose(1, 2)
        return k, v

    def whole_layer(self, i: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of row 0 [K, S, D], where the first of them lie."""
        own = [x[:, : length - self.base] for x in self.layer(i, 0)]
        if self.shared is None:
            return tuple(own)
        shared = self.shared.whole_layer(i, self.base)
        return tuple(torch.cat([first, rest.to(first.device)], 1) for first, rest in zip(shared, own, strict=True))

    def working_layer(self, i: int, rows: range) -> tuple[Tensor, Tensor]:
        """Layer i as a prefill of these rows writes and reads it, from `base` on: K, V [B, K, S, D] each. An offloaded
        layer takes one row at a time."""
        if i < self.num_resident:
            here = slice(rows.start, rows.stop)
            return self.k[i][here], self.v[i][here]
        k, v = self.offload.work(i, rows.start)
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def pack(self) -> None:
        """Keeps a second copy of row 0 in the CPU's own layout, if the row is long enough to gain by it."""
        length = self.lens[0] - self.base
        self.packed = None
        if length >= MIN_TOKENS:
            layers = zip(self.k, self.v, strict=True)
            self.packed = [PackedPrefix(k[0, :, :length], v[0, :, :length]) for k, v in layers]

    def open(self, ends: list[int]) -> None:
        """Decides which part of a batch is masked. The prompts are in, and no row will outgrow its end."""
        self._batch_extent = None
        if len(ends) > 1 or self.shared is not None and not self.length_on_device:
            self._batch_extent = Extent(min(self.own_lens), max(ends) - self.base)

    @property
    def extent(self) -> Extent:
        """It counts from `base` on."""
        grown = max(self.own_lens)
        dense, longest = self._batch_extent or Extent(min(self.own_lens), grown)
        if self.length_on_device:
            bound = min(-(-longest // STRIDE) * STRIDE, self.capacity - self.base)
            return Extent(bound if dense else 0, bound)
        if self._batch_extent is not None:
            longest = min(longest, dense + max(-(-(grown - dense) // GROWTH), 1) * GROWTH)
        return Extent(dense, longest)
