"""Which level proposed each token of a text, and the text cut where that changes. Host work on lists alone.

    "draft"      the draft model proposed the token, and the levels above kept it
    "ngram"      the same of n-grams, and "custom" of a user's own drafter
    "retrieval"  the target proposed it over the view, and the full cache kept it
    "target"     no proposal was kept here: the full level drew the token itself, recovered or bonus
"""

from .plan import Plan
from .speculator import RowRound
from .tape import ACCEPTED, LEAF

LEVELS = ("draft", "ngram", "custom", "retrieval", "target")  # from the cheapest to the dearest


def levels_of(plan: Plan, row: RowRound) -> list[str]:
    """The level that proposed each of the tokens that a round emitted for a row."""
    source = "draft" if plan.source == "model" else plan.source
    levels = []
    for i in range(len(row.tokens)):
        if i >= row.num_accepted + row.beside:
            levels.append("target")
        elif plan.retrieval and (i >= row.num_accepted or row.origins[i] not in (ACCEPTED, LEAF)):
            levels.append("retrieval")
        else:
            levels.append(source)
    return levels


class Spans:
    """Cuts a growing text at the borders between levels.

    Args:
        pieces: of each token, its part of the text. levels: of each token. Both lists may grow.
    """

    def __init__(self, pieces: list[str], levels: list[str]):
        self.pieces, self.levels = pieces, levels
        self._token = self._offset = 0  # where the next character is

    def take(self, count: int) -> list[tuple[str, str]]:
        """The next `count` characters, as (text, level) pairs; neighbours differ in their level."""
        spans: list[tuple[str, str]] = []
        while count > 0 and self._token < len(self.pieces):
            piece, level = self.pieces[self._token], self.levels[self._token]
            part = piece[self._offset : self._offset + count]
            if part:
                before = spans.pop()[0] if spans and spans[-1][1] == level else ""
                spans.append((before + part, level))
            count -= len(part)
            self._offset += len(part)
            if self._offset >= len(piece):
                self._token, self._offset = self._token + 1, 0
        return spans
