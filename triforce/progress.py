"""Bars for what takes long, by tqdm: on a terminal, and after a second in a notebook."""

import contextlib
import sys
import warnings


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
        self.what, self.total, self.unit, self.bar = what, total, unit, None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __call__(self, share: float) -> None:
        """share: of the work that is done, 0 to 1."""
        self.count(int(share * self.total))

    def count(self, done: int) -> None:
        """done: how much of the total. Less than before: other work of this kind has begun."""
        if self.bar is not None and done < self.bar.n:
            self.close()
        if self.bar is None and done < self.total:  # or it was done before anybody could look
            self.bar = make(self.what, self.total, self.unit)
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
        if done >= self.total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


def make(what: str, total: int, unit: str):
    """A bar of tqdm that fits where the output goes."""
    where = {"delay": 1.0} if in_notebook() else {"disable": None, "file": sys.stderr, "ncols": 78}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tqdm: that ipywidgets is not there, so that it shows text
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=what, unit=unit, leave=False, **where)


@contextlib.contextmanager
def notebook_bars(options: dict, total: int):
    """Within, a call of `Engine.generate` has bars in a notebook, unless the caller has his own. What reports to them
    is added to its options. total: tokens that the call may bring."""
    with Bar("prefill", 100, "%") as prefill, Bar("decode", total) as decode:
        if in_notebook() and not options.get("on_prefill") and not options.get("on_decode"):
            options |= {"on_prefill": prefill, "on_decode": decode.count}
        yield
