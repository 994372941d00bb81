"""A call being answered: what it asks for, the rounds of a batch until every row's text has ended, and its stream."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from ..config import Sampling
from ..decode.plan import DraftPlan
from ..errors import UserError
from ..render import characters, spans
from . import memory
from .levels import levels_of
from .logprobs import of_round
from .output import Generation, RowOutput, Stats
from .prompt_cache import Prefix


@dataclass
class Call:
    """What a call asks for, checked."""

    ids: list[list[int]]
    prefix: Prefix | None
    max_new_tokens: int
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

    def part(self, start: int, stop: int, num_tokens: int) -> "Call":
        """The same for the prompts [start, stop). Progress is told of all of them.

        Args:
            num_tokens: new ones of those before.
        """
        rows, total = slice(start, stop), len(self.ids)
        tell_prefill, tell_decode = self.on_prefill, self.on_decode
        on_prefill = tell_prefill and (lambda share: tell_prefill((start + share * (stop - start)) / total))
        on_decode = tell_decode and (lambda count: tell_decode(num_tokens + count))
        sampling = Sampling(**{name: column[rows] for name, column in vars(self.sampling).items()})
        return replace(self, ids=self.ids[rows], dropped=self.dropped[rows], sampling=sampling,
                       on_prefill=on_prefill, on_decode=on_decode)


class Session:
    """Rows that run side by side.

    Attributes:
        call: what they ask for.
        state: what they run on, from its prefill until the session is closed.
    """

    def __init__(self, call: Call, tokenizer, device: torch.device):
        self.call, self.device, self.state = call, device, None
        self.outputs = [RowOutput(tokenizer, call.eos_ids, call.stops, call.max_new_tokens) for _ in call.ids]
        self._begun = time.perf_counter()
        self._first_round: list[int] = []  # tokens of each row that the first round emitted
        self._ttft = self._prefill = self._seconds = 0.0  # _seconds: of the rounds after the first
        self._results: list[Generation | None] = [None] * len(call.ids)  # of rows that have ended

    @property
    def done(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    def round(self) -> list[tuple[int, str]]:
        """A round of the state, which is prefilled: (row, text that is now certain) of each row that had not ended."""
        state, started = self.state, time.perf_counter()
        emitted = state.round()
        running = [row for row, output in enumerate(self.outputs) if output.finish_reason is None]
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
        if not self._first_round:
            self._first_round, self._ttft = [len(output.tokens) for output in self.outputs], now - self._begun
            self._prefill = started - self._begun
        else:
            self._seconds += now - started
        for row in ended:  # levels go on counting while its neighbours draft
            self._results[row] = self._result(row)
        return pieces

    def results(self) -> list[Generation]:
        """What each row has said: all of it once it has ended, and until then what there is."""
        return [result or self._result(row) for row, result in enumerate(self._results)]

    def close(self) -> None:
        """No round will follow: what was said is kept, and the caches are let go."""
        if self.state is not None:
            self.state.pilot.learn()
        self._results, self.state = self.results(), None

    def _result(self, row: int) -> Generation:
        call, output, stats = self.call, self.outputs[row], {}
        if (state := self.state) is not None:
            view = state.hierarchy.view
            stats = {"shared_tokens": state.base, "reused_tokens": state.reused[row], "compiling": state.waited,
                     "recording": state.recording, "flushes": state.num_flushes,
                     "retrieval_rebuilds": 0 if view is None else view.num_rebuilds}
        if state is not None and self._first_round:
            later = len(output.tokens) - self._first_round[row]
            stats |= {"tbt": self._seconds / later if later else 0.0, "decode": self._seconds,
                      "acceptance_rate": state.hierarchy.acceptance_rates()[row],
                      "block_efficiency": len(output.tokens) / max(state.num_forwards, 1),
                      "target_forwards": state.num_forwards}
        stats = Stats(prompt_len=len(call.ids[row]), dropped_tokens=call.dropped[row], new_tokens=len(output.tokens),
                      prefill=self._prefill, ttft=self._ttft, peak_memory=memory.peak(self.device),
                      seed=call.sampling.seed[row], defaults=call.defaults, **stats)
        return Generation(output.text, [*output.tokens], output.finish_reason or "interrupted", stats,
                          [*output.levels], [*output.pieces], None if call.logprobs is None else [*output.logprobs])


class Stream:
    """Iterates over the pieces of one generation's text.

    `result` is its Generation: all of it once the iteration has ended; after an early stop, or in between, what there
    is, with the finish_reason "interrupted"; None before the first piece was asked for. `spans` is the newest piece as
    (text, level) pairs: which level proposed what of it, see levels.py.
    """

    def __init__(self, pieces: Iterator[tuple[int, str]], sessions: list[Session], call: Call):
        self._pieces, self._sessions, self._is_cancelled = pieces, sessions, call.is_cancelled
        self._characters: Iterator[tuple[str, str]] | None = None
        self.spans: list[tuple[str, str]] = []

    def __iter__(self):
        return self

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)[1]
        except ValueError:
            if self._is_closed:
                raise
            raise UserError("another thread iterates over this stream; give each thread a stream of its own") from None
        if self._characters is None:
            [output] = self._sessions[0].outputs
            self._characters = characters(output.pieces, output.levels)
        self.spans = spans(self._characters, len(piece))
        return piece

    @property
    def _is_closed(self) -> bool:
        return inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED

    @property
    def result(self) -> Generation | None:
        return self._sessions[0].results()[0] if self._sessions else None

    def close(self) -> None:
        """Ends the generation early; the engine is ready for the next call. From a callback, or from another thread
        while a piece comes: the iteration ends after the prefill, or the pieces of the round, that is under way."""
        self.cancel()
        try:
            self._pieces.close()
        except ValueError:  # it runs
            if self._is_closed:
                raise

    def cancel(self) -> None:
        """The generation ends with the round that is under way, once somebody goes on iterating or closes it."""
        self._is_cancelled.set()
