"""What a generation returns, and when a row's text ends. Knows nothing of models or devices."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from ..config import as_numbers, is_whole
from ..errors import UserError
from ..render import as_html
from .logprobs import Logprob


def stat(name: str, shown: Callable = "{:,}".format, default=0):
    """A field of `Stats`: its name in the table, and how a value is shown there."""
    return field(default=default, metadata={"name": name, "shown": shown})


SECONDS = "{:.2f} s".format


@dataclass
class Stats:
    """Measured over one call. Times are wall-clock seconds; a batch's rows share them."""

    prompt_len: int = stat("prompt tokens")
    dropped_tokens: int = stat("dropped prompt tokens")  # see `keep`; `prompt_len` counts what was left
    shared_tokens: int = stat("  shared by all rows")  # of the prompt: their K/V are kept once for all rows of the call
    reused_tokens: int = stat("  held from before")  # of the prompt: their K/V were there before its turn
    new_tokens: int = stat("new tokens")
    load: float = stat("start and load", SECONDS, 0.0)  # of a command: from its start until the model was ready
    prefill: float = stat("prefill", SECONDS, 0.0)  # until the prompts were in the cache
    compiling: float = stat("  of it, compiling", SECONDS, 0.0)  # waiting for compiled steps, where `compile` is True
    ttft: float = stat("time to first token", SECONDS, 0.0)  # from the call: prefill and the first round
    decode: float = stat("all other tokens", SECONDS, 0.0)
    recording: float = stat("  of it, preparing steps", SECONDS, 0.0)  # and recording graphs
    tbt: float = stat("time per token", lambda tbt: f"{1e3 * tbt:.2f} ms", 0.0)  # `decode`, after the first round
    acceptance_rate: dict[str, float] = field(default_factory=dict)  # accepted / drafted, by the level that checks
    block_efficiency: float = stat("tokens per target forward", "{:.2f}".format, 0.0)  # over its full cache
    target_forwards: int = stat("target forwards")
    retrieval_rebuilds: int = stat("retrieval rebuilds")
    peak_memory: int = stat("peak memory", lambda size: f"{size / 2**30:.2f} GiB")  # on the GPU, or resident on the CPU
    seed: int = stat("seed", str)
    defaults: dict[str, float] = field(default_factory=dict)  # sampling values that the checkpoint chose, not the call

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.tbt if self.tbt else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs as the table shows them, without what is 0."""
        named = [(one.metadata, getattr(self, one.name)) for one in fields(self) if one.metadata]
        return [*((about["name"], about["shown"](value)) for about, value in named if value or about["name"] == "seed"),
                ("tokens per second", f"{self.tokens_per_second:.1f}"),
                *((f"acceptance at {level}", f"{rate:.3f}") for level, rate in self.acceptance_rate.items()),
                *((f"{name}, checkpoint's", f"{value:g}") for name, value in self.defaults.items())]

    def notes(self) -> str:
        """What the names in the table mean."""
        return "\n".join(f"{name}: {means}." for name, means in NOTES.items() if name in str(self))

    def __str__(self) -> str:
        return as_table(self.rows())


NOTES = {
    "acceptance": "of the tokens drafted for a level, the share that it kept; those\n"
                  "  that follow a rejected one count as not kept",
    "target forward": "a pass of the whole model over its whole KV cache",
    "retrieval rebuild": "the tokens that drafts read (the budget) were chosen anew"}


def as_table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<26}{value:>14}" for name, value in rows)


@dataclass
class Generation:
    """One row's result."""

    text: str  # new text only, to be joined to the prompt; ends before an eos and before a stop string
    tokens: list[int]  # new tokens only, with a final eos, stop id, or the token that completed a stop string
    finish_reason: str  # "stop" (eos, stop id or string) | "length" | "interrupted" (a stream that was closed before)
    stats: Stats
    levels: list[str] = field(default_factory=list)  # the level that proposed each token: see session.levels_of
    # For each token, the text that became certain with it; joined they are `text`. If several tokens spell one
    # character, the last of them has it.
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprob] | None = None  # one a token, where they were asked for

    def _repr_html_(self) -> str:
        """What a notebook shows: the text, its tokens coloured by level, and the statistics."""
        return as_html(self)


