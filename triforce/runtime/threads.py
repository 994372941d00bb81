"""How many threads PyTorch works with, on a CPU that other programs use, too.

PyTorch's threads wait for each other by spinning, after each of the hundreds of loops of a step. As long as each has a
core of its own, that is the fastest way. As soon as one shares its core with another program, all of them wait for it.
So there are to be as many threads as the others leave cores: /proc/stat says how much they took lately.

Where it is not there, nothing is changed. In float32 the number of threads changes no bits (tests/test_threads.py), as
long as keys are attended to in multiples of EVEN: of other numbers, products may be split over the threads. In half
precision some CPUs split them, so there the number stays what it is.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
BUSY = (1, 2, 3, 6, 7, 8)  # columns of a core's line: user, nice, system, irq, softirq, and what other machines stole
EVEN = 32  # see the module


class Threads:
    """Chooses the number for what is computed within `working`, by one thread of the program at a time.

    Args:
        device: what computes. Nothing is chosen for a GPU.
        interval: what is attended to together comes in multiples of so many keys.
        dtype: of the model.
        look: returns seconds of work that others got from the cores of this process, up to now. None: by /proc/stat.
        clock: returns seconds.
    """

    PERIOD = 0.25  # seconds between two looks: by /proc/stat, work is counted in hundredths of a second
    STALE = 2.0  # seconds after which what was seen before says nothing any more

    def __init__(self, device: torch.device, look=None, clock=time.monotonic, cores: int | None = None,
                 interval: int = EVEN, dtype: torch.dtype = torch.float32):
        self._look = look or (taken_by_others if STAT.exists() and hasattr(os, "sched_getaffinity") else None)
        is_even = interval % EVEN == 0 and dtype == torch.float32
        self._active = device.type == "cpu" and self._look is not None and is_even
        if self._active:
            self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
            self._clock, self._looked, self._taken, self._free = clock, clock(), self._look(), self._cores
        self._most = 1  # threads; 1: there is nothing to choose
        self._left, self._chosen, self._usual, self._here = None, None, None, threading.local()

    @contextlib.contextmanager
    def working(self):
        """Within it there are as many threads as fit, and at most as many as before."""
        most = torch.get_num_threads()
        if not hasattr(self._here, "been") and most == self._chosen:
            most = self._usual  # a thread that began while there were fewer has inherited their number
        self._here.been = True
        self._most = most if self._active else 1
        if self._active and self._left is not None and self._clock() - self._left > self.STALE:
            self._looked, self._taken, self._free = self._clock(), self._look(), self._cores
        try:
            self.review()
            yield
        finally:
            self._chosen, self._usual = torch.get_num_threads(), most
            if self._active:
                self._left = self._clock()
            if torch.get_num_threads() != most:
                torch.set_num_threads(most)

    def between(self, on_progress=None):
        """A function to be called with the share of a long work that is done, which passes it on."""
        def called(share: float) -> None:
            self.review()
            if on_progress is not None:
                on_progress(share)

        return called

    def review(self) -> None:
        """Looks, if it is time to, what others take."""
        if self._most == 1:
            return
        now = self._clock()
        if now - self._looked >= self.PERIOD:
            taken = self._look()
            self._free = self._cores - (taken - self._taken) / (now - self._looked)
            self._looked, self._taken = now, taken
        count = min(max(round(self._free), 1), self._most)
        if count != torch.get_num_threads():
            torch.set_num_threads(count)


def taken_by_others() -> float:
    """Seconds of work that programs other than this process got so far from the cores that it may use."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
    ticks = sum(int(line[column]) for line in lines if line[0] in mine for column in BUSY)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
