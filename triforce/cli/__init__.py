"""The commands: `python generate.py`, `python -m triforce`, `triforce`. Nothing here imports PyTorch at once."""

from .main import COMMANDS, COMMON, Paragraphs, Parser, main, parse, parser

__all__ = ["COMMANDS", "COMMON", "Paragraphs", "Parser", "main", "parse", "parser"]
