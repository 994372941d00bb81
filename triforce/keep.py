"""Which part of a prompt is kept where not all of it fits the model."""

import bisect
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
    excess, ways = prompt_len + max_new_tokens - limit, []
    left = (prompt_len - document if text is None else text) - excess
    if left > 0 and text is not None:
        ways.append(f"cut the text by {excess} tokens, with --prompt-len {left}"
                    + ", or with --keep start, end or both" * can_keep)
    elif left > 0:
        ways.append(f"cut the {'question' if document else 'prompt'} by {excess} tokens to {left}")
    if limit > prompt_len:
        ways.append(f"ask for at most {limit - prompt_len} new ones")
    beside = prompt_len - (text or document)
    return " or ".join(ways) or (f"shorten the text, or what stands beside it ({beside} tokens), and ask for fewer new "
                                 "ones")


def cut(ids: list[int], room: int, keep: str, bos_id: int | None = None) -> list[int]:
    """At most `room` of the ids, at least 1 of which fits.

    Args:
        keep: the "start", the "end", or "both": half from the start and half from the end.
        bos_id: where the ids begin with it, it is kept in any case: models expect it.
    """
    if len(ids) <= room or keep == "start":
        return ids[:room]
    first = room - room // 2 if keep == "both" else int(ids[0] == bos_id and room > 1)
    return ids[:first] + ids[len(ids) - (room - first) :]


def fit(text: str, finish: Callable[[str], list[int]], room: int, keep: str) -> tuple[str, list[int]]:
    """As much of a text as leaves its prompt at most `room` ids, and these. It is cut between characters, by trying:
    ids that are turned into text again would be another one (of spaces, of special tokens that are spelled in it).

    Args:
        finish: makes the prompt's ids of a text: puts it into a chat template. If what it adds takes all the room by
            itself, the prompt is given whole.
    """
    def part(count: int) -> str:
        first = {"start": count, "end": 0, "both": count - count // 2}[keep]
        return text[:first] + text[len(text) - (count - first) :]

    ids = finish(text)
    if len(ids) > room:
        count = bisect.bisect_right(range(1, len(text)), room, key=lambda count: len(finish(part(count))))
        if count > 0:
            return part(count), finish(part(count))
    return text, ids
