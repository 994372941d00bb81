"""What a command writes to a terminal: control characters of others, as in a model's output, a template's message or a
file's name, show as pictures there. Pipes and files get every character as it is.
"""

import contextlib
import os
import re
import sys

from .errors import UserError

# C0 but for tabs and line ends, DEL, C1, and what turns the direction of writing.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
DRAWING = ("tqdm.", "argparse")  # modules that draw on terminals: they move the cursor, and colour a help


def visible(text: str) -> str:
    """With pictures of control characters in their place, but for tabs and line ends."""
    return CONTROLS.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "\ufffd", text)


class Console:
    """stdout or stderr of a command, in the place of `sys.stdout` or `sys.stderr`.

    Args:
        stream: what is written to. None: nothing; the shell has closed it.
        must_work: False: what cannot be written, as where a disk is full, does not cost the answer. True: it raises
            UserError, or BrokenPipeError where the reader of a pipe has seen enough.
    """

    def __init__(self, stream, must_work: bool):
        self.stream, self.must_work = open(os.devnull, "w") if stream is None else stream, must_work
        self.filters, self.is_broken = self.stream.isatty(), False

    def write(self, text: str) -> int:
        draws = self.filters and sys._getframe(1).f_globals.get("__name__", "").startswith(DRAWING)
        return self.draw(visible(text) if self.filters and not draws else text)

    def draw(self, text: str) -> int:
        """Writes what controls the terminal on purpose."""
        self._do(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def _do(self, action, *args) -> None:
        try:
            action(*args)
        except OSError as error:
            self.is_broken = True
            if isinstance(error, BrokenPipeError) and self.must_work:
                raise
            if self.must_work:
                raise UserError(f"cannot write the output: {error.strerror}; make room, or write elsewhere") from None

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def draw(text: str, stream) -> None:
    """Writes a text that holds colours to stdout or stderr."""
    getattr(stream, "draw", stream.write)(text)
    stream.flush()


@contextlib.contextmanager
def consoles():
    """Within, stdout and stderr are Consoles. What could not be written is not tried again as the process ends."""
    before, out = (sys.stdout, sys.stderr), Console(sys.stdout, must_work=True)
    if hasattr(out.stream, "reconfigure"):
        out.stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = out, Console(sys.stderr, must_work=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = None if out.is_broken else before[0], before[1]
