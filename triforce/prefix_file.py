"""A document's keys and values in a file, `moby-dick.prefix`: written once, opened by whoever has questions about it.

It knows nothing of engines or caches, and moves tensors between files and wherever they are. The file is safetensors:
`k.{i}.{h}` and `v.{i}.{h}` ([S, D]) for each layer i and head h, and `tokens` (int32 [N]). Threads and ranks write,
read and check the tensors of one head each, so a file that two ranks wrote is opened by one or by four. The metadata
hold the version and the contents (JSON, with its CRC-32): what the caller says `about` the file, its sizes, and the
CRC-32 of each tensor.

Shapes: N tokens of the document, S of them that have keys and values, K KV heads of the whole model, D head_dim.
"""

import contextlib
import fcntl
import glob
import json
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import UserError
from .parallel import Group, together
from .prefix_path import MAGIC, as_path, check_source, check_target, reading
from .streams import like_this_thread, on_new_stream

VERSION = "3"
THREADS = 8  # one reads from the page cache at 2 to 5 GB/s, and sums up 1 to 2
STRETCH = 2**20  # bytes that are read and summed up while a core's cache has them
LONGEST = 2**28  # bytes of a header
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """The sizes of a file, and which tensors it has."""

    num_tokens: int
    num_layers: int
    n_kv_head: int
    length: int
    head_dim: int
    dtype: str  # as safetensors names it

    def is_sound(self, num_tensors: int) -> bool:
        """Whether a file of so many tensors may have these sizes, which may be of any kind."""
        *sizes, dtype = asdict(self).values()
        return (all(type(size) is int and 0 <= size < 2**31 for size in sizes) and dtype in [*DTYPES]
                and self.length <= self.num_tokens and 0 < self.head_dim
                and 1 < num_tensors == 2 * self.num_layers * self.n_kv_head + 1)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(size for *_, size in self.tensors().values())

    def heads(self, i: int, heads: range) -> Iterator[tuple[str, int, int]]:
        """(name of the tensor, 0 for K and 1 for V, head) of some heads of layer i."""
        return ((f"{'kv'[half]}.{i}.{head}", half, head) for half in range(2) for head in heads)

    def tensors(self) -> dict[str, tuple[str, list[int], int]]:
        """Dtype, shape and bytes of each, in the order in which they lie."""
        names = (name for i in range(self.num_layers) for name, *_ in self.heads(i, range(self.n_kv_head)))
        size = self.length * self.head_dim * DTYPES[self.dtype].itemsize
        of_heads = dict.fromkeys(names, (self.dtype, [self.length, self.head_dim], size))
        return {**of_heads, "tokens": ("I32", [self.num_tokens], 4 * self.num_tokens)}

    def header(self, about: dict, checksums: dict[str, str]) -> tuple[bytes, dict[str, int]]:
        """(all that comes before the tensors, where each begins). As long for one set of checksums as for another."""
        contents = json.dumps({"about": about, "sizes": asdict(self), "checksums": checksums})
        metadata = {"version": VERSION, "crc32": _checksum(contents.encode()), "contents": contents}
        table, starts, at = {}, {}, 0
        for name, (dtype, shape, size) in self.tensors().items():
            table[name], starts[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}, at
            at += size
        text = MAGIC + f",{json.dumps(metadata)[1:]},{json.dumps(table)[1:]}".encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + start for name, start in starts.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, which is contiguous."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _checksum(data) -> str:
    return f"{zlib.crc32(data):08x}"


