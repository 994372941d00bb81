"""On which stream of a GPU a thread works. On a CPU nothing here does anything.

An engine computes on one stream of its own, reads weights on it, and records its steps on it. Where a process has used
this one stream alone, some 0.1 us pass between two kernels of a recorded step, and 0.5 us once it has used another, of
hundreds of kernels (one H200, `benchmarks/results/streams_h200.jsonl`).
"""

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

_unused: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)  # streams whose owners are gone
_locks: dict[torch.cuda.Stream, threading.RLock] = {}  # by the streams of `use_one_stream`


class ComputeStream:
    """A stream of a GPU, its owner's alone until Python has collected the owner. Then another owner gets it: cuBLAS
    takes 32 MiB for each stream, for good. Owners that a thread makes after `use_one_stream` have its stream.

    Attributes:
        cuda: the stream; None on a CPU.
        lock: of the thread that computes: who records a step would record another thread's work with it.
    """

    def __init__(self, device: torch.device):
        self.device, self.cuda, self.lock = device, None, threading.RLock()
        if device.type != "cuda":
            return
        if device.index is None:  # whichever GPU a thread uses later
            self.device = device = torch.device("cuda", torch.cuda.current_device())
        here, unused = torch.cuda.current_stream(device), _unused[device]
        if here in _locks:
            self.cuda, self.lock = here, _locks[here]
            return
        self.cuda = unused.pop() if unused else torch.cuda.Stream(device)
        weakref.finalize(self, unused.append, self.cuda)
        self.cuda.wait_stream(here)  # where weights may still be made

    @contextlib.contextmanager
    def used(self):
        """Within, this thread works on the stream; for the one that it worked on before, all that happens here."""
        if self.cuda is None or (before := torch.cuda.current_stream(self.device)) == self.cuda:
            yield
            return
        self.cuda.wait_stream(before)
        try:
            with torch.cuda.stream(self.cuda):
                yield
        finally:
            before.wait_stream(self.cuda)


def use_one_stream(device: torch.device) -> None:
    """For a program that does nothing else on a GPU: this thread, and the engines that it makes from now on, work on
    one stream. Not where the thread has chosen one already."""
    if device.type != "cuda" or torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    _locks[stream] = threading.RLock()
    torch.cuda.set_stream(stream)


def like_this_thread(device: torch.device | str | None) -> Callable[[], None]:
    """What a new thread calls first, to use this thread's GPU, and its stream. It begins with the first GPU, whichever
    its process uses, and with the default stream."""
    device = torch.device(device or "cpu")
    if device.type != "cuda":
        return lambda: None
    return partial(torch.cuda.set_stream, torch.cuda.current_stream(device))
