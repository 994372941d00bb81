"""`python download.py --repo-id owner/name` fetches a checkpoint from the hub: see `triforce/hf/download.py`."""

import sys

from triforce.hf.download import main

if __name__ == "__main__":
    sys.exit(main())
