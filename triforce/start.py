"""Entry point of the commands, and what goes with importing PyTorch: it reads the environment, takes seconds, and must
give no traceback on Ctrl-C."""

import contextlib
import os
import signal
import threading

ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # PyTorch reads the first that is set


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    if not any(name in os.environ for name in (*ALLOCATORS, "WORLD_SIZE")):
        # With segments of fixed size an 8B whose plan left 1.4 GiB of a cap of 24 ran out of memory; with these it had
        # its peak at 22.6 (measured on an H200). Ranks are left alone: it has not been measured there.
        os.environ[ALLOCATOR] = GROWING
    with importing():
        from .cli import main as run
    return run(argv)


@contextlib.contextmanager
def importing():
    """Within, a command imports PyTorch, and Ctrl-C ends the process at once: PyTorch would swallow a KeyboardInterrupt
    that meets it where it imports NumPy, and go on with half of that."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler  # not somebody else's, nor ignored, as by nohup
    if ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, before)


def _end(*_) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)
