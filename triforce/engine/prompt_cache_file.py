"""A document's keys and values in a file, `moby-dick.prefix`: written once, opened by whoever has questions about it.

The file is safetensors: `k.{i}.{h}` and `v.{i}.{h}` ([S, D]) for each layer i and head h, `tokens` (int32 [N]), and
`checksums` (int64): the CRC-32 of what the caller says `about` the file, and of each other tensor. The metadata hold
the version and `about`. Tensors have one head each, so a file that two ranks wrote is opened by one or by four.

A layer with a sliding window has the newest of its S tokens alone. The metadata of a model with windows say with which
position each layer begins.

Shapes: N tokens of the document, S of them that have keys and values, K KV heads of the whole model, D head_dim.
"""

import contextlib
import fcntl
import glob
import json
import math
import operator
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..hf.files import one_line
from ..parallel import Group, read_first, together
from ..runtime.streams import like_this_thread
from .prompt_cache_path import MAGIC, as_path, begins_as_one, check_source, check_target

VERSION = "3"
THREADS = 8  # one reads from the page cache at 2 to 5 GB/s, and sums up 1 to 2
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Altered(UserError):
    """A file does not hold what was written."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a file, and which tensors it has."""

    num_tokens: int
    num_layers: int
    n_kv_head: int
    length: int
    head_dim: int
    dtype: str  # as safetensors names it
    firsts: tuple[int, ...] = ()  # the first position that each layer has; (): 0

    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of each, in the order in which they lie."""
        of_heads = {name: (self.dtype, [self.held(i), self.head_dim])
                    for i in range(self.num_layers) for name, *_ in heads_of(i, range(self.n_kv_head))}
        return {"checksums": ("I64", [len(of_heads) + 2]), **of_heads, "tokens": ("I32", [self.num_tokens])}

    def held(self, i: int) -> int:
        """Tokens that layer i has."""
        return self.length - (self.firsts[i] if self.firsts else 0)

    def header(self, about: str) -> tuple[bytes, dict[str, int], int]:
        """(all that comes before the tensors, where each begins, bytes of the file)."""
        table, at = {}, 0
        for name, (dtype, shape) in self.tensors().items():
            size = math.prod(shape) * (DTYPES | {"I32": torch.int32, "I64": torch.int64})[dtype].itemsize
            table[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}, at + size
        firsts = {"firsts": json.dumps(self.firsts)} if self.firsts else {}
        metadata = json.dumps({"version": VERSION, "about": about, **firsts})
        text = MAGIC + f",{metadata[1:]},{json.dumps(table)[1:]}".encode()
        text += b" " * (-len(text) % 8)
        starts = {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in table.items()}
        return struct.pack("<Q", len(text)) + text, starts, 8 + len(text) + at


def heads_of(i: int, heads: range) -> list[tuple[str, int, int]]:
    """(name of the tensor, 0 for K and 1 for V, head) of some heads of layer i."""
    return [(f"{'kv'[half]}.{i}.{head}", half, head) for half in range(2) for head in heads]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, which is contiguous."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def write(path: str | Path, layout: Layout, about: dict, tokens: list[int],
          source: Callable[[int], Sequence[Tensor]], heads: range, group: Group | None = None) -> None:
    """Writes all of a file or nothing: beside its name, and renames it once all of it is on the disk. Raises UserError
    if there is no room, no permission or no such folder; the old file is then still there.

    Args:
        about: what the caller wants to read back, as JSON can hold it. tokens: of the whole document.
        source: gives K and V of a layer, [len(heads), S, D] each, which are written before it is called again.
        heads: this rank's, of the whole model's. group: ranks that write together, to one disk; each calls this.
    """
    about, checksums = read_first(group, lambda: json.dumps(about)), {}
    header, starts, nbytes = layout.header(about)

    def put(name: str, tensor: Tensor) -> None:
        data = _bytes_of(tensor)
        checksums[name] = zlib.crc32(data)
        with open(file, "r+b") as opened:
            opened.seek(starts[name])
            opened.write(data)

    def put_heads() -> dict[str, int]:
        with ThreadPoolExecutor(THREADS) as threads:
            for i in range(layout.num_layers):
                kv = [half.to("cpu", DTYPES[layout.dtype]).contiguous() for half in source(i)]
                tasks = [(name, kv[half][head - heads.start]) for name, half, head in heads_of(i, heads)]
                list(threads.map(put, *zip(*tasks, strict=True)))
        return checksums

    def finish() -> None:
        put("tokens", torch.tensor(tokens, dtype=torch.int32))
        found = {name: checksum for part in (*parts, checksums) for name, checksum in part.items()}
        put("checksums", torch.tensor([zlib.crc32(about.encode()), *(found[name] for name in [*starts][1:])]))
        with open(file, "r+b") as opened:
            opened.write(header)
            opened.flush()
            os.fsync(opened.fileno())  # what other ranks wrote, too
        os.replace(file, os.path.realpath(as_path(path)))

    with beside(path, nbytes, group) as file:
        parts = together(group, put_heads)
        read_first(group, finish)


@contextlib.contextmanager
def beside(path: str | Path, nbytes: int, group: Group | None) -> Iterator[Path]:
    """A file with room for `nbytes` bytes, see `_beside`: the first rank makes it for all of them."""
    with contextlib.ExitStack() as stack:
        yield read_first(group, lambda: stack.enter_context(_beside(path, nbytes)))


@contextlib.contextmanager
def _beside(path: str | Path, nbytes: int) -> Iterator[Path]:
    """A file with room for `nbytes` bytes in the same folder, which is removed at the end unless it was renamed. Raises
    UserError for what the system refuses.

    Its writer holds a lock on it, which the system releases when the writer dies: see `remove_leftovers`.
    """
    check_target(path)
    path = Path(os.path.realpath(as_path(path)))  # a link stays one
    remove_leftovers(path.parent, glob.escape(path.name))
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise UserError(f"{path} needs {nbytes / 1e9:.3f} GB, and its disk has {free / 1e9:.3f} GB free; free some")
    name = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(name, "xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks: leftovers stay, then
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(nbytes)
            yield name
    except OSError as error:
        raise UserError(f"cannot write {path}, {nbytes / 1e9:.3f} GB: {error.strerror or error}; make room, raise the "
                        "limit of a file's size (ulimit -f), or choose another name or folder") from None
    finally:
        with contextlib.suppress(OSError):
            name.unlink()


def remove_leftovers(folder: Path, names: str) -> None:
    """Removes what writers that died have left. names: a pattern of the files' names."""
    for left in folder.glob(f".{names}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # else it may be about to be locked
                left.unlink()


class PrefixReader:
    """A file that is open for reading. It stays the same even if another file takes its name. Opening it checks all but
    keys and values, and reading checks those. Raises UserError if it is absent, unreadable, something else, of another
    version, truncated or altered.

    Attributes:
        layout: its sizes. about: what `write` was given, from JSON. tokens: of the whole document.
    """

    def __init__(self, path: str | Path):
        self.path = as_path(path)
        check_source(self.path)
        if not begins_as_one(self.path):
            raise Altered(f"{self.path} is no prefix file, or was altered; give one that was saved as such")
        try:
            self._file = safe_open(self.path, framework="pt")
            version, about = (self._file.metadata()[name] for name in ("version", "about"))
            if version == VERSION:
                self._read_beginning(about)
        except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            raise self._altered(f"its header says what none does, {one_line(error)}") from None
        if version != VERSION:
            raise UserError(f"{self.path} has version {version[:20]}, and this library reads {VERSION}; make it anew")
        ids = torch.empty(self.layout.num_tokens, dtype=torch.int32)
        self._read("tokens", ids)
        self.tokens = ids.tolist()
        if min(self.tokens, default=0) < 0:
            raise self._altered("a token is negative")

    def _read_beginning(self, about: str) -> None:
        """Checks all but keys and values. Raises one error or another."""
        parts = {name: self._file.get_slice(name) for name in self._file.keys()}
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
        num_layers = len({name.split(".")[1] for name in found if "." in name})
        (_, [num_tokens]), (dtype, [length, head_dim]) = found["tokens"], found["k.0.0"]
        firsts = tuple(map(operator.index, json.loads(self._file.metadata().get("firsts", "[]"))))
        length += firsts[0] if firsts else 0
        self.layout = Layout(num_tokens, num_layers, (len(found) // 2 - 1) // num_layers, length, head_dim, dtype,
                             firsts)
        if found != self.layout.tensors() or dtype not in DTYPES or length > num_tokens:
            raise ValueError("its tensors do not fit each other")
        of_about, *of_tensors = self._file.get_tensor("checksums").tolist()
        self._checksums = dict(zip([*self.layout.tensors()][1:], of_tensors, strict=True))
        self.about = json.loads(about)
        if of_about != zlib.crc32(about.encode()) or type(self.about) is not dict:
            raise ValueError("or differs from its checksum")

    def _altered(self, how: str) -> UserError:
        return Altered(f"{self.path} is truncated or altered: {how}; copy it again, or make it anew")

    @torch.inference_mode()  # where tensors of either kind may be written; threads begin outside of it
    def _read(self, name: str, into: Tensor) -> None:
        """Checks a tensor of the file, and copies it into another one, of any dtype."""
        tensor = self._file.get_tensor(name)
        if zlib.crc32(_bytes_of(tensor)) != self._checksums[name]:
            raise self._altered(f"{name} differs from its checksum")
        into.copy_(tensor)

    def fill(self, place: Callable[[int], tuple[Tensor, Tensor]], heads: range, device: torch.device,
             group: Group | None = None) -> None:
        """Reads keys and values of some heads. Raises UserError, on all ranks of the group, if they were altered; what
        the tensors hold is then undefined.

        Args:
            place: gives K and V of a layer, [len(heads), S or more, D] each, on `device` or the CPU, of any dtype; for
                the newest tokens of a layer with a window, of their number.
        """
        def fill() -> None:
            tasks = ((name, kv[half][head - heads.start, : self.layout.held(i)])
                     for i in range(self.layout.num_layers) for kv in [place(i)]
                     for name, half, head in heads_of(i, heads))
            with ThreadPoolExecutor(THREADS, initializer=like_this_thread(device)) as threads:
                list(threads.map(lambda task: self._read(*task), tasks))

        together(group, fill)

    def __enter__(self) -> "PrefixReader":
        return self

    def __exit__(self, *_) -> None:
        del self._file  # which ends the mapping
