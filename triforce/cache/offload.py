"""The layers of the KV prefix that do not fit the device: in host memory, streamed past the queries piece by piece.

A piece is some 64 MiB of one layer's keys and values, copied on a stream of its own into one of a few staging
buffers. The next pieces are in flight while the device attends to this one. A **passage** is the pieces that a step, or
a prefill, asks for in order. Its first copies are enqueued before tokens are drafted. A step with its passage can be
recorded as a graph. On a CPU, where host memory is the device's, a piece is a view and nothing is copied.

Shapes: B batch, K KV heads, S capacity, P tokens of a piece, D head_dim.
"""

import contextlib
import functools
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from .. import attention
from ..errors import UserError
from ..model import ModelConfig
from ..runtime.streams import like_this_thread

# Copies of 8 MB and more run at the full speed of the bus. Picking a view's tokens takes the same time from any piece.
PIECE_BYTES = 64 * 2**20
# The bus runs ahead by this number of pieces, at most a layer, while the device does the rest of a layer's work.
FEWEST_BUFFERS, MOST_BUFFERS = 3, 8
# A step of at most this number of pieces a layer is recorded: the host may enqueue more slowly than the bus copies.
FEW_PIECES = 2
THREADS = 4  # that pin host memory: torchrun gives each process one


class Offload:
    """K and V of the layers that see all keys, but for the first `num_resident` of them.

    Args:
        piece: tokens of a piece. None: the most whole flush intervals that PIECE_BYTES hold, at least one.
        runs_on: the device that it is meant for, if it is not the one that it is allocated on.

    Threads pin the layers beside the prefill that fills them. Whatever needs a layer on the host waits for it, and
    raises UserError if the system refuses to pin so much memory; what was pinned is then released.
    """

    _pinning = threading.Lock()  # of all: the driver pins for one thread at a time

    def __init__(self, config: ModelConfig, num_resident: int, *, batch: int, capacity: int, interval: int, device,
                 dtype, piece: int | None = None, runs_on: torch.device | None = None):
        self.device, self.layers = torch.device(device), config.full_layers[num_resident:]
        token = (config.n_kv_head, config.head_dim)
        bytes_per_token = batch * 2 * config.n_kv_head * config.head_dim * dtype.itemsize
        self.piece = min(piece or max(PIECE_BYTES // (bytes_per_token * interval), 1) * interval, capacity)
        self.on_cuda = self.device.type == "cuda"
        place, shape = "meta" if self.device.type == "meta" else "cpu", (2, batch, capacity, *token)
        # By layer: K and V, [2, B, S, K, D]. See `layer`.
        self.host = {i: _huge_pages(shape, dtype) if self.on_cuda else torch.zeros(shape, dtype=dtype, device=place)
                     for i in self.layers}
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        self._pins: dict[int, Future] | None = None  # not begun: the batch around it may yet fail
        # Two tensors: compiled code that writes to two views of one would mistake where they begin.
        self._work: tuple[Tensor, Tensor] | None = None
        streams = torch.device(runs_on or device).type == "cuda"  # on a CPU a piece is a part of `host`
        buffers = min(max(-(-capacity // self.piece) + 1, FEWEST_BUFFERS), MOST_BUFFERS) if streams else 0
        self.staging = [torch.zeros(2, batch, self.piece, *token, dtype=dtype, device=device) for _ in range(buffers)]
        if self.on_cuda:
            self._open_stream()

    def layer(self, i: int) -> Tensor:
        """Layer i on the host, as soon as it is pinned. The first call has all of them pinned, in order."""
        if self._pins is None:
            threads = ThreadPoolExecutor(THREADS, initializer=like_this_thread(self.device))
            self._pins = {j: threads.submit(self._pin, host) for j, host in self.host.items() if self.on_cuda}
        if (pin := self._pins.pop(i, None)) is not None:
            if pin.cancelled():
                self._pin(self.host[i])
            else:
                pin.result()
        return self.host[i]

    def _pin(self, tensor: Tensor) -> None:
        """Page-locks a host tensor. PyTorch's own pinned allocator would round a layer of 2.01 GiB up to 4."""
        tensor.zero_()  # pages that were touched are pinned sooner
        with self._pinning:
            begun = time.perf_counter()
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
            if code == 0:
                self._pinned.append(tensor)
                return time.sleep(time.perf_counter() - begun)  # meanwhile the driver launched nothing for the prefill
            pinned = sum(t.nbytes for t in self._pinned) / 2**30
            _unpin(self._pinned)
            raise UserError(f"the system pins {pinned:.2f} GiB of host memory and refuses {tensor.nbytes / 2**30:.2f} "
                            f"GiB more (CUDA error {code}); raise the limit (ulimit -l unlimited), or keep more layers "
                            "on the device (--num-resident-layers)")

    def _open_stream(self) -> None:
        # Streams to record on have another priority: PyTorch hands out 32 streams of each priority in turns.
        self.copy_stream = torch.cuda.Stream(self.device, priority=-1)
        # Events of the copies of `run_ahead`. External: a graph waits for the latest, not for those of its recording.
        self.ready = [torch.cuda.Event(external=True) for _ in self.staging]
        for event in self.ready:
            event.record(self.copy_stream)  # a step that is recorded before any copy would wait for nothing

    @property
    def nbytes(self) -> int:
        """On the host."""
        return sum(kv.nbytes for kv in self.host.values())

    def in_few_pieces(self, length: int) -> bool:
        """Whether a step over `length` tokens is worth recording."""
        return length <= FEW_PIECES * self.piece

    def run_ahead(self, length: int) -> None:
        """Before a step over `length` tokens: enqueues copies of its first pieces, as many as there are buffers."""
        if not self.on_cuda:
            return
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))  # the buffers may be in use
        in_order = ((i, start) for i in self.layers for start in range(0, length, self.piece))
        for slot, (i, start) in enumerate(islice(in_order, len(self.staging))):
            self.copy(slot, i, start, length)
            self.ready[slot].record(self.copy_stream)

    def copy(self, slot: int, i: int, start: int, length: int) -> None:
        """Enqueues a copy of the piece of layer i at `start`, as far as it holds tokens before `length`."""
        stop = min(start + self.piece, length)
        with torch.cuda.stream(self.copy_stream):
            for target, source in zip(self.staging[slot].flatten(0, 1), self.layer(i).flatten(0, 1), strict=True):
                target[: stop - start].copy_(source[start:stop], non_blocking=True)

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) of a row, on the device: [2, K, stop - start, D]."""
        # K and V apart: each is a run, which the driver copies. A busy CPU takes up to 30 ms a layer to gather both.
        return torch.stack([host[row, start:stop].to(self.device) for host in self.layer(i)]).transpose(1, 2)

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        """Writes [2, K, n, D] from the device at `start`, and waits for it: once a flush, a few megabytes."""
        for host, new in zip(self.layer(i), kv.transpose(1, 2), strict=True):
            host[row, start : start + len(new)].copy_(new)

    def open_work(self, i: int, row: int, start: int) -> None:
        """Copies a row's tokens before `start` to the device. A prefill's later tokens then go through layer i."""
        if not self.on_cuda:
            return
        if self._work is None:
            shape = self.host[i].shape[2:]
            self._work = self.staging[0].new_empty(shape), self.staging[0].new_empty(shape)
        torch.cuda.current_stream(self.device).wait_stream(self.copy_stream)
        for work, host in zip(self._work, self.layer(i)[:, row], strict=True):
            work[:start].copy_(host[:start], non_blocking=True)

    def work(self, i: int, row: int) -> tuple[Tensor, Tensor]:
        """K and V, each [S, K, D], where a prefill writes layer i and reads it again, on the device."""
        return self._work if self.on_cuda else tuple(self.host[i][:, row])

    def store_chunk(self, i: int, row: int, start: int, stop: int) -> None:
        """Copies a chunk of the work buffer out, while the device goes on."""
        if not self.on_cuda:
            return
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            for host, work in zip(self.layer(i)[:, row], self._work, strict=True):
                host[start:stop].copy_(work[start:stop], non_blocking=True)

    def close_work(self) -> None:
        """Waits, after a prefill that ended or was broken off, until no copy is in flight. What was not pinned by then
        is not, until it is needed: a program that Ctrl-C ends would wait for it."""
        for pin in (self._pins or {}).values():
            pin.cancel()
        if self.on_cuda:
            self.copy_stream.synchronize()
        self._work = None


class Passage:
    """Pieces in the order in which one step, or one prefill, asks for them.

    Args:
        ahead: `Offload.run_ahead` copies the first pieces, as for a step.
        on_piece: called with (layer, start, piece [2, B, P, K, D]) for each that has been attended to.
    """

    def __init__(self, offload: Offload, ahead: bool = False, on_piece: Callable | None = None):
        self.offload, self.on_piece, self._count, buffers = offload, on_piece, 0, len(offload.staging)
        self._ahead = buffers if ahead else 0
        self._free: list[torch.cuda.Event | None] = [None] * buffers  # by buffer: its last reader has been enqueued

    def attend(self, i: int, length: int, attend: Callable[[int, Tensor, Tensor], list]) -> attention.State:
        """The state over layer i's tokens before `length`. attend: gives the states over K, V [B, K, n, D] from `start`
        on."""
        size, merged = self.offload.piece, []
        for start in range(0, length, size):
            if self.offload.on_cuda:
                piece = self._fetch(i, start, length)
            else:
                piece = self.offload.host[i][:, :, start : start + size]
            states = attend(start, *piece[:, :, : length - start].transpose(2, 3))
            merged = [functools.reduce(attention.merge, merged + states)]
            if self.on_piece is not None:
                self.on_piece(i, start, piece)
        return merged[0]

    def _fetch(self, i: int, start: int, length: int) -> Tensor:
        """Enqueues a copy unless `run_ahead` did, and has the compute stream wait for it."""
        offload, slot = self.offload, self._count % len(self._free)
        compute, copies = torch.cuda.current_stream(offload.device), offload.copy_stream
        if self._count > 0:  # a copy into the previous buffer waits for what is enqueued up to here alone
            self._free[slot - 1] = compute.record_event()
        if self._count < self._ahead:
            compute.wait_event(offload.ready[slot])
        else:
            if self._free[slot] is not None:
                copies.wait_event(self._free[slot])
            elif self._count == 0:  # earlier users of the buffers
                copies.wait_stream(compute)
            try:
                offload.copy(slot, i, start, length)
            finally:  # or a recording that Ctrl-C breaks off could not be ended
                compute.wait_stream(copies)
        self._count += 1
        return offload.staging[slot]


def _huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor of a host, in pages that are larger where the system has such: they are pinned in half the time.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _unpin(tensors: list[Tensor]) -> None:
    if tensors:
        torch.cuda.synchronize()  # copies in flight
    for tensor in tensors:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
    tensors.clear()
