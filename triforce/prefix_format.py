"""How a prefix file is laid out: a safetensors file that threads and ranks write and read chunk by chunk.

The length of the header comes first (8 bytes, little-endian), then the header (JSON, padded with spaces), then the
tensors one behind the other: `tokens` (int32 [N]), and for each layer i `k.{i}` and `v.{i}` ([K, S, D]), of which the
first begins at a whole page. Heads come first in memory order, so a rank's heads are one run of bytes, and a file that
two ranks wrote is opened by one or by four.

`__metadata__` holds the version, what the caller says `about` the file (JSON), and the checksums of the tokens and of
every chunk. A chunk is a run of tokens of one head: the unit in which threads write, read and check. The header's own
checksum stands at a fixed place in it.

Shapes: N tokens of the document, S of them that have keys and values, K KV heads of the whole model, D head_dim.
"""

import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .prefix_path import MAGIC

VERSION = "2"
PAGE = 4096
CHUNK_BYTES = 4 * 2**20
THREADS = 8  # one reads from the page cache at 2 to 5 GB/s, and a fast disk wants several requests at a time
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Chunk(NamedTuple):
    """Tokens [start, stop) of one head: K of a layer with half 0, V with half 1."""

    number: int  # of its checksum; the tokens' is 0
    half: int
    head: int
    start: int
    stop: int
    offset: int  # in bytes, from the end of the header


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file."""

    num_tokens: int
    num_layers: int
    n_kv_head: int
    length: int
    head_dim: int
    dtype: torch.dtype
    chunk_tokens: int

    @property
    def chunks_per_head(self) -> int:
        return -(-self.length // self.chunk_tokens)

    @property
    def num_checksums(self) -> int:
        return 1 + self.num_layers * 2 * self.n_kv_head * self.chunks_per_head

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        per_token = self.num_layers * 2 * self.n_kv_head * self.head_dim * self.dtype.itemsize
        return 4 * self.num_tokens + per_token * self.length

    def tensors(self) -> dict[str, dict]:
        """The header's table."""
        name = {dtype: name for name, dtype in DTYPES.items()}[self.dtype]
        shape, at = [self.n_kv_head, self.length, self.head_dim], 4 * self.num_tokens
        size = self.n_kv_head * self.length * self.head_dim * self.dtype.itemsize
        table = {"tokens": {"dtype": "I32", "shape": [self.num_tokens], "data_offsets": [0, at]}}
        for i in range(self.num_layers):
            for half in "kv":
                table[f"{half}.{i}"] = {"dtype": name, "shape": shape, "data_offsets": [at, at + size]}
                at += size
        return table

    def chunks(self, i: int, heads: range) -> Iterator[Chunk]:
        """Those of some heads of a layer."""
        row = self.head_dim * self.dtype.itemsize
        for half in range(2):
            for head in heads:
                run = (i * 2 + half) * self.n_kv_head + head
                for c, start in enumerate(range(0, self.length, self.chunk_tokens)):
                    yield Chunk(1 + run * self.chunks_per_head + c, half, head, start,
                                min(start + self.chunk_tokens, self.length),
                                4 * self.num_tokens + (run * self.length + start) * row)


def checksum(data: np.ndarray) -> int:
    """Of bytes [n]: the CRC-32 of the sums of rows and of columns of each block of 64 rows of 512 words.

    A change that it misses would have to hit four words at least, in two rows and two columns, and cancel in each of
    them; blocks or rows that have changed places have other sums in other places. One core here sums 12.8 GB/s, and
    zlib's CRC-32 of the bytes themselves takes 1.7 (adler32 2.7, SHA-256 1.4), less than the page cache gives.
    """
    block = 64 * 512 * 8
    whole = len(data) // block * block
    words = data[:whole].view("<i8").reshape(-1, 64, 512)
    return zlib.crc32(data[whole:], zlib.crc32(words.sum(1), zlib.crc32(words.sum(2))))


def header(layout: Layout, about: dict, checksums: list[int]) -> bytes:
    """All that comes before the tensors. As long for one list of checksums as for another."""
    metadata = {"version": VERSION, "about": json.dumps(about, sort_keys=True),
                "chunk_tokens": str(layout.chunk_tokens),
                "checksums": "".join(f"{number:08x}" for number in checksums)}
    compact = (",", ":")
    rest = f'",{json.dumps(metadata, separators=compact)[1:]},{json.dumps(layout.tensors(), separators=compact)[1:]}'
    size = 8 + len(MAGIC) + 8 + len(rest)
    rest = rest.encode() + b" " * (-(size + 4 * layout.num_tokens) % PAGE)
    return struct.pack("<Q", len(MAGIC) + 8 + len(rest)) + MAGIC + b"%08x" % zlib.crc32(rest) + rest


def write_all(file: int, data: np.ndarray, offset: int) -> None:
    while len(data):
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def read_all(file: int, data: np.ndarray, offset: int) -> int:
    """Fills `data`, and returns its bytes; fewer if the file ends before."""
    done = 0
    while done < len(data):
        count = os.preadv(file, [data[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


class Staging:
    """A buffer for each thread, through which chunks go that are not read or written in place; pinned for a GPU.

    Args:
        begin: what a thread calls first; it decides on which stream of the GPU the thread copies.
    """

    def __init__(self, layout: Layout, device: torch.device, begin: Callable[[], None]):
        self._shape, self._dtype = (min(layout.chunk_tokens, layout.length), layout.head_dim), layout.dtype
        self._device, self._begin, self._local = device, begin, threading.local()

    def buffer(self, chunk: Chunk) -> Tensor:
        """[tokens of the chunk, D], this thread's."""
        if not hasattr(self._local, "buffer"):
            self._begin()
            pinned = self._device.type == "cuda"
            self._local.buffer = torch.empty(self._shape, dtype=self._dtype, pin_memory=pinned)
        return self._local.buffer[: chunk.stop - chunk.start]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Between a buffer and another tensor. Has come to its end when it returns."""
        if self._device.type != "cuda":
            target.copy_(source)
            return
        # A dtype is converted on the GPU.
        target.copy_(source.to(target.device, non_blocking=True) if target.is_cuda else source.to(target.dtype),
                     non_blocking=True)
        torch.cuda.current_stream(self._device).record_event().synchronize()


def in_place(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
