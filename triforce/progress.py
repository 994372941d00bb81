"""Bars for what takes long, on a terminal and in a notebook; a file gets a line when much work begins.

In a notebook a bar appears after a second, as a widget if ipywidgets is there, else as text. What tqdm cannot draw, a
plain line of text says.
"""

import sys
import time
import warnings

DELAY = 1.0  # seconds of work before a notebook shows a bar
MUCH = 1024  # tokens: work of which a file is told


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Bar:
    """A progress bar. It is made with the first report: the work may not come at all, and before it other lines may be
    printed.

    Args:
        what: is done, in a word.
        total: how much there is to do. unit: of it.
    """

    def __init__(self, what: str, total: int, unit: str = "tok"):
        self.what, self.total, self.unit = what, total, unit
        self.bar, self.is_told = None, total < MUCH or in_notebook() or sys.stderr.isatty()

    def __call__(self, share: float) -> None:
        """share: of the work that is done, 0 to 1. Less than before: other work of this kind has begun."""
        done = int(share * self.total)
        if self.bar is None and share >= 1:  # it was done before anybody could look
            return
        if self.bar is None or done < self.bar.n:
            self.close()
            self.bar = make(self.what, self.total, self.unit)
            if not self.is_told:
                unit = "tokens" if self.unit == "tok" else self.unit
                print(f"{self.what} of {self.total:,} {unit} ...", file=sys.stderr, flush=True)
                self.is_told = True
        self.bar.update(done - self.bar.n)
        if share >= 1:
            self.close()

    def count(self, done: int) -> None:
        """done: how much of the total."""
        self(done / self.total)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


def make(what: str, total: int, unit: str):
    """A bar of tqdm that fits where the output goes, or a plain one: with `n`, `update` and `close`."""
    notebook, about = in_notebook(), {"total": total, "desc": what, "unit": unit, "leave": False}
    try:
        if not notebook:
            from tqdm import tqdm

            return tqdm(**about, disable=None, file=sys.stderr, ncols=78)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tqdm: that ipywidgets is not there
            from tqdm.auto import tqdm

            return tqdm(**about, delay=DELAY)
    except Exception:  # tqdm or its widgets are not there, or do not fit each other: no reason to stop the work
        return PlainBar(what, total, shown=notebook or sys.stderr.isatty())


class PlainBar:
    """One line of text, written anew as work goes on.

    Args:
        shown: False: nothing is written.
    """

    def __init__(self, what: str, total: int, shown: bool):
        self.what, self.total, self.shown = what, total, shown
        self.n, self.percent, self.begun = 0, -1, time.monotonic()

    def update(self, more: int) -> None:
        self.n += more
        percent = 100 * self.n // max(self.total, 1)
        if self.shown and percent != self.percent and time.monotonic() - self.begun >= DELAY:
            self.percent = percent
            print(f"\r{self.what}: {percent:3d}% |{'#' * (percent // 4):<25}|", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.percent >= 0:
            print("\r" + " " * (len(self.what) + 34) + "\r", end="", file=sys.stderr, flush=True)
        self.percent = -1


class NotebookBars:
    """The bars of a call of `Engine.generate` in a notebook; elsewhere, and where the caller has his own, none.

    Args:
        options: of the call; what reports to the bars is added to them.
        total: tokens that the call may bring.
    """

    def __init__(self, options: dict, total: int):
        self.bars = []
        if not in_notebook() or options.get("on_prefill") or options.get("on_decode"):
            return
        prefill, decode = Bar("prefill", 100, "%"), Bar("decode", total)
        options |= {"on_prefill": prefill, "on_decode": decode.count}
        self.bars = [prefill, decode]

    def close(self) -> None:
        for bar in self.bars:
            bar.close()
