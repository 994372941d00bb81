"""The commands: `python generate.py`, `python -m triforce`, `triforce`. Nothing here imports PyTorch at once."""

from .main import Paragraphs, Parser, main, parse

__all__ = ["Paragraphs", "Parser", "main", "parse"]
