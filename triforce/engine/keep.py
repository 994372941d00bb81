"""Which part of a prompt is kept where not all of it fits the model."""

import bisect
from collections.abc import Callable

WAYS = ("start", "end", "both")


def cut(ids: list[int] | str, room: int, keep: str | None, bos_id: int | None = None) -> list[int] | str:
    """At most `room` of the ids (or characters), at least 1: the "start", the "end", or half from "both". None: all
    stay. bos_id: where the ids begin with it, it is kept in any case: models expect it."""
    if keep is None or len(ids) <= room:
        return ids
    first = {"start": room, "end": int(ids[0] == bos_id and room > 1), "both": room - room // 2}[keep]
    return ids[:first] + ids[len(ids) - (room - first) :]


def fit(text: str, finish: Callable[[str], list[int]], room: int, keep: str | None) -> tuple[str, list[int]]:
    """The longest part of a text whose prompt has at most `room` ids, and these ids. Trials cut it between characters:
    ids that are decoded may give another text (other spaces, special tokens that the text spells). finish: makes the
    prompt's ids of a text, by a chat template. If that takes all the room, the text is given whole.
    """
    if keep is None or len(finish(text)) <= room:
        return text, finish(text)
    count = bisect.bisect_right(range(1, len(text)), room, key=lambda count: len(finish(cut(text, count, keep))))
    kept = cut(text, count, keep) if count > 0 else text
    return kept, finish(kept)
