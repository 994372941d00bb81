"""The name of a file for a prefix, and how such a file begins. The command line checks names before it imports PyTorch,
which is not imported here.
"""

import contextlib
import os
from pathlib import Path

from .errors import UserError

MAGIC = b'{"__metadata__":{"format":"triforce.prefix","crc32":"'  # behind it 8 hex digits, of all that follows them


def as_path(path) -> Path:
    """Raises UserError for what is no file's name."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path) or not str(path):
        raise UserError(f"{path!r} is no name of a file; give one such as 'document.prefix'")
    return Path(path).expanduser()


def check_source(path: str | Path) -> None:
    """Raises UserError if there is nothing of that name, or a folder."""
    path = as_path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file in it")
    if not path.exists():
        raise UserError(f"there is no {path}; give the name of a file that was saved")


def check_target(path: str | Path) -> None:
    """Raises UserError if there is no folder for the name, or if it belongs to something that a prefix may not replace:
    all but a prefix file, whole or cut, and an empty file."""
    path = as_path(path)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file in it, such as {path / 'document.prefix'}")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file; give another name")
    with contextlib.suppress(OSError), open(path, "rb") as file:  # nothing is there, or `write` meets the same
        begin = file.read(8 + len(MAGIC))
        if begin and (len(begin) <= 8 or not MAGIC.startswith(begin[8:])):
            raise UserError(f"{path} is there, and is no prefix file; give another name, or remove it")
