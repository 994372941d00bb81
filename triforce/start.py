"""Entry point of the commands, and what goes with importing PyTorch: it reads the environment, takes seconds, and must
give no traceback on Ctrl-C. What needs no PyTorch is done beside it."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # PyTorch reads the first that is set


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    if not any(name in os.environ for name in (*ALLOCATORS, "WORLD_SIZE")):
        # With segments of fixed size an 8B whose plan left 1.4 GiB of a cap of 24 ran out of memory; with these it had
        # its peak at 22.6 (measured on an H200). Ranks are left alone: it has not been measured there.
        os.environ[ALLOCATOR] = GROWING
    with importing(owns_process=True):
        from .cli import main as run
        from .request import ENCODER
    status = run(argv, owns_process=True)
    if any(thread.name == ENCODER for thread in threading.enumerate()):
        # Nobody waits for it any more. It cannot be stopped, and where it meets the end of the interpreter, tokenizers
        # before 0.23 abort the process.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    return status


@contextlib.contextmanager
def importing(owns_process: bool = False):
    """Within, a command imports PyTorch, and Ctrl-C ends the process at once.

    Args:
        owns_process: all that is there by then is the command's. Garbage is not searched for meanwhile, and later
            searches, which would take 0.1 s each, skip what was imported.
    """
    searches = owns_process and gc.isenabled() and "torch" not in sys.modules
    if searches:
        gc.disable()
    try:
        with _interruptible():
            yield
    finally:
        if searches:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def _interruptible():
    """PyTorch would swallow a KeyboardInterrupt that meets it where it imports NumPy, and go on with half of that."""
    before = signal.getsignal(signal.SIGINT)
    theirs = before is not signal.default_int_handler  # somebody else's, or ignored, as by nohup
    if theirs or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def begin_gpu(device: str | None) -> threading.Thread | None:
    """Has the driver set up a GPU in a thread: 0.4 s on an H100, of which PyTorch, once it is imported, finds all done.

    Args:
        device: as in `Placement`; None: this rank's GPU, or the first.
    """
    kind, _, number = (device or "cuda").partition(":")
    if not number:
        number = os.environ.get("LOCAL_RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if kind != "cuda" or not number.isdecimal() or not _uses_cuda():
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before it first calls the driver
    thread = threading.Thread(target=_open_context, args=(int(number),), name="gpu", daemon=True)
    thread.start()
    return thread


def _uses_cuda() -> bool:
    """Whether PyTorch, which is not imported yet, is a build for NVIDIA's GPUs."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and any(Path(folder, "lib", "libtorch_cuda.so").exists()
                                    for folder in spec.submodule_search_locations or ())


def _open_context(number: int) -> None:
    """What goes wrong here, PyTorch will say."""
    with contextlib.suppress(Exception):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), number) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
