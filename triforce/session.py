"""One group of prompts being answered: rounds of a State until every row's text has ended, timed on the way."""

import time
from dataclasses import dataclass

import torch

from . import memory
from .generation import Generation, RowOutput, Stats
from .levels import levels_of
from .logprobs import Logprob, of_round
from .state import State


@dataclass
class Progress:
    """How far a row has come: what its statistics are made of."""

    forwards: int = 0
    seconds: float = 0.0  # of decoding, after the first round
    acceptance: dict[str, float] | None = None


class Session:
    """Rows that run side by side.

    Args:
        prompts: ids of each row's prompt.
        outputs: where each row's tokens go.
        seeds: of each row, for its statistics.
        logprobs: see `Engine.stream`.
        dropped: tokens of each prompt that did not fit, for its statistics.
        defaults: sampling values that the checkpoint chose, for them, too.

    Attributes:
        plan: what the rounds to come follow, instead of what is chosen; may be set between two rounds.
    """

    def __init__(self, prompts: list[list[int]], outputs: list[RowOutput], seeds: list[int], device: torch.device,
                 logprobs: int | None = None, dropped: list[int] | None = None,
                 defaults: dict[str, float] | None = None):
        self.defaults, self.logprobs, self.dropped = defaults or {}, logprobs, dropped or [0] * len(prompts)
        self.prompts, self.outputs, self.seeds, self.device = prompts, outputs, seeds, device
        self.state: State | None = None
        self._begun = time.perf_counter()
        self._first_round: list[int] = []  # tokens of each row that the first round emitted
        self._ttft = self._prefill = self._seconds = 0.0
        self._ended: list[Progress | None] = [None] * len(prompts)
        self._results: list[Generation] | None = None

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
        told = None
        if self.logprobs is not None:
            told = of_round(state.hierarchy.outer, [len(tokens) for tokens in emitted], self.logprobs)
        pieces = [(row, self._push(row, emitted[row], told[row] if told else [])) for row in running]
        ended = [row for row in running if self.outputs[row].finish_reason is not None]
        for row in ended:
            state.close_row(row)
        now = time.perf_counter()
        if not self._first_round:
            self._first_round, self._ttft = [len(output.tokens) for output in self.outputs], now - self._begun
            self._prefill = started - self._begun
        else:
            self._seconds += now - started
        for row in ended:  # its drafting levels go on counting while its neighbours draft
            self._ended[row] = self._progress(row)
        return pieces

    def _push(self, row: int, tokens: list[int], logprobs: list[Logprob]) -> str:
        last = self.state.last_round
        return self.outputs[row].push(tokens, levels_of(last.plan, last.rows[row]), logprobs)

    def _progress(self, row: int) -> Progress:
        return Progress(self.state.num_forwards, self._seconds, self.state.hierarchy.acceptance_rates()[row])

    def results(self) -> list[Generation]:
        """What each row has said: all of it once the session has ended, and until then what there is."""
        if self._results:
            return self._results
        peak = memory.peak(self.device)  # which takes a GPU most of a millisecond
        return [self._result(row, peak) for row in range(len(self.outputs))]

    def close(self) -> None:
        """No round will follow: what was said is kept, and the caches are let go."""
        if self.state is not None:
            self.state.pilot.learn()
        self._results, self.state = self.results(), None

    def _result(self, row: int, peak: int) -> Generation:
        output, state = self.outputs[row], self.state
        progress = self._ended[row]
        if progress is None:
            progress = self._progress(row) if state is not None and self._first_round else Progress()
        later = len(output.tokens) - (self._first_round[row] if self._first_round else 0)
        return Generation(output.text, [*output.tokens], output.finish_reason or "interrupted", Stats(
            prompt_len=len(self.prompts[row]), dropped_tokens=self.dropped[row],
            shared_tokens=state.base if state else 0, reused_tokens=state.reused[row] if state else 0,
            new_tokens=len(output.tokens), ttft=self._ttft,
            tbt=progress.seconds / later if later else 0.0, acceptance_rate=progress.acceptance or {},
            prefill=self._prefill, compiling=state.waited if state else 0.0,
            decode=progress.seconds, recording=state.recording if state else 0.0,
            block_efficiency=len(output.tokens) / max(progress.forwards, 1), target_forwards=progress.forwards,
            retrieval_rebuilds=state.hierarchy.view.num_rebuilds if state and state.hierarchy.view else 0,
            flushes=state.num_flushes if state else 0, peak_memory=peak, seed=self.seeds[row],
            defaults=self.defaults),
            [*output.levels], [*output.pieces], None if self.logprobs is None else [*output.logprobs])
