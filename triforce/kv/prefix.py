"""The long part of a target's keys and values: whole flush intervals, never masked, on the device or in host memory.

Shapes: B batch, K KV heads, S capacity, D head_dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model import ModelConfig
from ..packed import MIN_TOKENS, PackedPrefix
from .offload import Offload
from .store import Extent, View

GROWTH = 1024  # tokens of a batch's masked part that are attended to together
STRIDE = 512  # tokens of a prefix for which the same graph serves, where a kernel reads the length on the device


class Prefix(View):
    """The first layers lie on the device, in `k` and `v`, the others, if any, in `offload`.

    A batch's rows flush at different times. So that a row's bits do not depend on when its neighbours do, what is not
    masked stays what it was when the batch began, and the masked part grows in steps of GROWTH, each a state of its
    own: a row that has not come that far adds exactly nothing there.
    """

    _batch_extent: Extent | None = None

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, *, offload: Offload | None,
                 length_on_device: bool):
        super().__init__(config, batch, capacity, device, dtype, num_layers=offload and offload.num_resident)
        self.offload, self.capacity = offload, capacity
        self.length_on_device = length_on_device and batch == 1 and offload is None
        self.ends = torch.arange(2, dtype=torch.int32, device=device)  # see `attention.up_to`
        self.starts = torch.zeros_like(self.len)  # what `extent` says of them, on the device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        if self.offload is not None:
            yield from ((f"host.{i}", kv) for i, kv in self.offload.host.items())

    @property
    def num_resident(self) -> int:
        """Layers on the device: the first so many."""
        return len(self.k)

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        if i < self.num_resident:
            return super().load(i, row, start, stop)
        return self.offload.load(i, row, start, stop)

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        if i < self.num_resident:
            super().store(i, row, start, kv)
        else:
            self.offload.store(i, row, start, kv)

    def working_layer(self, i: int, row: int) -> tuple[Tensor, Tensor]:
        """Layer i as a prefill of this row writes and reads it: K, V, each [K, at least as far as it came, D]."""
        if i < self.num_resident:
            return self.k[i][row], self.v[i][row]
        k, v = self.offload.work(i, row)
        return k.transpose(0, 1), v.transpose(0, 1)

    def pack(self) -> None:
        """Keeps what row 0 holds a second time, in the CPU's own layout, if it is long enough to gain by it."""
        length = self.lens[0]
        self.packed = None
        if length >= MIN_TOKENS:
            layers = zip(self.k, self.v, strict=True)
            self.packed = [PackedPrefix(k[0, :, :length], v[0, :, :length]) for k, v in layers]

    def open(self, max_len: int) -> None:
        """The prompts are in, and no row will outgrow max_len: decides what of a batch is masked."""
        self._batch_extent = None
        if len(self.lens) == 1:
            return
        dense = min(self.lens)
        if self.offload is None and max(self.lens) > dense:
            self._batch_extent = Extent(dense, dense + max_len - max(self.lens), tuple(self.lens))
            self.starts.copy_(torch.tensor(self.lens))
        else:  # the pieces of what streams past are those of all rows
            self._batch_extent = Extent(dense, max_len)

    @property
    def extent(self) -> Extent:
        return self.extent_after(0)

    def extent_after(self, more: int) -> Extent:
        """`extent`, once each row has so many tokens more."""
        if self.length_on_device:
            bound = min(-(-(self.lens[0] + more) // STRIDE) * STRIDE, self.capacity)
            return Extent(bound, bound)
        if self._batch_extent is None:
            return Extent(min(self.lens) + more, max(self.lens) + more)
        dense, longest, starts = self._batch_extent
        grown = more + max(n - start for n, start in zip(self.lens, starts or [dense] * len(self.lens), strict=True))
        return Extent(dense, min(longest, dense + max(-(-grown // GROWTH), 1) * GROWTH), starts)
