"""Which part of a prompt is kept where not all of it fits the model. Works on lists of ids alone."""

from collections.abc import Callable

from .errors import UserError

WAYS = ("start", "end", "both")


def check_keep(keep) -> None:
    """Raises UserError if it is neither None nor one of the ways."""
    if keep is not None and keep not in WAYS:
        raise UserError(f"keep ({keep!r}) must be one of {', '.join(WAYS)}, or left out: then a prompt that is too "
                        "long is an error")


def ways_to_fit(prompt_len: int, max_new_tokens: int, limit: int, document: int = 0, text: int | None = None) -> str:
    """What a user can do where a prompt and its new tokens exceed a limit.

    Args:
        document, text: see `Engine.check_len`.
    """
    excess, ways, fewer = prompt_len + max_new_tokens - limit, [], " and ask for fewer new ones"
    left = (prompt_len - document if text is None else text) - excess
    if left > 0 and text is not None:
        ways.append(f"cut the text by {excess} tokens, with --prompt-len {left}")
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
