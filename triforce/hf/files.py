"""Files of strangers: read only where they are what they are named for, and their values by kind and range.

PyTorch is not imported here: `request.py` needs this before it is.
"""

import json
import math
import reprlib
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError

LFS = b"version https://git-lfs.github.com/spec/"  # begins what Git LFS leaves in place of a file
MAX_TEXT = 2**28  # bytes of JSON or of a template; the largest published tokenizer.json has some 2**25
REQUIRED = object()
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 200


def check_file(path: Path, largest: float = math.inf) -> None:
    """Raises UserError for what cannot be read as a file: absent, a pipe, a device, too large, a pointer of Git LFS."""
    try:
        if not path.is_file():
            if path.exists() or path.is_symlink():
                raise UserError(f"{path} is no regular file; download it again")
            raise UserError(f"{path} is missing; download the checkpoint again, or point to a folder that has it")
        if path.stat().st_size > largest:
            raise UserError(f"{path} has {path.stat().st_size} bytes, and at most {largest} are read; download it "
                            "again")
        with open(path, "rb") as file:
            if file.read(len(LFS)) == LFS:
                raise UserError(f"{path} is a pointer of Git LFS, not the file itself; run git lfs pull, or download "
                                "the checkpoint again")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from None


def read_text(path: Path) -> str:
    """The text of a file; an absent or broken one is a `UserError`."""
    check_file(path, MAX_TEXT)
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); download it again") from None


def read_json(path: Path) -> dict:
    """A JSON object from a file; an absent or broken one is a `UserError`."""
    text = read_text(path)
    try:
        content = json.loads(text, object_pairs_hook=_one_value_a_key)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return content


def read_optional_json(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _one_value_a_key(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise ValueError(f"{shown(key)} is there twice, as {shown(value)} and {shown(found[key])}")
    return found


@contextmanager
def about(path: Path):
    """Names the file in a message about what it holds."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


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
    text = (str(error).strip() or type(error).__name__)[:200]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value) -> str:
    """A stranger's value in a message: escaped and short."""
    return SHORT.repr(value)


class Fields:
    """Values of a JSON object, each by the kind and the range that are asked for. null counts as absent.

    Every method raises UserError where a value is of another kind, out of range, or absent and has no default.
    """

    def __init__(self, values: dict):
        self.values = values

    def get(self, key: str, default=None):
        """A value of any kind."""
        value = self.values.get(key)
        if value is None and default is REQUIRED:
            raise UserError(f"{key} is missing; download it again")
        return default if value is None else value

    def number(self, key: str, low: float, high: float, default=REQUIRED) -> float:
        value = self.get(key, default)
        if value is default:
            return value
        self.expect(key, type(value) in (int, float) and low <= value <= high, f"a number from {low:g} to {high:g}")
        return float(value)

    def whole(self, key: str, low: int, high: int, default=REQUIRED) -> int:
        value = self.get(key, default)
        if value is default:
            return value
        self.expect(key, type(value) in (int, float) and low <= value <= high and value == int(value),
                    f"a whole number from {low} to {high}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        self.expect(key, value in (True, False), "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key, default)
        self.expect(key, value is None or isinstance(value, str), "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list; empty where it is absent."""
        value = self.get(key, [])
        self.expect(key, isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts")
        return value

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        value = self.get(key, REQUIRED)
        fits = isinstance(value, list) and all(type(one) in (int, float) and low <= one <= high for one in value)
        self.expect(key, fits, f"a list of numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def part(self, key: str) -> "Fields":
        """An object within this one; empty where it is absent."""
        value = self.get(key, {})
        self.expect(key, isinstance(value, dict), "an object")
        return Fields(value)

    def expect(self, key: str, fits: bool, what: str) -> None:
        if not fits:
            raise UserError(f"{key} is {shown(self.values.get(key))}, and must be {what}; download it again")