def write(path: str | Path, layout: Layout, about: dict, tokens: list[int], source: Callable[[int], Tensor],
          heads: range, device: torch.device, group: Group | None = None) -> None:
    """Writes a file, all of it or nothing: beside its name, and renamed once all of it is on the disk.

    Args:
        about: what the caller wants to know of it again, as JSON can say it. tokens: of the whole document.
        source: gives K and V of a layer, [2, len(heads), S, D], on `device` or the CPU. It is called once a layer, in
            order, after what it gave before is done with.
        heads: this rank's, of the whole model's. group: ranks that write together, to one disk; each calls this.

    Raises:
        UserError: there is no room, no permission or no such folder. What was there before is still there.
    """
    path = Path(os.path.realpath(as_path(path)))  # a link stays one
    first = group is None or group.rank == 0
    begin, starts = layout.header(about, dict.fromkeys(layout.tensors(), "0" * 8))  # the first rank's count
    needed = len(begin) + layout.nbytes

    def write_heads() -> dict[str, str]:
        with _explained(path, needed), open(beside, "r+b", buffering=0) as file:
            return _write_heads(file.fileno(), starts, layout, source, heads, device)

    def finish() -> None:
        ids = _bytes_of(torch.tensor(tokens, dtype=torch.int32))
        found = {"tokens": _checksum(ids)}
        for part in parts:
            found.update(part)
        with _explained(path, needed), open(beside, "r+b") as file:
            file.write(layout.header(about, {name: found[name] for name in starts})[0])
            file.seek(starts["tokens"])
            file.write(ids)
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, path)

    with together(group) as do, contextlib.ExitStack() as stack:
        beside, starts = do(lambda: (stack.enter_context(_beside(path, needed)), starts) if first else None)[0]
        parts = do(write_heads)
        do(lambda: finish() if first else None)


def _write_heads(file: int, starts: dict[str, int], layout: Layout, source, heads: range,
                 device: torch.device) -> dict[str, str]:
    """Writes this rank's heads of all layers. Returns checksums by the tensors' names."""
    found = {}

    def work(one: tuple[str, int, int]) -> None:
        name, half, head = one
        data = _bytes_of(kv[half][head - heads.start].to("cpu", DTYPES[layout.dtype]).contiguous())
        found[name], at = _checksum(data), starts[name]
        while len(data):
            count = os.pwrite(file, data, at)
            data, at = data[count:], at + count

    # Not on this thread's stream: another thread may record a step on it.
    with ThreadPoolExecutor(THREADS, initializer=on_new_stream(device)) as threads:
        for i in range(layout.num_layers):
            kv = None  # let go before the next is made
            kv = source(i)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            list(threads.map(work, layout.heads(i, heads)))
    os.fsync(file)
    return found


def check_room(path: str | Path, nbytes: int, group: Group | None = None) -> None:
    """Raises UserError for what `write` would refuse of so many bytes, before the hours that they take to compute."""
    beside = _beside(Path(os.path.realpath(as_path(path))), nbytes)
    with together(group) as do, contextlib.ExitStack() as stack:
        do(lambda: stack.enter_context(beside) if group is None or group.rank == 0 else None)


