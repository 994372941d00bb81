"""The commands: `python generate.py`, `python -m triforce`, `triforce`. Nothing here imports PyTorch at once."""

from .main import main, parse

__all__ = ["main", "parse"]
