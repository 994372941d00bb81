"""How many threads PyTorch works with, on a CPU that other programs use, too.

PyTorch's threads wait for each other by spinning, after each of the hundreds of loops of a step. As soon as one shares
its core with another program, all of them wait for it. So there are to be as many threads as the others leave cores:
/proc/stat says how much they took lately. Where it is not there, nothing is changed.

In float32 the number of threads changes no bits (tests/test_threads.py), as long as keys are attended to in multiples
of EVEN: of other numbers, as in half precision on some CPUs, products may be split over the threads.
"""

import contextlib
import os
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
BUSY = (1, 2, 3, 6, 7, 8)  # columns of a core's line: user, nice, system, irq, softirq, and what other machines stole
EVEN = 32  # see the module
PERIOD = 0.25  # seconds between two looks: by /proc/stat, work is counted in hundredths of a second


class Threads:
    """Chooses the number for what is computed within `working`, by one thread of the program at a time: at most as many
    as there are when this is made.

    Args:
        device, dtype: of the model. Nothing is chosen for a GPU.
        interval: an attention takes keys in multiples of this number.
    """

    def __init__(self, device: torch.device, interval: int = EVEN, dtype: torch.dtype = torch.float32):
        chooses = device.type == "cpu" and interval % EVEN == 0 and dtype == torch.float32 and STAT.exists()
        self._most = torch.get_num_threads() if chooses else 1  # 1: there is nothing to choose
        self._looked, self._taken, self._free = time.monotonic(), taken_by_others() if chooses else 0.0, self._most

    @contextlib.contextmanager
    def working(self):
        """Within it there are as many threads as fit; then, as many as before."""
        before = torch.get_num_threads()
        try:
            self.review()
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

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
        now = time.monotonic()
        if now - self._looked >= PERIOD:
            taken = taken_by_others()
            self._free = len(os.sched_getaffinity(0)) - (taken - self._taken) / (now - self._looked)
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
