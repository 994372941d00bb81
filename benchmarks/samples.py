"""One task's one prompt, and how it is made to have just as many tokens as it may."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scores import SCORES

from triforce.errors import UserError
from triforce.keep import fit


@dataclass(frozen=True)
class Sample:
    """What is asked, and how the answer is scored."""

    task: str  # "niah_single_1"
    number: int  # of this sample among those of its task, or the line of its file
    prompt: list[int]  # ids
    new_tokens: int  # at most so many of an answer
    answers: Sequence = ()  # what should be said; see `scores`
    score: str | None = None  # a name of `scores.SCORES`; None: nothing is scored, as with a book to go on with
    dropped: int = 0  # tokens of the document that did not fit

    def scored(self, said: str) -> float | None:
        """0 to 1."""
        return None if self.score is None else SCORES[self.score](said, self.answers)


def fill(write: Callable[[int], str], encode: Callable[[str], list[int]], room: int, what: str) -> list[int]:
    """The longest prompt of at most `room` tokens.

    Args:
        write: the prompt with so many units of filling (sentences, words, documents); more units, more tokens.
        what: is filled, for the message.

    Raises:
        UserError: not even one unit fits.
    """
    best = encode(write(1))
    if len(best) > room:
        raise UserError(f"{what} has {len(best):,} tokens with the least that it can hold, and there is room for "
                        f"{room:,}; give a larger --length")
    low, high, step = 1, None, max(room // 64, 1)  # `low` units fit, `high` do not
    while high is None or high - low > 1:
        count = low + step if high is None else (low + high) // 2
        ids = encode(write(count))
        if len(ids) <= room:
            low, best = count, ids
            step *= 2
        else:
            high = count
    return best


def cut_to_fit(before: str, document: str, after: str, tokenizer, room: int, keep: str = "both"
               ) -> tuple[list[int], int]:
    """Ids of before + document + after, at most `room`, and how many of the document's tokens were dropped.

    Only the document is cut. keep: what is left of it, see triforce/keep.py; "both" cuts it in the middle.

    Raises:
        UserError: the rest alone does not fit.
    """
    whole = tokenizer.encode(before + document + after)
    if len(whole) <= room:
        return whole, 0
    least = len(tokenizer.encode(before + after))
    if least >= room:
        raise UserError(f"the prompt without its document has {least:,} tokens, and there is room for {room:,}; give a "
                        "larger --length")
    kept, ids = fit(document, lambda part: tokenizer.encode(before + part + after), room, keep)
    return ids, len(tokenizer.encode(document)) - len(tokenizer.encode(kept))
