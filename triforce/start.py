"""Where the commands begin: PyTorch takes seconds to import, and who interrupts that wants no traceback."""

import os
import sys

# Turns of a waiting loop, after which a thread of OpenMP sleeps. By default it spins for so long that another busy
# process on a small machine slows every step down several times; without any spinning an idle machine is slower.
SPIN = 3000


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    bound_spinning(os.environ)
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)


def bound_spinning(environment) -> None:
    """For libgomp, which PyTorch brings: it reads its settings as PyTorch is imported. The user's own stand."""
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"}:
        environment["GOMP_SPINCOUNT"] = str(SPIN)
