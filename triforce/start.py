"""Where the commands begin: PyTorch takes seconds to import, and who interrupts that wants no traceback."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `cli.main`."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return run(argv)
