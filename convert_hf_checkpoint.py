"""`python convert_hf_checkpoint.py --checkpoint-dir DIR` rewrites .bin as safetensors: see `triforce/hf/convert.py`."""

import sys

from triforce.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
