"""A document's keys and values in a file, `moby-dick.prefix`: written once, opened by whoever has questions about it.

It knows nothing of engines or caches, and moves tensors between files and wherever they are. The file is safetensors:
`k.{i}.{h}` and `v.{i}.{h}` ([S, D]) for each layer i and head h, and `tokens` (int32 [N]). Threads and ranks write,
read and check the tensors of one head each, so a file that two ranks wrote is opened by one or by four. The metadata
hold the version and the contents (JSON, with its CRC-32): what the caller says `about` the file, its sizes, and the
CRC-32 of each tensor.

Shapes: N tokens of the document, S of them that have keys and values, K KV heads of the whole model, D head_dim.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import resource
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import UserError
from .parallel import Group, together
from .prefix_path import MAGIC, as_path, begins_as_one, check_source, check_target, reading
from .streams import like_this_thread, on_new_stream

VERSION = "3"
THREADS = 4  # one reads from the page cache at 2 to 5 GB/s, and sums up 1 to 2
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
    def head_bytes(self) -> int:
        return self.length * self.head_dim * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return 2 * self.num_layers * self.n_kv_head * self.head_bytes + 4 * self.num_tokens

    def heads(self, i: int, heads: range) -> Iterator[tuple[str, int, int]]:
        """(name of the tensor, 0 for K and 1 for V, head) of some heads of layer i."""
        return ((f"{'kv'[half]}.{i}.{head}", half, head) for half in range(2) for head in heads)

    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of each, in the order in which they lie."""
        names = (name for i in range(self.num_layers) for name, *_ in self.heads(i, range(self.n_kv_head)))
        of_heads = dict.fromkeys(names, (self.dtype, [self.length, self.head_dim]))
        return {**of_heads, "tokens": ("I32", [self.num_tokens])}

    def header(self, about: dict, checksums: dict[str, str]) -> tuple[bytes, dict[str, int]]:
        """(all that comes before the tensors, where each begins). As long for one set of checksums as for another."""
        contents = json.dumps({"about": about, "sizes": asdict(self), "checksums": checksums})
        metadata = {"version": VERSION, "crc32": f"{zlib.crc32(contents.encode()):08x}", "contents": contents}
        table, starts, at = {}, {}, 0
        for name, (dtype, shape) in self.tensors().items():
            end = at + (4 * self.num_tokens if name == "tokens" else self.head_bytes)
            table[name], starts[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}, at, end
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
        about: what the caller wants to know of it again, as JSON can say it.
        tokens: of the whole document.
        source: gives K and V of a layer, this rank's heads alone: [2, len(heads), S, D], on `device` or the CPU. It
            is called once a layer, in order, after what it gave before is done with.
        heads: this rank's, of the whole model's.
        group: the ranks that write it together, each its heads. Every rank calls this, and all of them see one disk.

    Raises:
        UserError: there is no room, no permission or no such folder. What was there before is still there.
    """
    path = Path(os.path.realpath(as_path(path)))  # a link stays one
    first = group is None or group.rank == 0
    begin, starts = layout.header(about, dict.fromkeys(layout.tensors(), "0" * 8))  # the first rank's count
    needed = len(begin) + layout.nbytes
    ids = torch.tensor(tokens, dtype=torch.int32)

    def write_heads() -> dict[str, str]:
        with open(beside, "r+b", buffering=0) as file:
            found = _write_heads(file.fileno(), starts, layout, source, heads, device)
            if first:
                _write_all(file.fileno(), _bytes_of(ids), starts["tokens"])
                found["tokens"] = _checksum(_bytes_of(ids))
            os.fsync(file.fileno())
        return found

    def finish() -> None:
        found = {name: checksum for part in parts for name, checksum in part.items()}
        with open(beside, "r+b", buffering=0) as file:
            _write_all(file.fileno(), memoryview(layout.header(about, {name: found[name] for name in starts})[0]), 0)
            os.fsync(file.fileno())
        os.replace(beside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name, too, is on the disk
        finally:
            os.close(folder)

    with together(group) as on_all, contextlib.ExitStack() as stack:
        def do(work: Callable) -> list:
            return on_all(lambda: _explained(path, needed, work))

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
        found[name] = _checksum(data)
        _write_all(file, data, starts[name])

    # Not on this thread's stream: another thread may record a step on it.
    with ThreadPoolExecutor(THREADS, initializer=on_new_stream(device)) as threads:
        for i in range(layout.num_layers):
            kv = None  # let go before the next is made
            kv = source(i)
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            list(threads.map(work, layout.heads(i, heads)))
    return found


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def check_room(path: str | Path, nbytes: int, group: Group | None = None) -> None:
    """Raises UserError for what `write` would refuse of so many bytes, before the hours that they take to compute."""
    path = Path(os.path.realpath(as_path(path)))

    def check() -> None:
        with _beside(path, nbytes):
            pass

    with together(group) as do:
        do(lambda: _explained(path, nbytes, check) if group is None or group.rank == 0 else None)


def _explained(path: Path, needed: int, work: Callable):
    """What `work` returns; what the system refuses is a UserError."""
    try:
        return work()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _too_small(path, needed) from None
        remedy = "raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "choose a folder that can be written"
        raise UserError(f"cannot write {path}, {needed / 1e9:.3f} GB: {error.strerror or error}; {remedy}") from None


def _free(path: Path) -> int:
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize


def _too_small(path: Path, needed: int) -> UserError:
    return UserError(f"{path} needs {needed / 1e9:.3f} GB, and {path.parent} has {_free(path) / 1e9:.3f} GB free; free "
                     "some, or write to another disk")


@contextlib.contextmanager
def _beside(path: Path, needed: int) -> Iterator[Path]:
    """An empty file in the same folder, which is gone at the end unless it was renamed.

    Its writer holds a lock on it, which the system takes from a dead one: so leftovers are known, and removed.
    """
    check_target(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(left)
    if _free(path) < needed:
        raise _too_small(path, needed)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise OSError(errno.EFBIG, f"the limit of a file's size is {limit / 1e9:.3f} GB")
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = open(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "rb")  # with the mode that a user chose
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay, then
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            break
        file.close()  # another writer took it for a leftover before it was locked
    try:
        with file:
            yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


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
        with contextlib.ExitStack() as stack:
            with reading(self.path):
                check_source(self.path)
                if not begins_as_one(self.path):
                    raise UserError(f"{self.path} is no prefix file, or was altered; give one that was saved as such")
                try:
                    self._file = stack.enter_context(safe_open(self.path, framework="pt"))
                except SafetensorError as error:
                    raise self._altered(str(error), "truncated or altered") from None
            metadata = self._file.metadata()
            if metadata.get("version", VERSION) != VERSION:
                version = metadata["version"]
                raise UserError(f"{self.path} has version {version[:20]} of the format, and this library reads version "
                                f"{VERSION}; remove it and compute the document anew")
            try:
                self._read_contents(metadata["crc32"], metadata["contents"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self._altered("the header differs from its checksum") from None
            ids = self._checked("tokens")
            if len(ids) and ids.min() < 0:
                raise self._altered("a token is negative")
            self.tokens = ids.tolist()
            self.close = stack.pop_all().close

    def _read_contents(self, checksum: str, text: str) -> None:
        """Raises some error if a field is missing, of another kind, out of range, or not what the tensors are."""
        contents = json.loads(text)
        self.about, self._checksums = contents["about"], contents["checksums"]
        self.layout, names = Layout(**contents["sizes"]), self._file.keys()
        if checksum != _checksum(text.encode()) or not self.layout.is_sound(len(names)):
            raise ValueError("sizes")
        slices = {name: self._file.get_slice(name) for name in names}
        found = {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}
        if found != self.layout.tensors() or self._checksums.keys() != found.keys() or type(self.about) is not dict:
            raise ValueError("tensors")

    def _altered(self, how: str, what: str = "altered") -> UserError:
        return UserError(f"{self.path} is {what}: {how}; copy it again, or make it anew")

    def _checked(self, name: str) -> Tensor:
        tensor = self._file.get_tensor(name)
        if _checksum(_bytes_of(tensor)) != self._checksums[name]:
            half, *place = name.split(".")
            what = f"{'keys' if half == 'k' else 'values'} of layer {place[0]}, head {place[1]}," if place else name
            raise self._altered(f"the {what} differ from their checksum")
        return tensor

    def fill(self, place: Callable[[int], tuple[Tensor, Tensor]], heads: range, device: torch.device,
             group: Group | None = None) -> None:
        """Reads keys and values of some heads into tensors, and checks what it reads.

        Args:
            place: gives K and V of a layer, [len(heads), S or more, D] each: on `device` or the CPU, of any dtype and
                strides.
            heads: of the whole model's.
            group: ranks that read at the same time, each its heads: if it fails on one, all raise.

        Raises:
            UserError: it was altered or cannot be read. What the tensors hold is then undefined.
        """
        @torch.inference_mode()  # where tensors of either kind may be written; threads begin outside of it
        def work(one: tuple[Tensor, str]) -> None:
            target, name = one
            target[: self.layout.length].copy_(self._checked(name))

        def fill() -> None:
            places = (place(i) for i in range(self.layout.num_layers))
            tasks = ((kv[half][head - heads.start], name) for i, kv in enumerate(places)
                     for name, half, head in self.layout.heads(i, heads))
            with ThreadPoolExecutor(THREADS, initializer=like_this_thread(device)) as threads:
                list(threads.map(work, tasks))

        with together(group) as do:
            do(fill)

    def __enter__(self) -> "PrefixReader":
        return self

    def __exit__(self, *_) -> None:
        self.close()
