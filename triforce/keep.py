"""Which part of a prompt is kept where not all of it fits the model."""

import copy
from collections.abc import Callable

from .errors import UserError

WAYS = ("start", "end", "both")


def check_keep(keep) -> None:
    """Raises UserError if it is neither None nor one of the ways."""
    if keep is not None and keep not in WAYS:
        raise UserError(f"keep ({keep!r}) must be one of {', '.join(WAYS)}, or left out: then a prompt that is too "
                        "long is an error")


def ways_to_fit(prompt_len: int, max_new_tokens: int, limit: int, document: int = 0, text: int | None = None,
                can_keep: bool = False) -> str:
    """What a user can do where a prompt and its new tokens exceed a limit.

    Args:
        document, text, can_keep: see `Engine.check_len`.
    """
    excess, ways, fewer = prompt_len + max_new_tokens - limit, [], " and ask for fewer new ones"
    left = (prompt_len - document if text is None else text) - excess
    if left > 0 and text is not None:
        ways.append(f"cut the text by {excess} tokens, with --prompt-len {left}"
                    + ", or with --keep start, end or both" * can_keep)
    elif left > 0:
        ways.append(f"cut the {'question' if document else 'prompt'} by {excess} tokens to {left}")
    if limit > prompt_len:
        ways.append(f"ask for at most {limit - prompt_len} new ones")
    if ways:
        return " or ".join(ways)
    if text is not None and prompt_len > text:
        shorter = f"shorten what is asked, which takes {prompt_len - text} tokens beside the text"
        return shorter + (fewer if max_new_tokens >= limit else "")
    shorter = "take a document of fewer than" if document else f"cut the {'prompt' if text is None else 'text'} below"
    return f"{shorter} {limit} tokens{fewer}"


def cut(ids: list[int], room: int, keep: str, bos_id: int | None = None) -> list[int]:
    """At most `room` of the ids, at least 1 of which fits.

    Args:
        keep: the "start", the "end", or "both": half from the start and half from the end.
        bos_id: where the ids begin with it, it is kept in any case: models expect it.
    """
    return [token for start, stop in _places(ids, room, keep, bos_id) for token in ids[start:stop]]


def _places(ids: list[int], room: int, keep: str, bos_id: int | None) -> list[tuple[int, int]]:
    """Where what `cut` gives lies: one or two pairs (start, stop)."""
    if len(ids) <= room or keep == "start":
        return [(0, min(room, len(ids)))]
    first = room - room // 2 if keep == "both" else int(ids[0] == bos_id and room > 1)
    return [(0, first), (len(ids) - (room - first), len(ids))]


class Document:
    """A text and its ids. Cut, it is the rest of both: ids say where the text is cut, and are not turned into text
    again, which would be another one (of spaces, of special tokens that are spelled in it, of a character's halves).

    Args:
        offsets: gives (start, end) in a text for each of its ids; asked for once a text that was cut is wanted.
    """

    def __init__(self, text: str, ids: list[int], offsets: Callable[[str], list[tuple[int, int]]]):
        self.ids, self._whole, self._offsets, self._found = ids, text, offsets, []
        self._places: list[tuple[int, int]] | None = None  # of what is left

    def cut(self, room: int, keep: str, bos_id: int | None = None) -> "Document":
        """See the function. What was cut already has to be a start."""
        if len(self.ids) <= room:
            return self
        part = copy.copy(self)
        part.ids, part._places = cut(self.ids, room, keep, bos_id), _places(self.ids, room, keep, bos_id)
        return part

    @property
    def text(self) -> str:
        if self._places is None:
            return self._whole
        if not self._found:
            self._found += self._offsets(self._whole)
        return "".join(self._whole[self._end(start) : self._end(stop)] for start, stop in self._places)

    def _end(self, count: int) -> int:
        """Where in the text so many tokens end; before a character that belongs to the next one, too."""
        if count == len(self._found):
            return len(self._whole)
        end = max((end for _, end in self._found[max(count - 4, 0) : count]), default=0)  # those of no text end at 0
        start, stop = self._found[count]
        return min(start, end) if start < stop else end


def fit(document: Document, finish: Callable[[Document], list[int]], room: int, keep: str,
        bos_id: int | None = None) -> tuple[list[int], int]:
    """A prompt of at most `room` ids, and how many of the document's were dropped: only the document is cut.

    Args:
        finish: makes the prompt's ids of the document: adds a question, puts it into a chat template. What it adds
            may vary with the document. If it takes all the room by itself, the prompt is given whole.
    """
    whole, kept = finish(document), document
    made = whole
    while len(made) > room:
        left = len(kept.ids) - (len(made) - room)
        if left < 1:
            return whole, 0
        kept = document.cut(left, keep, bos_id)
        made = finish(kept)
    return made, len(document.ids) - len(kept.ids)
