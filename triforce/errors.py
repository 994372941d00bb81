"""Mistakes that a user can mend: a command prints a `UserError`, and no traceback. And a parser of flags."""

import argparse
import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something in a call, a file or a machine that the caller can change. The text names the remedy."""


class TooLong(UserError):
    """A prompt and its new tokens, beside what the model or the settings allow."""


class NotFinite(UserError):
    """Logits are no finite numbers, after so many tokens."""

    def __init__(self, count: int):
        super().__init__(f"the target's logits after {count:,} tokens are not finite; try another --dtype")
        self.count = count


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of all flags."""

    def error(self, message: str):
        raise UserError(f"{message}; see {self.prog} --help")


def not_known(name: str, what: str, known: Iterable[str], otherwise: str = "") -> str:
    """One line for a name that is none of the known ones, with the one that was probably meant.

    Args:
        otherwise: where none comes near, instead of the list of all.
    """
    known = sorted(known)
    meant = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {meant[0]}?" if meant else otherwise or f"known are {', '.join(known)}"
    return f"{name} is not a known {what}; {hint}"