@contextlib.contextmanager
def _explained(path: Path, needed: int) -> Iterator[None]:
    """Within, what the system refuses is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}, {needed / 1e9:.3f} GB: {error.strerror or error}; make room, raise the "
                        "limit of a file's size (ulimit -f), or choose a folder that can be written") from None


@contextlib.contextmanager
def _beside(path: Path, needed: int) -> Iterator[Path]:
    """A file of so many bytes in the same folder, which is gone at the end unless it was renamed.

    Its writer holds a lock on it, which the system takes from a dead one: so leftovers are known, and removed.
    """
    check_target(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(file.fileno())
            if about.st_size or about.st_mtime < time.time() - 60:  # else it may be about to be locked
                left.unlink()
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        raise UserError(f"{path} needs {needed / 1e9:.3f} GB, and {path.parent} has {free / 1e9:.3f} GB free; free "
                        "some, or write to another disk")
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with _explained(path, needed), open(name, "xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks: leftovers stay, then
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(needed)
            yield name
    finally:
        name.unlink(missing_ok=True)


class PrefixReader:
    """A file that is open for reading. Header and tokens have been checked; keys and values are, as they are read.

    It reads what was there when it was opened, even if the name has become another file's.

    Attributes:
        layout: its sizes. about: what `write` was given, from JSON. tokens: of the whole document.

    Raises:
        UserError: it is absent, unreadable, something else, of another version, truncated or altered.
    """

    def __init__(self, path: str | Path):
        self.path = as_path(path)
        with reading(self.path), contextlib.ExitStack() as stack:
            check_source(self.path)
            self._file = stack.enter_context(open(self.path, "rb"))
            self._read_header()
            ids = torch.empty(self.layout.num_tokens, dtype=torch.int32)
            self._read("tokens", ids, torch.int32)
            self.tokens = ids.tolist()
            if min(self.tokens, default=0) < 0:
                raise self._altered("a token is negative")
            stack.pop_all()

    def _read_header(self) -> None:
        """It must be what `write` makes of its own contents, to the byte."""
        begin = self._file.read(8 + len(MAGIC))
        if len(begin) <= 8 or not MAGIC.startswith(begin[8:]):
            raise UserError(f"{self.path} is no prefix file, or was altered; give one that was saved as such")
        begin += self._file.read(max(min(int.from_bytes(begin[:8], "little"), LONGEST) + 8 - len(begin), 0))
        try:
            table = json.loads(begin[8:])
            metadata = table.pop("__metadata__")
            version = metadata["version"][:20]
            whole = self._header_of(metadata["contents"], table) if version == VERSION else begin
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._altered("its header says what none does") from None
        if version != VERSION:
            raise UserError(f"{self.path} has version {version} of the format, and this library reads version "
                            f"{VERSION}; remove it and compute the document anew")
        if begin != whole or os.fstat(self._file.fileno()).st_size != len(whole) + self.layout.nbytes:
            raise self._altered("its header differs from its checksum, or its size from what the header says")

    def _header_of(self, text: str, table: dict) -> bytes:
        """What `write` makes of these contents. Raises some error if one is missing, of another kind or range."""
        contents = json.loads(text)
        self.about, self._checksums, self.layout = contents["about"], contents["checksums"], Layout(**contents["sizes"])
        fits = self.layout.is_sound(len(table)) and self._checksums.keys() == table.keys()
        if not fits or type(self.about) is not dict:
            raise ValueError
        whole, self._starts = self.layout.header(self.about, self._checksums)
        return whole

    def _altered(self, how: str) -> UserError:
        return UserError(f"{self.path} is truncated or altered: {how}; copy it again, or make it anew")

    @torch.inference_mode()  # where tensors of either kind may be written; threads begin outside of it
    def _read(self, name: str, into: Tensor, dtype: torch.dtype) -> None:
        """A tensor of the file, of this dtype, goes to another one, and is checked."""
        checksum, at = 0, self._starts[name]
        in_place = into.dtype == dtype and into.is_cpu and into.is_contiguous()
        for rows in into.split(max(STRETCH // (into.shape[1:].numel() * dtype.itemsize), 1)):
            buffer = rows if in_place else torch.empty(rows.shape, dtype=dtype)
            data = left = _bytes_of(buffer)
            while len(left) and (count := os.preadv(self._file.fileno(), [left], at)):
                left, at = left[count:], at + count
            checksum = zlib.crc32(data, checksum)
            if not in_place:
                rows.copy_(buffer)
        if f"{checksum:08x}" != self._checksums[name]:
            raise self._altered(f"{name} differs from its checksum")

    def fill(self, place: Callable[[int], tuple[Tensor, Tensor]], heads: range, device: torch.device,
             group: Group | None = None) -> None:
        """Reads keys and values of some heads into tensors, and checks what it reads.

        Args:
            place: gives K and V of a layer, [len(heads), S or more, D] each, on `device` or the CPU, of any dtype.
            heads: of the whole model's. group: ranks that read at the same time: if it fails on one, all raise.

        Raises:
            UserError: it was altered or cannot be read. What the tensors hold is then undefined.
        """
        def fill() -> None:
            places = (place(i) for i in range(self.layout.num_layers))
            tasks = ((name, kv[half][head - heads.start, : self.layout.length], DTYPES[self.layout.dtype])
                     for i, kv in enumerate(places) for name, half, head in self.layout.heads(i, heads))
            with reading(self.path), ThreadPoolExecutor(THREADS, initializer=like_this_thread(device)) as threads:
                list(threads.map(lambda task: self._read(*task), tasks))

        with together(group) as do:
            do(fill)

    def __enter__(self) -> "PrefixReader":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
