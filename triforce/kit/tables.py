"""Tables of Markdown that can be read in a terminal, too: columns line up, and no line is wider than 80."""

import re
import textwrap
from collections.abc import Sequence

WIDTH = 80


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is a name, and stands left; the others are figures, and stand right."""
    widths = [max(2, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    room = WIDTH - 3 * len(head) - 1
    if sum(widths) > room:  # the longest column gives way
        longest = max(range(len(head)), key=lambda i: widths[i])
        widths[longest] = max(widths[longest] - (sum(widths) - room), 8)

    def line(cells: Sequence[str]) -> str:
        shown = [_fit(cell, width, "<" if i == 0 else ">")
                 for i, (cell, width) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(shown)} |"

    rule = [("-" * width) if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(head), line(rule), *map(line, rows)])


def _fit(cell: str, width: int, where: str) -> str:
    return f"{cell:{where}{width}}" if len(cell) <= width else cell[: width - 3] + "..."


def paragraph(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def items(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                                   break_on_hyphens=False) for line in lines)


def broken(command: str) -> str:
    """A command as code, over several lines where it is long; a flag and its value stay together."""
    lines = [""]
    for words in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(words) > WIDTH - 11:
            lines.append("    ")
        lines[-1] += words if not lines[-1].strip() else f" {words}"
    return "\n".join(f"    {line}{' ' + chr(92) if i < len(lines) - 1 else ''}" for i, line in enumerate(lines))


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f}"
