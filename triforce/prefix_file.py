"""A document's keys and values in a file, `moby-dick.prefix`: written once, opened by whoever has questions about it.

It knows nothing of engines or caches, and moves tensors between files and wherever they are. `prefix_format.py` says
how a file is laid out.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import prefix_format as form
from .errors import UserError
from .parallel import Group, together
from .prefix_format import Chunk, Layout, Staging, bytes_of, checksum, in_place, read_all, write_all
from .prefix_path import MAGIC, as_path, check_target, reading
from .streams import like_this_thread, on_new_stream

AGAIN = "copy it again, or make it anew"


def write(path: str | Path, about: dict, tokens: list[int], source: Callable[[int], Tensor], *, num_layers: int,
          n_kv_head: int, length: int, head_dim: int, dtype: torch.dtype, heads: range,
          group: Group | None = None) -> None:
    """Writes a file, all of it or nothing: beside its name, and renamed once all of it is on the disk.

    Args:
        about: what the keys and values depend on, as JSON can say it; `check` compares it.
        tokens: of the whole document.
        source: gives K and V of a layer, this rank's heads alone: [2, len(heads), length, head_dim], on any device. It
            is called once a layer, in order, after what it gave before is done with.
        n_kv_head: of the whole model.
        heads: this rank's, of the whole model's.
        group: the ranks that write it together, each its heads. Every rank calls this, and all of them see one disk.

    Raises:
        UserError: there is no room, no permission or no such folder. What was there before is still there.
    """
    row = head_dim * dtype.itemsize
    layout = Layout(len(tokens), num_layers, n_kv_head, length, head_dim, dtype, max(form.CHUNK_BYTES // row, 1))
    path = Path(os.path.realpath(as_path(path)))  # a link stays one
    first = group is None or group.rank == 0
    start = len(form.header(layout, about, [0] * layout.num_checksums))
    needed = start + layout.nbytes
    with together(group) as do, contextlib.ExitStack() as stack:

        def begin() -> Path | None:
            with _explained(path, needed):
                return stack.enter_context(_beside(path, needed)) if first else None

        def write_heads() -> dict[int, int]:
            with _explained(path, needed):
                return _write_heads(beside, start, layout, source, heads)

        def finish() -> None:
            if first:
                with _explained(path, needed):
                    _finish(beside, path, layout, about, tokens, parts)

        beside = do(begin)[0]
        parts = do(write_heads)
        do(finish)


def _room(path: Path, needed: int) -> tuple[int, str]:
    """(bytes that are free where a file is to be, what to say if they are too few)."""
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    return free, (f"{path} needs {needed / 1e9:.3f} GB, and {path.parent} has {free / 1e9:.3f} GB free; free some, or "
                  "write to another disk")


@contextlib.contextmanager
def _explained(path: Path, needed: int) -> Iterator[None]:
    """Turns what the system refuses into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(_room(path, needed)[1]) from None
        remedy = "raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "choose a folder that can be written"
        raise UserError(f"cannot write {path}, {needed / 1e9:.3f} GB: {error.strerror or error}; {remedy}") from None


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
    free, short = _room(path, needed)
    if free < needed:
        raise UserError(short)
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


def _write_heads(beside: Path, start: int, layout: Layout, source, heads: range) -> dict[int, int]:
    """Writes this rank's heads of all layers, and waits for the disk. Returns checksums by their numbers."""
    shape, found, staging = (len(heads), layout.length, layout.head_dim), {}, None

    def work(chunk: Chunk) -> None:
        rows = kv[chunk.half][chunk.head - heads.start, chunk.start : chunk.stop]
        if not in_place(rows, layout.dtype):
            buffer = staging.buffer(chunk)
            staging.copy(buffer, rows)
            rows = buffer
        data = bytes_of(rows)
        found[chunk.number] = checksum(data)
        write_all(file.fileno(), data, start + chunk.offset)

    with open(beside, "r+b", buffering=0) as file, ThreadPoolExecutor(form.THREADS) as threads:
        for i in range(layout.num_layers):
            kv = None  # let go before the next is made
            kv = source(i)
            if any(tuple(x.shape) != shape for x in kv):
                raise ValueError(f"source({i}) must give {shape}, and gave {[tuple(x.shape) for x in kv]}")
            device = kv[0].device
            # Not on this thread's stream: another thread may record a step on it.
            staging = staging or Staging(layout, device, on_new_stream(device))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            list(threads.map(work, layout.chunks(i, heads)))
        os.fsync(file.fileno())
    return found


