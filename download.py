"""`python download.py --repo-id owner/name` fetches a checkpoint from the hub: see `triforce/hf/download.py`."""

import sys

from triforce.cli import main

if __name__ == "__main__":
    sys.exit(main(["download", *sys.argv[1:]]))
