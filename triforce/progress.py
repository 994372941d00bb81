"""Bars for what takes long, by tqdm: on a terminal, and after a second in a notebook. A file gets a line when much work
begins.
"""

import sys
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
    """A bar of tqdm that fits where the output goes."""
    about = {"total": total, "desc": what, "unit": unit, "leave": False}
    if not in_notebook():
        from tqdm import tqdm

        return tqdm(**about, disable=None, file=sys.stderr, ncols=78)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tqdm: that ipywidgets is not there, so that it shows text
        from tqdm.auto import tqdm

        return tqdm(**about, delay=DELAY)


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