def totals(results: list[Generation], seconds: float) -> str:
    """A table of all answers of one call, which took `seconds`. Those of a group ran side by side."""
    count, every = sum(len(one.tokens) for one in results), [one.stats for one in results]
    rows = [
        ("answers", f"{len(results):,}"),
        ("shared prompt tokens", f"{every[0].shared_tokens:,}"),
        ("new tokens of all", f"{count:,}"),
        ("time of the call", f"{seconds:.2f} s"),
        ("tokens per second of all", f"{count / seconds:.1f}"),
        ("tokens per target forward", f"{count / max(sum(one.target_forwards for one in every), 1):.2f}"),
        ("peak memory", f"{max(one.peak_memory for one in every) / 2**30:.2f} GiB"),
        ("seeds", f"{min(one.seed for one in every)} to {max(one.seed for one in every)}")]
    return as_table([*rows, *(row for row in every[0].rows() if row[0].endswith("checkpoint's"))])


def as_json(value) -> str:
    """One line of JSON. A number that is not finite becomes null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


class RowOutput:
    """Collects a row's tokens, turns them into text, and ends it at an eos, a stop string or `max_new_tokens`."""

    def __init__(self, tokenizer, eos_ids: tuple[int, ...], stop: list[str], max_new_tokens: int):
        self.eos_ids, self.stop, self.max_new_tokens = frozenset(eos_ids), stop, max_new_tokens
        self.stream = tokenizer.stream(continues=True) if tokenizer is not None else None
        self.tokens: list[int] = []
        self.levels: list[str] = []  # one a token, where they are told
        self.pieces: list[str] = []  # one a token
        self.logprobs: list[Logprob] = []  # one a token, where they are told
        self.text, self.shown = "", 0
        self.finish_reason: str | None = None

    def push(self, tokens: list[int], levels: Sequence[str] = (), logprobs: Sequence[Logprob] = ()) -> str:
        """Takes in a round's tokens, drops those after the end, and returns the text that has become certain. levels:
        the level that proposed each token."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.pieces.append("")
            if token not in self.eos_ids:
                self._add(self.stream.push([token]) if self.stream else "")
            if self.finish_reason is None and (token in self.eos_ids or len(self.tokens) >= self.max_new_tokens):
                self._add(self.stream.finish() if self.stream else "")
                self.finish_reason = self.finish_reason or ("stop" if token in self.eos_ids else "length")
            if self.finish_reason is not None:
                break
        self.levels += levels[: len(self.tokens) - before]
        self.logprobs += logprobs[: len(self.tokens) - before]
        certain = len(self.text) if self.finish_reason else len(self.text) - self._may_become_stop()
        piece, self.shown = self.text[self.shown : certain], max(self.shown, certain)
        return piece

    def _add(self, piece: str) -> None:
        self.text += piece
        self.pieces[-1] += piece
        if not self.stop:  # the host does this for each token, and the device waits
            return
        searched = max(len(self.text) - len(piece) - max(map(len, self.stop)) + 1, 0)
        found = [at for at in (self.text.find(stop, searched) for stop in self.stop) if at >= 0]
        if not found:
            return
        left, self.text, self.finish_reason = min(found), self.text[: min(found)], "stop"
        for token, piece in enumerate(self.pieces):
            self.pieces[token] = piece[:left]
            left -= len(self.pieces[token])

    def _may_become_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        begins = (stop[:n] for stop in self.stop for n in range(1, min(len(stop), len(self.text) + 1)))
        return max((len(one) for one in begins if self.text.endswith(one)), default=0)


def listed(value) -> list:
    """None, one value or several, as a list."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def stop_strings(stop) -> list[str]:
    """Raises UserError for what is no string, and for an empty string, which every text has."""
    if not all(isinstance(one, str) and one for one in listed(stop)):
        raise UserError(f"stop ({stop!r}) must be a string or a list of strings, none of them empty")
    return listed(stop)


def stop_ids(stop_token_ids) -> list[int]:
    """Raises UserError for what is no whole number."""
    ids = listed(as_numbers(stop_token_ids))
    if not all(map(is_whole, ids)):
        raise UserError(f"stop_token_ids ({stop_token_ids!r}) must be whole numbers, ids; a text is given as stop")
    return ids


def special_ids(stops: list[str], tokenizer) -> list[int]:
    """Ids of the stop strings that are special tokens, which no text holds. Raises UserError for a string that has such
    a token beside other text."""
    named = {tokenizer.token_of[i]: i for i in tokenizer.special_ids}
    for stop in set(stops) - named.keys():
        if inside := next((name for name in named if name and name in stop), None):
            raise UserError(f"stop ({stop!r}) holds the special token {inside!r}, which never stands in a text; give "
                            f"{inside!r} and the rest as two stops")
    return [named[stop] for stop in stops if stop in named]
