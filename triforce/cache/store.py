"""The contract of everything that keeps keys and values.

A forward pass is given a **block** of a store as its `kv`: some rows at consecutive positions. Built once a step, it
holds what all layers share (angles, masks, slots). Its `layer(i)` adds what belongs to that layer alone, and has two
methods (in a prefill also `close`, for a last layer that only fills its cache). Each returns partial states, which the
layer merges (see `attention.py`):

- `write(heads)` takes a layer's new keys and values in, and attends over what is small and of static shape. It is
  compiled together with the layer around it.
- `read(queries)` attends over what is long, by fixed kernels: nothing is compiled anew as lengths change.

The rest of the library uses the methods of `Store`. `truncate` forgets a length, and erases nothing.

Shapes: B batch, K KV heads, S capacity, D head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..model import ModelConfig


class Extent(NamedTuple):
    """How much of a view is attended to. A recorded graph serves one extent. Where the kernel reads lengths on the
    device, both are a bound of all lengths."""

    dense: int = 0  # positions that every row sees
    longest: int = 0  # positions that some row sees; those from `dense` on are masked per row


class Store:
    """Keys and values of one model for the rows of one batch."""

    lens: list[int]  # per row: tokens that are held

    def tensors(self) -> list[Tensor]:
        """All that is kept."""

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        """Keys and values of layer i at positions [start, stop) of a row: [2, K, stop - start, D]."""

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        """Writes [2, K, n, D] at positions from `start` on."""

    def truncate(self, row: int, length: int) -> None:
        """Holds the first `length` tokens of a row."""
        self.lens[row] = length

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.tensors())


class View(Store):
    """Keys and values that a level attends to besides the tail: row b sees the first `lens[b]` positions of `k[layer]`,
    `v[layer]`, each [B, K, capacity, D]."""

    length_on_device = False  # its kernel reads lengths from `own_len`, and `extent` is an upper bound
    follows = False  # `follow` chooses what a layer's queries will read, before they do
    joined = False  # it lies right before the tail, in the same tensors: one call attends over both
    shared = None  # another store, which lies before all rows' own positions
    base = 0  # tokens of `shared` that all rows see
    streams = None  # the `Offload` whose pieces a step over it reads
    streamed: frozenset[int] = frozenset()  # layers that lie in host memory
    packed: dict | None = None  # by layer: a second copy of its first tokens in the CPU's own layout; see cpu.py

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, *, slots: list[int] | None = None,
                 storage: list[Tensor] | None = None):
        """slots: of each layer; None: `capacity`. storage: where they lie, per layer [2, B, K, capacity or more, D].
        None: in new tensors."""
        if storage is None:
            # K and V are tensors of their own: compiled code that writes to two views of one storage keeps the offsets
            # that it first saw.
            self.k, self.v = ([torch.zeros(batch, config.n_kv_head, n, config.head_dim, device=device, dtype=dtype)
                               for n in ([capacity] * config.n_layer if slots is None else slots)] for _ in range(2))
        else:
            self.k, self.v = ([kv[half, :, :, :capacity] for kv in storage] for half in range(2))
        self.lens = [0] * batch
        self.len = torch.zeros(batch, dtype=torch.int32, device=device)  # [B], the same on the device
        self.own_len = self.len  # without what is shared

    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v]

    def truncate(self, row: int, length: int) -> None:
        self.lens[row] = length
        self.len[row].fill_(length)

    def slots(self, i: int, start: int, stop: int) -> slice | Tensor:
        """Where layer i has a row's own tokens [start, stop)."""
        return slice(start, stop)

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        at = self.slots(i, start, stop)
        return torch.stack([self.k[i][row][:, at], self.v[i][row][:, at]])

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        at = self.slots(i, start, start + kv.shape[2])
        self.k[i][row][:, at], self.v[i][row][:, at] = kv

    @property
    def extent(self) -> Extent:
        return Extent() if self.joined else Extent(min(self.lens), max(self.lens))  # with the tail, all of it is masked

    def _streamed(self, extent: Extent) -> int:
        """Tokens that a step streams past."""
        return self.base if self.shared is not None else extent.longest

    def worth_recording(self, extent: Extent) -> bool:
        """Whether a step over it should become a graph: not if its copies take longer than the host takes to enqueue
        it."""
        return self.streams is None or self.streams.in_few_pieces(self._streamed(extent))

    def run_ahead(self) -> None:
        """Begins the next step's copies from host memory. Called before each step, whose input may then not change."""
        if self.streams is not None:
            self.streams.run_ahead(self._streamed(self.extent))


def runs(rows: list[int]) -> list[slice]:
    """Ascending numbers as runs of consecutive ones."""
    edges = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
    return [slice(rows[a], rows[b - 1] + 1) for a, b in zip(edges, edges[1:], strict=False)]
