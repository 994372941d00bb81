"""The name of a file for a prefix, and how such a file begins. The command line checks names before it imports PyTorch,
so this module does not.
"""

import os
from pathlib import Path

from ..errors import UserError

MAGIC = b'{"__metadata__":{"format":"triforce.engine.prompt_cache"'  # behind the 8 bytes of the header's length


def as_path(path) -> Path:
    """Raises UserError for what is no name of a file or folder."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path) or not str(path):
        raise UserError(f"{path!r} is no name of a file or folder; give one such as 'kept'")
    return Path(path).expanduser()


def holds_something(path: str | Path) -> bool:
    """Whether there is a file of that name, which is not empty."""
    path = as_path(path)
    return os.path.exists(path) and os.path.getsize(path) > 0


def begins_as_one(path: Path) -> bool:
    """Whether a file begins as a prefix file of any version, or is cut within that beginning."""
    try:
        with open(path, "rb") as file:
            begin = file.read(8 + len(MAGIC))[8:]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; ask its owner for it, or give another name") from None
    return len(begin) > 0 and MAGIC.startswith(begin)


def check_source(path: str | Path) -> None:
    """Raises UserError if there is nothing of that name, or no file."""
    path = as_path(path)
    if not os.path.isfile(path):  # also for a name that is too long, where Path raises
        what = "a folder" if os.path.isdir(path) else "no regular file" if os.path.exists(path) else "not there"
        raise UserError(f"{path} is {what}; give the name of a file that was saved")


def check_target(path: str | Path) -> None:
    """Raises UserError if there is no folder for the name, or if the name belongs to something that a prefix may not
    replace: all but a prefix file, whole or cut, and an empty file."""
    path, folder = as_path(path), Path(os.path.realpath(as_path(path))).parent  # of what a link leads to
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {folder}; make it first")
    if os.path.exists(path):
        check_source(path)
        if holds_something(path) and not begins_as_one(path):
            raise UserError(f"{path} is there, and is no prefix file; give another name, or remove it")
