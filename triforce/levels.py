"""Which level proposed each token of a text, and the text cut and coloured by that: as HTML, and for a terminal. Both
leave the colour of the background, and in HTML that of the letters, to the reader's theme.

    "draft"      the draft model proposed the token, and the levels above kept it
    "ngram"      the same of n-grams, and "custom" of a user's own drafter
    "retrieval"  the target proposed it over the view, and the full cache kept it
    "target"     no proposal was kept here: the full level drew the token itself, recovered or bonus
"""

import html
from collections import Counter
from typing import TYPE_CHECKING

from .plan import Plan
from .speculator import RowRound
from .tape import ACCEPTED, LEAF
from .terminal import visible

if TYPE_CHECKING:
    from .generation import Generation

LEVELS = ("draft", "ngram", "custom", "retrieval", "target")  # from the cheapest to the dearest

# Of the palette of Okabe and Ito, which readers who confuse red and green can tell apart. Behind the letters they are
# thin enough for letters of either theme.
RGB = {"draft": "0,114,178", "ngram": "204,121,167", "custom": "240,228,66", "retrieval": "0,158,115",
       "target": "213,94,0"}
ANSI = {"draft": 36, "ngram": 35, "custom": 33, "retrieval": 32, "target": 31}  # a terminal's theme says which shades


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


def as_html(out: "Generation") -> str:
    """A legend, the text and the statistics. Whatever a model says is escaped."""
    counts = Counter(out.levels)
    parts = "".join(_span(*part) for part in Spans(out.pieces, out.levels).take(len(out.text))) or _escape(out.text)
    names = " ".join(f"{_span(level, level)} {counts[level]:,}" for level in LEVELS if counts[level])
    rows = "".join(f"<tr><td>{_escape(name)}</td><td>{_escape(value)}</td></tr>" for name, value in out.stats.rows())
    return (f"<div><p>{names}</p><div style=\"white-space:pre-wrap;overflow-wrap:anywhere\">{parts}</div>"
            f"<p>finish_reason: {_escape(out.finish_reason)}</p>"
            f"<details open><summary>statistics</summary><table>{rows}</table></details></div>")


def _span(text: str, level: str) -> str:
    return f"<span style=\"background:rgba({RGB[level]},0.28)\" title=\"{level}\">{_escape(text)}</span>"


def _escape(text: str) -> str:
    return html.escape(visible(text))


def as_ansi(spans: list[tuple[str, str]]) -> str:
    """(text, level) pairs in colours of a terminal. Each ends with the usual colour, so that whatever breaks off leaves
    none behind."""
    return "".join(f"\033[{ANSI[level]}m{visible(text)}\033[0m" for text, level in spans)


def legend(levels: list[str], coloured: bool) -> str:
    """One line that names the levels of a text's tokens, with their shares."""
    counts = Counter(levels)
    texts = [(f"{level} {counts[level] / len(levels):.0%}", level) for level in LEVELS if counts[level]]
    return "levels: " + "  ".join(as_ansi([part]) if coloured else part[0] for part in texts)
