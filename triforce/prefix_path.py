"""The name of a file for a prefix, and how such a file begins. The command line checks names before it imports PyTorch,
which is not imported here.
"""

import contextlib
import os
from pathlib import Path

from .errors import UserError

MAGIC = b'{"__metadata__":{"format":"triforce.prefix"'  # behind the 8 bytes of the header's length
BESIDE = len("..01234567.tmp")  # bytes that the name has more while the file is written


def as_path(path) -> Path:
    """Raises UserError for what is no file's name."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path) or not str(path):
        raise UserError(f"{path!r} is no name of a file; give one such as 'document.prefix'")
    return Path(path).expanduser()


@contextlib.contextmanager
def reading(path: Path):
    """Within, a system that refuses to read the file is a UserError."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"there is no {path}; give the name of a file that was saved") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; ask its owner for it, or make it "
                        "anew") from None


def holds_something(path: str | Path) -> bool:
    """Whether there is a file of that name, which is not empty."""
    path = as_path(path)
    return path.exists() and path.stat().st_size > 0


def begins_as_one(path: Path) -> bool:
    """Whether a file begins as one of a prefix does, of whatever version, or is cut within that."""
    with open(path, "rb") as file:
        begin = file.read(8 + len(MAGIC))
    return len(begin) > 8 and MAGIC.startswith(begin[8:])


def check_source(path: str | Path) -> None:
    """Raises UserError if there is nothing of that name, or no file."""
    path = as_path(path)
    with reading(path):
        path.stat()
    if not path.is_file():
        kind = "a folder; give the name of a file in it" if path.is_dir() else "no regular file; give another name"
        raise UserError(f"{path} is {kind}")


def check_target(path: str | Path) -> None:
    """Raises UserError if there is no folder for the name, if nothing can be written there, or if the name belongs to
    something that a prefix may not replace: all but a prefix file, whole or cut, and an empty file."""
    path = as_path(path)
    try:
        real = Path(os.path.realpath(path))  # what a link leads to
        folder, is_there = real.parent, path.exists()
        if is_there:
            check_source(path)
        if not folder.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {folder}; make it first")
        if not os.access(folder, os.W_OK):
            raise UserError(f"cannot write {path}: its folder may not be written to; choose another one")
        most, length = os.pathconf(folder, "PC_NAME_MAX") - BESIDE, len(os.fsencode(real.name))
        if length > most:
            raise UserError(f"cannot write {path}: its name has {length} bytes, and may have {most}; give another")
        if is_there and path.stat().st_size and os.access(path, os.R_OK) and not begins_as_one(path):
            raise UserError(f"{path} is there, and is no prefix file; give another name, or remove it")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; give another name") from None
