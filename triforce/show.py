"""A text with its tokens coloured by the level that proposed them: as HTML, and for a terminal.

Both leave the colour of the background, and in HTML that of the letters, to the reader's theme.
"""

import html
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .levels import LEVELS, Spans
from .terminal import visible

if TYPE_CHECKING:
    from .generation import Generation

MEANING = {"draft": "proposed by the draft model", "ngram": "proposed by n-grams", "custom": "proposed by the drafter",
           "retrieval": "proposed over the view", "target": "drawn by the full level"}
# Of the palette of Okabe and Ito, which readers who confuse red and green can tell apart. Behind the letters they are
# thin enough for letters of either theme.
RGB = {"draft": "0,114,178", "ngram": "204,121,167", "custom": "240,228,66", "retrieval": "0,158,115",
       "target": "213,94,0"}
ANSI = {"draft": 36, "ngram": 35, "custom": 33, "retrieval": 32, "target": 31}  # a terminal's theme says which shades
MOST_SPANS = 5000  # tokens that get a tooltip of their own


def as_html(generation: "Generation") -> str:
    """A legend, the text and the statistics. Whatever a model says is escaped."""
    out, counts = generation, Counter(generation.levels)
    legend = " ".join(_span(f" {level} ", level, f"{MEANING[level]}: {counts[level]:,} tokens") + f" {counts[level]:,}"
                      for level in LEVELS if counts[level])
    if not len(out.tokens) == len(out.pieces) == len(out.levels):  # made by hand
        parts = [_escape(out.text)]
    elif len(out.tokens) > MOST_SPANS:
        parts = [_span(text, level, level) for text, level in Spans(out.pieces, out.levels).take(len(out.text))]
    else:
        parts = [_span(*part) for part in _tokens(out)]
    rows = "".join(f"<tr><td style=\"text-align:left\">{_escape(name)}</td>"
                   f"<td style=\"text-align:right\">{_escape(value)}</td></tr>" for name, value in out.stats.rows())
    return (f"<div><div style=\"margin-bottom:0.5em\">{legend}</div>"
            f"<div style=\"white-space:pre-wrap;overflow-wrap:anywhere\">{''.join(parts)}</div>"
            f"<div style=\"margin-top:0.5em\">finish_reason: {_escape(out.finish_reason)}</div>"
            f"<details open><summary>statistics</summary><table>{rows}</table></details></div>")


def _tokens(out: "Generation") -> Iterator[tuple[str, str, str]]:
    """(text, level, tooltip) of each token. Tokens that are parts of a character are told with the one that completes
    it; what is no text at all, as an end-of-text token, stands as its id."""
    has_text, parts = bool(out.text), []
    for i, (token, piece, level) in enumerate(zip(out.tokens, out.pieces, out.levels, strict=True)):
        parts.append(f"id {token}, {level}")
        if out.logprobs is not None and i < len(out.logprobs):
            parts[-1] += f", log-probability {out.logprobs[i].logprob:.3f}"
        last = i + 1 == len(out.tokens)
        if piece or last or not has_text:
            yield piece or f"\N{MATHEMATICAL LEFT ANGLE BRACKET}{token}\N{MATHEMATICAL RIGHT ANGLE BRACKET}", level, \
                "\n".join(parts)
            parts = []


def _span(text: str, level: str, tooltip: str) -> str:
    return (f"<span style=\"background:rgba({RGB[level]},0.28);border-radius:2px\" title=\"{_escape(tooltip)}\">"
            f"{_escape(text)}</span>")


def _escape(text: str) -> str:
    return html.escape(visible(text), quote=True)


def as_ansi(spans: list[tuple[str, str]]) -> str:
    """(text, level) pairs in colours of a terminal. Each ends with the usual colour, so that whatever breaks off leaves
    none behind."""
    return "".join(f"\033[{ANSI[level]}m{visible(text)}\033[0m" for text, level in spans)


def legend(coloured: bool, levels: list[str] | None = None) -> str:
    """One line that names the levels: all, or those of the tokens of a text with their shares.

    Args:
        levels: of each token.
    """
    counts = Counter(levels or [])
    names = [level for level in LEVELS if levels is None or counts[level]]
    texts = {level: level + (f" {counts[level] / len(levels):.0%}" if levels else "") for level in names}
    return "levels: " + "  ".join(as_ansi([(texts[level], level)]) if coloured else texts[level] for level in names)
