"""Which level proposed each token of a text, and the text cut where that changes. Host work on lists alone.

    "draft"      the draft model proposed the token, and the levels above kept it
    "ngram"      the same of n-grams, and "custom" of a user's own drafter
    "retrieval"  the target proposed it over the view, and the full cache kept it
    "target"     no proposal was kept here: the full level drew the token itself, recovered or bonus
"""

from collections.abc import Iterator

from .plan import Plan
from .speculator import RowRound
from .tape import ACCEPTED, LEAF

TARGET, RETRIEVAL = "target", "retrieval"
NAMES = {"model": "draft"}  # of sources in a plan, where a level has another name
LEVELS = ("draft", "ngram", "custom", RETRIEVAL, TARGET)  # from the cheapest to the dearest


def levels_of(plan: Plan, row: RowRound) -> list[str]:
    """The level that proposed each of the tokens that a round emitted for a row."""
    source = NAMES.get(plan.source, plan.source)
    levels = []
    for i in range(len(row.tokens)):
        if i >= row.num_accepted + row.beside:
            levels.append(TARGET)
        elif plan.retrieval and (i >= row.num_accepted or row.origins[i] not in (ACCEPTED, LEAF)):
            levels.append(RETRIEVAL)
        else:
            levels.append(source)
    return levels


class Spans:
    """Cuts a growing text at the borders between levels.

    Args:
        pieces: of each token, its part of the text; the list may grow.
        levels: of each token; the list may grow.
    """

    def __init__(self, pieces: list[str], levels: list[str]):
        self.pieces, self.levels = pieces, levels
        self._token = self._offset = 0  # where the next character is

    def take(self, count: int) -> list[tuple[str, str]]:
        """The next `count` characters, as (text, level) pairs; neighbours differ in their level."""
        spans: list[tuple[str, str]] = []
        for text, level in self._parts(count):
            if spans and spans[-1][1] == level:
                text = spans.pop()[0] + text
            spans.append((text, level))
        return spans

    def _parts(self, count: int) -> Iterator[tuple[str, str]]:
        while count > 0 and self._token < len(self.pieces):
            part = self.pieces[self._token][self._offset : self._offset + count]
            if part:
                yield part, self.levels[self._token]
            count -= len(part)
            self._offset += len(part)
            if self._offset >= len(self.pieces[self._token]):
                self._token, self._offset = self._token + 1, 0
