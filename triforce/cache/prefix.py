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

BACK = 1024  # tokens of a ring beyond its window; a text can be taken back by a flush interval less
GROWTH = 1024  # tokens of a batch's masked part that are attended to together
STRIDE = 512  # tokens of a prefix for which the same graph serves, where a kernel reads lengths on the device


class PrefixStore(View):
    """Layers lie on the device, in `k` and `v`, or in `offload`.

    A layer with a sliding window keeps a ring of the newest tokens: the window, and as many as a text may be taken back
    by. `keep` notes what the rings hold where decoding begins, so that a text can always be taken back to there.

    A row's bits must not depend on when its neighbours flush. A kernel that reads each row's length on the device runs
    once a row has tokens here, and has a bound that no row will outgrow. Elsewhere the unmasked part stays as when the
    batch began. The masked part grows in steps of GROWTH, each a state of its own: a shorter row adds nothing there.

    Args:
        capacity: tokens of a row, those of the shared prefix among them.
        chunk_size: tokens whose mean key is kept, for views to choose by; 0: none is.
        shared: the store that lies before all rows. Nothing writes to it.
        interval: tokens that are written at a time, at most, while decoding.
    """

    _batch_extent: Extent | None = None  # of a batch, at its widest

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, *, offload: Offload | None = None,
                 length_on_device: bool = False, chunk_size: int = 0, shared: "PrefixStore | None" = None,
                 interval: int = 0):
        self.shared, self.base = shared, shared.lens[0] if shared is not None else 0
        slots = capacity - self.base
        self.windowed, self.window = config.sliding_layers, config.sliding_window or 0
        ring = min(slots, self.window + max(BACK, 2 * interval))  # tokens of a layer with a window
        self.ring, self.interval = -(-ring // attention.RING) * attention.RING, interval
        self.oldest = [self.base] * batch  # per row: the first position that rings still hold
        self._kept: dict[int, tuple[int, int, list[Tensor]]] = {}  # per row: length, `oldest`, and rings; see `keep`
        self.streamed = frozenset() if offload is None else frozenset(offload.layers)
        super().__init__(config, batch, slots, device, dtype, slots=[
            self.ring if i in self.windowed else 0 if i in self.streamed else slots for i in range(config.n_layer)])
        self.offload, self.capacity, self.chunk_size = offload, capacity, chunk_size
        whole = [self.k[i] for i in config.full_layers if i not in self.streamed]
        self.num_resident = len(whole)  # how many of the layers that see all keys lie on the device
        self.streams = offload if shared is None else shared.offload
        self.length_on_device = length_on_device and offload is None
        self.places = attention.places((whole or self.k)[0])
        # By layer [B, K, C, D]: the mean key of every chunk. What has a window needs no view.
        self.chunk_keys = [
            torch.zeros(batch, config.n_kv_head, slots // chunk_size if chunk_size and i not in self.windowed else 0,
                        config.head_dim, device=device, dtype=dtype) for i in range(config.n_layer)]
        self.own_len = torch.zeros(batch, dtype=torch.int32, device=device)  # [B], `len` without the base; see `close`
        for row in range(batch):
            self.truncate(row, self.base)

    def tensors(self) -> list[Tensor]:
        host = [] if self.offload is None else self.offload.host.values()
        return [*super().tensors(), *host, *self.chunk_keys, *(x for *_, rings in self._kept.values() for x in rings)]

    def part(self, length: int) -> "PrefixStore":
        """The same storage, seen as one row of `length` tokens, for others to share."""
        part = copy.copy(self)
        part.lens, part.len, part.packed = [length], torch.full_like(self.len, length), None
        part.own_len, part.length_on_device = part.len, False
        part.oldest, part._kept = [self.oldest[0]], {}
        return part

    def truncate(self, row: int, length: int, behind: int = 0) -> None:
        """behind: so many tokens more are about to be read, for the tail."""
        super().truncate(row, length)
        self.own_len[row].fill_(length - self.base)
        if length + behind == self.base:
            self.oldest[row] = self.base
            self.forget(row)
        elif not self.holds(row, length + behind):
            _, oldest, kept = self._kept[row]
            for ring, x in zip(self.rings(row), kept, strict=True):
                ring.copy_(x)
            self.oldest[row] = oldest  # at last: Ctrl-C may have come before

    def holds(self, row: int, length: int, kept: bool = False) -> bool:
        """Whether all layers have what tokens behind the first `length` of a row will see; or with `kept`, will have it
        after `truncate`."""
        first = max(length - self.window - self.interval, self.base)  # of what is seen, or is to move to the tail
        end, oldest, _ = self._kept.get(row, (-1, 0, []))
        return (not self.windowed or length == self.base or first >= self.oldest[row]
                or kept and length <= end and first >= oldest)

    def rings(self, row: int) -> list[Tensor]:
        return [x[i][row] for i in self.windowed for x in (self.k, self.v)]

    def keep(self, lengths: list[int]) -> None:
        """Notes what the rings hold, for `truncate` to go back to, of rows of these lengths."""
        if self.windowed:
            self._kept = {row: (length, self.oldest[row], [x.clone() for x in self.rings(row)])
                          for row, length in enumerate(lengths)}

    def forget(self, row: int) -> None:
        """Another text follows than the one that `keep` has seen."""
        self._kept.pop(row, None)

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
        if i in self.streamed:
            return self.offload.load(i, row, start, stop)
        return super().load(i, row, start, stop)

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        if i in self.streamed:
            return self.offload.store(i, row, start, kv)
        if i in self.windowed:
            start, kv = start + max(kv.shape[2] - self.ring, 0), kv[:, :, -self.ring :]
            self.oldest[row] = max(self.oldest[row], start + kv.shape[2] - self.ring)
        super().store(i, row, start, kv)

    def slots(self, i: int, start: int, stop: int) -> slice | Tensor:
        if i in self.windowed:
            return torch.arange(start - self.base, stop - self.base, device=self.len.device) % self.ring
        return super().slots(i, start - self.base, stop - self.base)

    def first(self, i: int, length: int) -> int:
        """The first position that layer i has of row 0, of `length` tokens."""
        if i not in self.windowed:
            return 0
        return self.shared.first(i, self.base) if self.base and self.oldest[0] <= self.base else self.oldest[0]

    def score(self, i: int, row: int, start: int, k: Tensor) -> None:
        """Keeps the mean keys of the chunks in k [K, n, D], which begin at `start`: whole chunks."""
        if self.chunk_size and k.shape[1] and i not in self.windowed:
            means = k.unflatten(1, (-1, self.chunk_size)).mean(2)  # [K, C, D]
            first = (start - self.base) // self.chunk_size
            self.chunk_keys[i][row, :, first : first + means.shape[1]] = means

    def score_layer(self, i: int, rows: range, start: int, stops: list[int]) -> None:
        """`score` of tokens [start, stop) of some rows, in a layer that a prefill has just written."""
        keys = [] if i in self.windowed else self.working_layer(i, rows)[0]
        for row, k, stop in zip(rows, keys, stops, strict=False):
            self.score(i, row, start, k[:, start - self.base : stop - self.base])

    def layer(self, i: int, row: int) -> tuple[Tensor, Tensor]:
        """K and V of layer i as they lie, from `base` on: [K, S, D] each, on the device or on the host."""
        if i in self.streamed:
            return tuple(self.offload.layer(i)[:, row].transpose(1, 2))
        return self.k[i][row], self.v[i][row]

    def whole_layer(self, i: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `length` tokens of row 0 [K, S, D], where the first of them lie; in a layer with a
        window, of those from `first` on."""
        if i in self.windowed:
            return tuple(self.load(i, 0, self.first(i, length), length))
        own = [x[:, : length - self.base] for x in self.layer(i, 0)]
        if self.shared is None:
            return tuple(own)
        shared = self.shared.whole_layer(i, self.base)
        return tuple(torch.cat([first, rest.to(first.device)], 1) for first, rest in zip(shared, own, strict=True))

    def working_layer(self, i: int, rows: range) -> tuple[Tensor, Tensor]:
        """Layer i as a prefill of these rows writes and reads it, from `base` on: K, V [B, K, S, D] each. An offloaded
        layer takes one row at a time."""
        if i in self.streamed:
            return tuple(x.transpose(0, 1)[None] for x in self.offload.work(i, rows.start))
        here = slice(rows.start, rows.stop)
        return self.k[i][here], self.v[i][here]

    def pack(self) -> None:
        """Keeps a second copy of row 0 in the CPU's own layout, if the row is long enough to gain by it."""
        length = self.lens[0] - self.base
        self.packed = None
        if length >= MIN_TOKENS:
            self.packed = {i: PackedPrefix(self.k[i][0, :, :length], self.v[i][0, :, :length])
                           for i in range(len(self.k)) if i not in self.windowed and i not in self.streamed}

    def open(self, ends: list[int]) -> None:
        """Decides which part of a batch is masked. The prompts are in, and no row will outgrow its end."""
        is_masked = len(ends) > 1 or self.shared is not None and not self.length_on_device
        self._batch_extent = Extent(min(self.own_lens), max(ends) - self.base) if is_masked else None

    @property
    def extent(self) -> Extent:
        """It counts from `base` on."""
        grown = max(self.own_lens)
        dense, longest = self._batch_extent or Extent(min(self.own_lens), grown)
        if self.length_on_device:
            bound = min(-(-longest // STRIDE) * STRIDE, self.capacity - self.base) if grown else 0
            return Extent(bound, bound)
        if self._batch_extent is not None:
            longest = min(longest, dense + max(-(-(grown - dense) // GROWTH), 1) * GROWTH)
        return Extent(dense, longest)
