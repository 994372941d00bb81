"""Where the commands begin: what must be settled before PyTorch is imported, which takes seconds."""

import os
import sys

# Threads of a CPU's loop wait for each other. By default they spin for milliseconds, which costs far more than it saves
# as soon as another program wants one of the cores. After so many turns they sleep.
SPINS = "20000"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)
