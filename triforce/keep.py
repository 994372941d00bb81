"""Which part of a prompt is kept where not all of it fits the model. Works on lists of ids alone."""

from collections.abc import Callable

from .errors import UserError

WAYS = ("start", "end", "both")


def check_keep(keep) -> None:
    """Raises UserError if it is neither None nor one of the ways."""
    if keep is not None and keep not in WAYS:
        raise UserError(f"keep ({keep!r}) must be one of {', '.join(WAYS)}, or left out: then a prompt that is too "
                        "long is an error")


def cut(ids: list[int], room: int, keep: str, bos_id: int | None = None) -> list[int]:
    """At most `room` of the ids, at least 1 of which fits.

    Args:
        keep: the "start", the "end", or "both": half from the start and half from the end.
        bos_id: where the ids begin with it, it is kept in any case: models expect it.
    """
    if len(ids) <= room:
        return ids
    if keep == "start":
        return ids[:room]
    first = room - room // 2 if keep == "both" else int(ids[0] == bos_id and room > 1)
    return ids[:first] + ids[len(ids) - (room - first) :]


def fit(document: list[int], finish: Callable[[list[int]], list[int]], room: int, keep: str,
        bos_id: int | None = None) -> tuple[list[int], int]:
    """A prompt of at most `room` ids, and how many of the document's were dropped: only the document is cut.

    Args:
        finish: makes the prompt's ids of the document's: adds a question, puts it into a chat template. What it adds
            may vary with the document. If it takes all the room by itself, the prompt is given whole.
    """
    whole, kept = finish(document), document
    made = whole
    while len(made) > room:
        left = len(kept) - (len(made) - room)
        if left < 1:
            return whole, 0
        kept = cut(document, left, keep, bos_id)
        made = finish(kept)
    return made, len(document) - len(kept)
