"""`python generate.py`: the command line of the library, see `triforce/cli/`."""

import sys

from triforce.cli import main

if __name__ == "__main__":
    sys.exit(main())
