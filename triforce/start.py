"""Where the commands begin: PyTorch takes seconds to import, who interrupts that wants no traceback, and what it reads
from the environment it reads then."""

import os
import sys

ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    if "WORLD_SIZE" not in os.environ:
        # With segments of fixed size an 8B whose plan left 1.4 GiB of a cap of 24 ran out of memory; with these it had
        # its peak at 22.6 (measured on an H200). Ranks are left alone: it has not been measured there.
        os.environ.setdefault(ALLOCATOR, GROWING)
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)
