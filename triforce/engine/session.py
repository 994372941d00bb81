"""A call; a `Session` for each group of its prompts, with rounds until every text has ended; and its stream."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from ..config import Sampling
from ..decode.plan import DraftPlan
from ..decode.tape import ACCEPTED, LEAF
from ..decode.verifier import RowRound
from ..errors import UserError
from ..render import characters, spans
from ..runtime.host import not_pickled
from . import memory
from .logprobs import of_round
from .output import Generation, RowOutput, Stats
from .prompt_cache import Prefix


@dataclass
class Call:
    """What a call asks for, checked."""

    ids: list[list[int]]
    prefix: Prefix | None
    limits: list[int]  # the most new tokens of each prompt
    sampling: Sampling  # lists of a value for each prompt
    eos_ids: tuple[int, ...]
    stops: list[str]
    plan: DraftPlan | None  # what all rounds follow; None: chosen
    on_prefill: Callable[[float], None] | None
    on_decode: Callable[[int], None] | None
    logprobs: int | None
    dropped: list[int]  # tokens of each prompt that did not fit
    defaults: dict[str, float]  # sampling values that the checkpoint chose
    is_cancelled: threading.Event = field(default_factory=threading.Event)  # nobody wants more of it
    cancelled: set[int] = field(default_factory=set)  # prompts of which nobody wants more
    first: int = 0  # of its prompts, where the call is a part of another one

    def part(self, start: int, stop: int, num_tokens: int) -> "Call":
        """The same call for the prompts [start, stop). Progress counts all prompts. num_tokens: new ones of earlier
        prompts."""
        def on_prefill(share: float) -> None:
            self.on_prefill((start + share * (stop - start)) / len(self.ids))

        rows = slice(start, stop)
        sampling = Sampling(**{name: column[rows] for name, column in vars(self.sampling).items()})
        return replace(self, ids=self.ids[rows], limits=self.limits[rows], dropped=self.dropped[rows],
                       sampling=sampling, first=start, on_prefill=self.on_prefill and on_prefill,
                       on_decode=self.on_decode and (lambda count: self.on_decode(num_tokens + count)))

    @property
    def max_new_tokens(self) -> int:
        return max(self.limits)


class Session:
    """Rows that run side by side: what they ask for, and the DecodeBatch from its prefill until they are closed."""

    def __init__(self, call: Call, tokenizer, device: torch.device):
        self.call, self.device, self.state = call, device, None
        self.outputs = [RowOutput(tokenizer, call.eos_ids, call.stops, limit) for limit in call.limits]
        self._stats = Stats(0, defaults=call.defaults)  # what all rows have in common
        self._begun = time.perf_counter()
        self._first_round: list[int] = []  # tokens of each row that the first round emitted
        self._results: list[Generation | None] = [None] * len(call.ids)  # of rows that have ended

    @property
    def done(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    def round(self) -> list[tuple[int, str]]:
        """Runs a round of the prefilled state: (row, text that has become certain) of each row that had not ended."""
        state, started = self.state, time.perf_counter()
        running = [row for row, output in enumerate(self.outputs) if output.finish_reason is None]
        for row in [row for row in running if row + self.call.first in self.call.cancelled]:
            running.remove(row)
            self.outputs[row].finish_reason = "interrupted"
            self._results[row] = self._result(row)
            state.close_row(row)
        if not running:
            return []
        emitted = state.round()
        if not any(emitted[row] for row in running):
            raise RuntimeError("a round emitted nothing; this engine is in use by another thread, or has a bug")
        told, last = [[]] * len(emitted), state.last_round
        if self.call.logprobs is not None:
            told = of_round(state.hierarchy.outer, [len(tokens) for tokens in emitted], self.call.logprobs)
        pieces = [(row, self.outputs[row].push(emitted[row], levels_of(last.plan, last.rows[row]), told[row]))
                  for row in running]
        ended = [row for row in running if self.outputs[row].finish_reason is not None]
        for row in ended:
            state.close_row(row)
        now = time.perf_counter()
        if self._first_round:
            self._stats.decode += now - started
        else:
            self._first_round = [len(output.tokens) for output in self.outputs]
            self._stats.prefill, self._stats.ttft = started - self._begun, now - self._begun
        for row in ended:  # levels go on counting while its neighbours draft
            self._results[row] = self._result(row)
        return pieces

    def ended(self, row: int) -> Generation | None:
        """A row's result, if its text has ended."""
        return self._results[row] if self.outputs[row].finish_reason is not None else None

    def results(self) -> list[Generation]:
        """The result of each row: the whole text once it has ended, and until then what there is."""
        return [result or self._result(row) for row, result in enumerate(self._results)]

    def close(self) -> None:
        """No round will follow: keeps the results, and lets go of the caches."""
        if self.state is not None:
            self.state.pilot.learn()
            self.state.told = len(self.call.ids[0]) + len(self.outputs[0].tokens)
        self._results, self.state = self.results(), None

    def _result(self, row: int) -> Generation:
        call, output, state, count = self.call, self.outputs[row], self.state, len(self.outputs[row].tokens)
        stats = replace(self._stats, prompt_len=len(call.ids[row]), dropped_tokens=call.dropped[row],
                        seed=call.sampling.seed[row], new_tokens=count, peak_memory=memory.peak(self.device))
        if state is not None and self._first_round:  # before, the state counts the call before
            stats.shared_tokens, stats.reused_tokens = state.base, state.reused[row]
            stats.compiling, stats.recording = state.waited, state.recording
            stats.target_forwards = state.num_forwards
            stats.retrieval_rebuilds = getattr(state.hierarchy.view, "num_rebuilds", 0)
            stats.tbt = stats.decode / max(count - self._first_round[row], 1)
            stats.block_efficiency = count / max(state.num_forwards, 1)
            stats.acceptance_rate = state.hierarchy.acceptance_rates()[row]
        return Generation(output.text, [*output.tokens], output.finish_reason or "interrupted", stats,
                          [*output.levels], [*output.pieces], None if call.logprobs is None else [*output.logprobs])


