"""`python generate.py`: the command line of the library, see `triforce/cli/main.py`."""

import sys

from triforce.start import main

if __name__ == "__main__":
    sys.exit(main())
