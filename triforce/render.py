"""What people see: progress bars, a text coloured by who proposed it (HTML, terminal), and a filter for control
characters that others wrote. Imports no PyTorch.
"""

import html
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import groupby, islice

# Levels from the cheapest to the dearest, see session.py: behind the letters of HTML, and in a terminal's theme. The
# palette is that of Okabe and Ito, which readers who confuse red and green can tell apart; it is thin enough for
# letters of a light and of a dark theme.
COLOURS = {"draft": ("0,114,178", 36), "ngram": ("204,121,167", 35), "custom": ("240,228,66", 33),
           "retrieval": ("0,158,115", 32), "target": ("213,94,0", 31)}

# C0 but for tabs and line ends, DEL, C1, and what turns the direction of writing.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
DRAWING = ("tqdm.", "argparse")  # modules that draw on terminals: they move the cursor, and colour a help


# -- bars --------------------------------------------------------------------------------------------------------------

def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


class Bar:
    """A bar of tqdm, which appears after a second. Calls report the share that is done, 0 to 1."""

    def __init__(self, what: str, total: int, unit: str = "tok"):
        where = {} if in_notebook() else {"disable": None, "file": sys.stderr, "ncols": 78}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tqdm: without ipywidgets it shows text
            from tqdm.auto import tqdm

            self.bar = tqdm(total=total, desc=what, unit=unit, leave=False, delay=1.0, **where)

    def __call__(self, share: float) -> None:
        self.count(int(share * self.bar.total))

    def count(self, done: int) -> None:
        """done: of the total."""
        self.bar.update(done - self.bar.n)
        if done >= self.bar.total:
            self.close()

    def close(self) -> None:
        self.bar.close()


@contextmanager
def notebook_bars(options: dict, total: int) -> Iterator[None]:
    """Within, a call of `Engine.generate` with these options has bars in a notebook, unless the caller has callbacks.
    total: tokens that the call may bring."""
    if not in_notebook() or options.get("on_prefill") or options.get("on_decode"):
        yield
        return
    with closing(Bar("prefill", 100, "%")) as prefill, closing(Bar("decode", total)) as decode:
        options |= {"on_prefill": prefill, "on_decode": decode.count}
        yield


# -- a text by levels --------------------------------------------------------------------------------------------------

def characters(pieces: list[str], levels: list[str]) -> Iterator[tuple[str, str]]:
    """Each character of a text, with the level of its token. Both lists, of one entry a token, may grow meanwhile."""
    return ((char, level) for piece, level in zip(pieces, levels, strict=False) for char in piece)


def spans(text: Iterator[tuple[str, str]], count: int | None = None) -> list[tuple[str, str]]:
    """The next `count` characters (None: all) as (text, level) pairs; neighbours differ in their level."""
    groups = groupby(islice(text, count), key=lambda pair: pair[1])
    return [("".join(char for char, _ in group), level) for level, group in groups]


def as_html(out) -> str:
    """A legend, the text and the statistics. Whatever a model says is escaped."""
    counts = Counter(out.levels)
    names = " ".join(f"{_html_span(level, level)} {counts[level]:,}" for level in COLOURS if counts[level])
    text = "".join(_html_span(*span) for span in spans(characters(out.pieces, out.levels))) or _escape(out.text)
    rows = "".join(f"<tr><td>{_escape(name)}</td><td>{_escape(value)}</td></tr>" for name, value in out.stats.rows())
    return (f"<div><p>{names}</p><div style=\"white-space:pre-wrap;overflow-wrap:anywhere\">{text}</div>"
            f"<p>finish_reason: {_escape(out.finish_reason)}</p>"
            f"<details open><summary>statistics</summary><table>{rows}</table></details></div>")


def _html_span(text: str, level: str) -> str:
    return f"<span style=\"background:rgba({COLOURS[level][0]},0.28)\" title=\"{level}\">{_escape(text)}</span>"


def _escape(text: str) -> str:
    return html.escape(visible(text))


def as_ansi(parts: list[tuple[str, str]]) -> str:
    """(text, level) pairs in a terminal's colours. Each ends with the usual one, so that a text that is broken off
    leaves no colour behind."""
    return "".join(f"\033[{COLOURS[level][1]}m{visible(text)}\033[0m" for text, level in parts)


def legend(levels: list[str], coloured: bool) -> str:
    """A line that names the levels of a text's tokens, with their shares."""
    counts = Counter(levels)
    parts = [(f"{level} {counts[level] / len(levels):.0%}", level) for level in COLOURS if counts[level]]
    return "levels: " + "  ".join(as_ansi([part]) if coloured else part[0] for part in parts)


# -- terminals ---------------------------------------------------------------------------------------------------------

def visible(text: str) -> str:
    """With pictures of control characters in their place, but for tabs and line ends."""
    return CONTROLS.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "\ufffd", text)


class Console:
    """A terminal, in the place of stdout or stderr: control characters of others show as pictures."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        draws = sys._getframe(1).f_globals.get("__name__", "").startswith(DRAWING)
        return self.stream.write(text if draws else visible(text))

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def draw(text: str, stream) -> None:
    """Writes a text that holds colours to stdout or stderr."""
    (stream.stream if isinstance(stream, Console) else stream).write(text)
    stream.flush()


def say(text: str) -> None:
    """Writes a line to stderr. Where it cannot be written, that does not cost the answer."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def consoles() -> Iterator[None]:
    """Within, stdout and stderr are Consoles where they are terminals, and nothing where the shell has closed them."""
    before = sys.stdout, sys.stderr
    out, err = (open(os.devnull, "w") if stream is None else stream for stream in before)
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (Console(stream) if stream.isatty() else stream for stream in (out, err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        try:
            out.flush()
        except OSError:  # which Python would meet again as the process ends
            sys.stdout = None
