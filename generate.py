"""`python generate.py`: the command line of the library, see `triforce/cli.py`."""

import sys

if __name__ == "__main__":
    try:
        from triforce.cli import main
    except KeyboardInterrupt:  # PyTorch takes seconds to load
        sys.exit(130)
    sys.exit(main())