def _finish(beside: Path, path: Path, layout: Layout, about: dict, tokens: list[int], parts: list[dict]) -> None:
    """Header and tokens, and the name."""
    ids = np.asarray(tokens, dtype="<i4").view(np.uint8)
    found = {0: checksum(ids)}
    for part in parts:
        found.update(part)
    if len(found) != layout.num_checksums:
        missing = layout.num_checksums - len(found)
        raise ValueError(f"{missing} of {layout.num_checksums} chunks are of heads that no rank has")
    with open(beside, "r+b", buffering=0) as file:
        begin = form.header(layout, about, [found[number] for number in range(layout.num_checksums)])
        write_all(file.fileno(), np.frombuffer(begin + ids.tobytes(), np.uint8), 0)
        os.fsync(file.fileno())
    os.replace(beside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


class PrefixReader:
    """A file that is open for reading. Header and tokens have been checked; keys and values are, as they are read.

    It reads what was there when it was opened, even if the name has become another file's.

    Attributes:
        about: what `write` was given, from JSON.
        tokens: of the whole document.
        num_layers, n_kv_head, length, head_dim, dtype: as `write` was given them.
        nbytes: of the file.

    Raises:
        UserError: it is absent, unreadable, something else, of another version, truncated or altered.
    """

    def __init__(self, path: str | Path):
        self.path = path = as_path(path)
        with reading(path):
            self._file = open(path, "rb", buffering=0)
        try:
            with reading(self.path):
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.nbytes = os.fstat(self._file.fileno()).st_size
        begin = self._read(min(8 + len(MAGIC), self.nbytes), 0).tobytes()
        if not begin or not MAGIC.startswith(begin[8:]):
            raise UserError(f"{self.path} is no prefix file, or was altered; give one that was saved as such")
        if len(begin) < 8 + len(MAGIC):
            raise self._truncated(form.PAGE)
        self._start = 8 + struct.unpack("<Q", begin[:8])[0]
        if self._start > self.nbytes:
            raise self._truncated(self._start)
        text = self._read(self._start - 8, 8).tobytes()
        try:
            table = json.loads(text)
            metadata = table.pop("__metadata__")
            version = metadata["version"]
        except (ValueError, KeyError, AttributeError):
            raise self._altered("the header differs from its checksum") from None
        if version != form.VERSION:
            raise UserError(f"{self.path} has version {version} of the format, and this library reads version "
                            f"{form.VERSION}; make it anew, or open it with the library that wrote it")
        digits = len(MAGIC) + 8
        if text[len(MAGIC) : digits] != b"%08x" % zlib.crc32(text[digits:]):
            raise self._altered("the header differs from its checksum")
        # From here on the header is what `write` made.
        [num_tokens], (self.n_kv_head, self.length, self.head_dim) = table["tokens"]["shape"], table["k.0"]["shape"]
        self.num_layers, self.dtype = len(table) // 2, form.DTYPES[table["k.0"]["dtype"]]
        self._layout = Layout(num_tokens, self.num_layers, self.n_kv_head, self.length, self.head_dim, self.dtype,
                              int(metadata["chunk_tokens"]))
        whole = self._start + self._layout.nbytes
        if self.nbytes < whole:
            raise self._truncated(whole)
        if self.nbytes > whole:
            raise self._altered(f"it has {self.nbytes} bytes, and {whole} were written")
        sums = metadata["checksums"]
        self._checksums = [int(sums[at : at + 8], 16) for at in range(0, len(sums), 8)]
        ids = self._read(4 * num_tokens, self._start)
        if checksum(ids) != self._checksums[0]:
            raise self._altered("the tokens differ from their checksum")
        self.about, self.tokens = json.loads(metadata["about"]), ids.view("<i4").tolist()

    def _read(self, count: int, offset: int) -> np.ndarray:
        data = np.empty(count, np.uint8)
        if read_all(self._file.fileno(), data, offset) < count:  # it has become shorter since
            raise self._truncated(offset + count)
        return data

    def _truncated(self, needed: int) -> UserError:
        has = os.fstat(self._file.fileno()).st_size
        return UserError(f"{self.path} is truncated: it has {has} of at least {needed} bytes; {AGAIN}")

    def _altered(self, how: str) -> UserError:
        return UserError(f"{self.path} is altered: {how}; {AGAIN}")

    @torch.inference_mode()
    def fill(self, place: Callable[[int], tuple[Tensor, Tensor]], heads: range, group: Group | None = None) -> None:
        """Reads keys and values of some heads into tensors, and checks what it reads.

        Args:
            place: gives K and V of a layer, [len(heads), S or more, D] each: on any device, of any dtype and strides.
                It is called once a layer, before anything is read.
            heads: of the whole model's.
            group: ranks that read at the same time, each its heads: if it fails on one, all raise.

        Raises:
            UserError: it was altered or cannot be read. What the tensors hold is then undefined.
        """
        with together(group) as do:
            do(lambda: self._fill(place, heads))

    def _fill(self, place, heads: range) -> None:
        if heads.start < 0 or heads.stop > self.n_kv_head:
            raise ValueError(f"the file has {self.n_kv_head} KV heads, and {heads} were asked for")
        places = [place(i) for i in range(self.num_layers)]
        for shape in {tuple(tensor.shape) for pair in places for tensor in pair}:
            if shape[0] != len(heads) or shape[1] < self.length or shape[2] != self.head_dim:
                wanted = (len(heads), self.length, self.head_dim)
                raise ValueError(f"places must be {wanted} or longer, and one is {shape}")
        devices = {tensor.device for pair in places for tensor in pair}
        device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        staging = Staging(self._layout, device, like_this_thread(device))

        def work(task: tuple[int, Chunk]) -> None:
            i, chunk = task
            target = places[i][chunk.half][chunk.head - heads.start, chunk.start : chunk.stop]
            direct = in_place(target, self.dtype)
            rows = target if direct else staging.buffer(chunk)
            data = bytes_of(rows)
            if read_all(self._file.fileno(), data, self._start + chunk.offset) < len(data):
                raise self._truncated(self._start + self._layout.nbytes)
            if checksum(data) != self._checksums[chunk.number]:
                name = "values" if chunk.half else "keys"
                raise self._altered(f"the {name} of layer {i}, head {chunk.head}, tokens {chunk.start} to "
                                    f"{chunk.stop - 1}, differ from their checksum")
            if not direct:
                staging.copy(target, rows)

        def read(task: tuple[int, Chunk]) -> None:
            with torch.inference_mode():  # where tensors of either kind may be written; threads begin outside of it
                work(task)

        tasks = ((i, chunk) for i in range(self.num_layers) for chunk in self._layout.chunks(i, heads))
        with reading(self.path), ThreadPoolExecutor(form.THREADS) as threads:
            list(threads.map(read, tasks))

    def close(self) -> None:
        """Nothing can be read any more; `about` and the rest of the header stay."""
        self._file.close()

    def __enter__(self) -> "PrefixReader":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def check(of_file: dict, of_engine: dict, path: str | Path = "the file") -> None:
    """Compares what the keys and values of a file were made with to what they are wanted for.

    Names in `of_file` alone are ignored.

    Raises:
        UserError: something differs; the text names all that does.
    """
    differ = [name for name, value in of_engine.items() if name not in of_file or of_file[name] != value]
    if differ:
        raise UserError(f"{path} was made with another {', another '.join(differ)}; open it with what it was made "
                        "with, or make it anew")
