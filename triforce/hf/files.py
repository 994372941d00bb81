"""Files of strangers: read only where they are what they are named for, and their values by kind and range.

PyTorch is not imported here: `cli/request.py` needs this before it is.
"""

import json
import math
import os
import reprlib
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError

LFS = b"version https://git-lfs.github.com/spec/"  # begins what Git LFS leaves in place of a file
MAX_TEXT = 2**26  # bytes of JSON or of a template; the largest published tokenizer.json has some 2**25
REQUIRED = object()
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 200


def check_file(path: Path, largest: float = math.inf) -> None:
    """Raises UserError for what cannot be read as a file: absent, a pipe, a device, too large, a pointer of Git LFS."""
    with guarded(f"{path} cannot be read"):
        if not os.path.lexists(path):
            raise UserError(f"{path} is missing; download the checkpoint again, or point to a folder that has it")
        if not path.is_file() or path.stat().st_size > largest:
            size = "" if largest == math.inf else f" of at most {largest} bytes"
            raise UserError(f"{path} is no regular file{size}; download it again")
        with open(path, "rb") as file:
            if file.read(len(LFS)) == LFS:
                raise UserError(f"{path} is a pointer of Git LFS, not the file itself; run git lfs pull")


def read_text(path: Path) -> str:
    check_file(path, MAX_TEXT)
    with guarded(f"{path} cannot be read"):
        return path.read_text(encoding="utf-8")


def read_json(path: Path) -> dict:
    """A JSON object from a file; an absent or broken one is a `UserError`."""
    text = read_text(path)
    with guarded(f"{path} cannot be read"):
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    return content


def read_optional_json(path: Path) -> dict:
    return read_json(path) if os.path.lexists(path) else {}


@contextmanager
def about(name: str | Path | None, told: type[UserError] = UserError):
    """Names a file, or a line of one, in a message about what it holds. None: nothing is named. told: in which ones."""
    try:
        yield
    except told as error:
        raise told(f"{name}: {error}" if name else str(error)) from None


@contextmanager
def guarded(what: str):
    """Whatever fails within fails by a stranger's files. A panic of the tokenizers library is a BaseException."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({one_line(error)}); download the checkpoint again") from None


def one_line(error: BaseException) -> str:
    """What an error says, in one line: short, and with what is not printable escaped."""
    text = (" ".join(str(error).split()) or type(error).__name__)[:200]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value) -> str:
    """A stranger's value in a message: escaped and short."""
    return SHORT.repr(value)


# -- values: a kind is (what it is called, whether a value is one, what makes it ours) ---------------------------------

def whole(low: int, high: int) -> tuple:
    return (f"a whole number from {low} to {high}",
            lambda x: type(x) in (int, float) and low <= x <= high and x == int(x), int)


def number(low: float, high: float) -> tuple:
    return f"a number from {low:g} to {high:g}", lambda x: type(x) in (int, float) and low <= x <= high, float


def several(kind: tuple) -> tuple:
    what, fits, make = kind
    return f"a list, each {what}", lambda x: isinstance(x, list) and all(map(fits, x)), lambda x: tuple(map(make, x))


FLAG = "true or false", lambda x: x in (True, False), bool
TEXT = "a text", lambda x: isinstance(x, str), str
OBJECT = "an object", lambda x: isinstance(x, dict), dict


class Fields:
    """Values of a JSON object, by kind and range. null counts as absent."""

    def __init__(self, values: dict):
        self.values = values

    def get(self, key: str, kind: tuple, default=REQUIRED):
        """A value; UserError where it is not of the kind, or absent and has no default."""
        value, (what, fits, convert) = self.values.get(key), kind
        if value is None and default is not REQUIRED:
            return default
        self.expect(key, value is not None and fits(value), what)
        return convert(value)

    def part(self, key: str) -> "Fields":
        """An object within this one; empty where it is absent."""
        return Fields(self.get(key, OBJECT, {}))

    def expect(self, key: str, fits: bool, what: str) -> None:
        if not fits:
            found = shown(self.values[key]) if self.values.get(key) is not None else "missing"
            raise UserError(f"{key} is {found}, and must be {what}; download it again")
