"""What the program around an engine sets for its own work, and how it multiplies.

Settings of PyTorch: within `own_settings` they are PyTorch's defaults, so that what the host sets changes no token. An
engine is within it only while it computes: between two pieces of a stream, the host finds what it set.

A forked child has its parent's memory and none of its threads: who waits for one of PyTorch's waits for good. So
engines compute in the process that made the first of them, and in none that was forked from it.
"""

import contextlib
import os
import threading
from collections.abc import Callable

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


class ProcessLock:
    """A lock that one thread may take several times. In a forked child it is a new one: who held it is not there."""

    def __init__(self):
        self._lock, self._process = threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._lock, self._process = threading.RLock(), os.getpid()
        self._lock.acquire()

    def __exit__(self, *error) -> None:
        self._lock.release()


class _OfTheProcess:
    """Settings that all threads share. The first thread within changes them, and the last one changes them back."""

    USUAL = torch.float32, 0, "ieee", "ieee"  # see `_set`

    def __init__(self):
        self._lock, self._within, self._before = ProcessLock(), 0, self.USUAL

    def __enter__(self) -> None:
        with self._lock:
            if self._within == 0:
                self._before = _set(self.USUAL)
            self._within += 1

    def __exit__(self, *error) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                _set(self._before)


def _set(settings: tuple) -> tuple:
    """Returns what was set before. Touches nothing that stays the same."""
    dtype, deterministic, *precisions = settings
    before = [torch.get_default_dtype(), torch.get_deterministic_debug_mode()]
    if before[0] != dtype:
        torch.set_default_dtype(dtype)
    if before[1] != deterministic:
        torch.set_deterministic_debug_mode(deterministic)
    for backend, precision in zip((torch.backends.cuda.matmul, torch.backends.mkldnn.matmul), precisions, strict=True):
        before.append(backend.fp32_precision.replace("none", "ieee"))
        if before[-1] != precision:
            backend.fp32_precision = precision
    return tuple(before)


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


def not_pickled(what: str, instead: str) -> Callable:
    """A `__reduce__` for what holds memory of a device, locks and threads."""
    def __reduce__(self):  # noqa: N807
        raise UserError(f"{what} cannot be pickled or copied; {instead}")

    return __reduce__
