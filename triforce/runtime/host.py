"""What the program around an engine sets for its own work, and how it multiplies.

An engine is within `own_settings` only while it computes: what the host sets changes no token, and between two pieces
of a stream the host finds what it set.

A forked child has its parent's memory and none of its threads: who waits for one of PyTorch's waits for good. So
engines compute in the process that made the first of them, and in none that was forked from it.
"""

import contextlib
import os
import threading
from functools import partial

import torch

from ..errors import UserError

_home: int | None = None  # the process that made the first engine


def belongs_here() -> None:
    """An engine is made."""
    global _home
    _home = _home or os.getpid()


def is_forked() -> bool:
    """Whether this process was forked from one that had made an engine."""
    return _home is not None and os.getpid() != _home


def check_process() -> None:
    """Raises UserError in a forked process."""
    if is_forked():
        raise UserError(f"process {os.getpid()} was forked from process {_home}, which had loaded an engine, and has "
                        "none of its threads; load engines in processes that are started with the method \"spawn\"")


def _precision(backend) -> tuple:
    return partial(getattr, backend, "fp32_precision"), partial(setattr, backend, "fp32_precision"), "ieee"


class _OfTheProcess:
    """Settings that all threads share. The first thread within changes them, and the last one changes them back."""

    # What reads one, what writes it, and PyTorch's default. Products of float32 may be made of less by two backends.
    SETTINGS = ((torch.get_default_dtype, torch.set_default_dtype, torch.float32),
                (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
                _precision(torch.backends.cuda.matmul), _precision(torch.backends.mkldnn.matmul))

    def __init__(self):
        self._lock, self._within, self._undo = threading.RLock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            for read, write, usual in self.SETTINGS if self._within == 1 else ():
                if (before := read()) not in (usual, "none"):  # what is not set is the default
                    write(usual)
                    self._undo.callback(write, before)

    def __exit__(self, *error) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                self._undo.close()


_of_the_process = _OfTheProcess()


@contextlib.contextmanager
def own_settings():
    """Within, PyTorch's settings are its defaults: dtype, device, autocast, inference mode, deterministic algorithms,
    and products of float32. Those that belong to a thread are this thread's. Also a decorator."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_of_the_process)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield
