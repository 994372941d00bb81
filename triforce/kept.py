"""What outlasts a process: files in a folder of the user's cache, whole or not there at all.

    ~/.cache/triforce (or $XDG_CACHE_HOME/triforce, or $TRIFORCE_CACHE)/<digest>/about.json, *.piece, costs-*.json

A folder belongs to one combination of versions, machine, model shapes and settings, which `about.json` spells out.
Whatever is damaged, of another version or refused by the system counts as not there: a process is then slower, and says
why once. To clear the cache, delete the folder.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

log = logging.getLogger("triforce")
DIGEST = hashlib.sha256().digest_size


def root() -> Path:
    """Where everything is kept."""
    named = os.environ.get("TRIFORCE_CACHE")
    return Path(named or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "triforce"))


@functools.cache
def code_version() -> str:
    """A digest of this library's code: what is compiled from it, or measured of it, belongs to it alone."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def machine(device: torch.device) -> dict:
    """What decides how a piece is compiled there, and how long it takes."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "index": device.index or 0, "cuda": torch.version.cuda}
    return {"device": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Folder:
    """The files of one combination.

    Args:
        about: what they depend on, as JSON can say it. Versions of the code, of PyTorch and of Python are added.
        say: whether this process tells what went wrong.
    """

    def __init__(self, about: dict, say: bool = True):
        self.about = {**about, "triforce": code_version(), "torch": torch.__version__,
                      "python": ".".join(map(str, sys.version_info[:2]))}
        text = json.dumps(self.about, sort_keys=True, indent=1)
        self.path = root() / hashlib.sha256(text.encode()).hexdigest()[:24]
        self._text, self._may_say = text, say

    def read(self, name: str) -> bytes | None:
        """What was written under this name; None if nothing was, or if it is damaged."""
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"cannot read {self.path / name}: {error.strerror}; set TRIFORCE_CACHE to a folder that can be "
                      "read and written")
            return None
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            self._say(f"{self.path / name} is damaged; it will be made anew")
            return None
        return data[DIGEST:]

    def write(self, name: str, data: bytes) -> bool:
        """Writes it beside its name and renames it, so that others see all of it or what was there before. Returns
        whether it is there. At the end of the process, when Python can import nothing any more, nothing is kept."""
        if sys.is_finalizing():
            return False
        beside = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if name != "about.json" and not (self.path / "about.json").exists():
                self.write("about.json", self._text.encode())
            handle, beside = tempfile.mkstemp(dir=self.path, prefix=".")
            with os.fdopen(handle, "wb") as file:
                file.write(data if name == "about.json" else hashlib.sha256(data).digest() + data)
            os.replace(beside, self.path / name)
            return True
        except OSError as error:  # read-only, full, or not a folder
            if beside is not None:
                with contextlib.suppress(OSError):
                    os.unlink(beside)
            self._say(f"cannot keep anything in {self.path}: {error.strerror}; set TRIFORCE_CACHE to a folder that can "
                      "be written")
            return False

    def names(self, ending: str) -> list[str]:
        """Files of this ending."""
        with contextlib.suppress(OSError):
            return sorted(path.name for path in self.path.glob(f"[!.]*{ending}"))
        return []

    @contextlib.contextmanager
    def locked(self, part: int = 0) -> Iterator[None]:
        """One process at a time for each part of a work; the system unlocks for one that is killed.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / f".lock{part}", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _say(self, what: str) -> None:
        if self._may_say:
            log.warning("%s", what)
        self._may_say = False