def levels_of(plan: DraftPlan, row: RowRound) -> list[str]:
    """The level that proposed each of the tokens that a round emitted for a row: "draft", "ngram" or "custom", a user's
    own drafter; "retrieval", the target over the view; "target", nothing: the full level drew the token itself."""
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


class Stream:
    """Iterates over the pieces of a generation's text; of several prompts' as (number of the prompt, piece).

    `result` is its Generation: all of it once the iteration has ended; after an early stop, or in between, what there
    is, with the finish_reason "interrupted"; None before the first piece was asked for. `results` is a list of one a
    prompt. `spans` is the newest piece as (text, level) pairs: which level proposed what of it, see `levels_of`.
    """

    __reduce__ = not_pickled("a stream", "its result can be: stream.result")

    def __init__(self, pieces: Iterator[tuple[int, str]], sessions: list[Session], call: Call, several: bool):
        self._pieces, self._sessions, self._call, self._several = pieces, sessions, call, several
        self._characters: dict[int, Iterator[tuple[str, str]]] = {}  # by prompt
        self.spans: list[tuple[str, str]] = []

    def __iter__(self):
        return self

    def __next__(self) -> str | tuple[int, str]:
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING:
            raise UserError("another thread iterates over this stream; give each thread a stream of its own")
        number, piece = next(self._pieces)
        if number not in self._characters:
            session = self._sessions[-1]  # that of the piece: one comes after the other
            output = session.outputs[number - session.call.first]
            self._characters[number] = characters(output.pieces, output.levels)
        self.spans = spans(self._characters[number], len(piece))
        return (number, piece) if self._several else piece

    @property
    def results(self) -> list[Generation | None]:
        found = [result for session in self._sessions for result in session.results()]
        return found + [None] * (len(self._call.ids) - len(found))

    def ended(self, number: int) -> Generation | None:
        """The result of a prompt whose text has ended; None while it goes on."""
        for session in self._sessions:
            if 0 <= (row := number - session.call.first) < len(session.outputs):
                return session.ended(row)
        return None

    @property
    def result(self) -> Generation | None:
        return self.results[0]

    def close(self) -> None:
        """Ends the generation early; the engine is ready for the next call. From a callback, or from another thread
        while a piece comes: the iteration ends after the prefill, or the pieces of the round, that is under way."""
        self.cancel()
        try:
            self._pieces.close()
        except ValueError:
            if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:  # or else it runs
                raise

    def cancel(self, number: int | None = None) -> None:
        """The generation, or that of one prompt, ends with the round that is under way, once somebody goes on iterating
        or closes it. Any thread may call this."""
        if number is None:
            self._call.is_cancelled.set()
        else:
            self._call.cancelled.add(number)
