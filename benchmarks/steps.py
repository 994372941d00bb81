"""Times of single calls, and of a hierarchy's steps by the rounds that take them."""

import statistics
import time

import torch

from triforce.plan import AUTOREGRESSION, ONE_ROW, Plan
from triforce.state import State

REPEATS, ROUNDS = 5, 9
SLOW = 300


def milliseconds(call, device: torch.device, repeats: int = REPEATS, warm_up: int = 1, group=None) -> float:
    """Time of a call: the median by CUDA events on a GPU, the least on a CPU, where other work only ever adds.

    A call of over SLOW milliseconds is timed once. group: the ranks that make the call together, if any.
    """
    for _ in range(warm_up):
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        last = (time.perf_counter() - begun) * 1e3
    times = []
    if (last if group is None else group.agree(last)) > SLOW:  # or a rank would call once more, alone
        repeats = 1
    for _ in range(repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            call()
            times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times) if device.type == "cuda" else min(times)


def times(state: State, plan: Plan, rounds: int = ROUNDS) -> tuple[float, float]:
    """Milliseconds of drafting and of checking, medians over rounds that follow a plan, from where the state stands.
    Rounds in which a step was recorded do not count."""
    found = []
    for _ in range(3 * rounds):
        state.round(plan)
        if state.last_round.timing is not None:
            found.append((state.last_round.timing.drafting, state.last_round.timing.checking))
        if len(found) == rounds:
            break
    drafting, checking = zip(*found, strict=True)
    return statistics.median(drafting), statistics.median(checking)


def step_times(state: State) -> dict[str, float]:
    """Milliseconds of each step: a verify of all rows and of one, a retrieval step, the first and a further token of
    what drafts at the bottom."""
    hierarchy = state.hierarchy
    rows = {"verify_ms": times(state, AUTOREGRESSION)[1], "one_row_ms": times(state, ONE_ROW)[1]}
    if hierarchy.inner is not None:
        rows["retrieval_ms"] = times(state, Plan(1, None, True, 0, 1))[0]
    if "model" in hierarchy.sources:
        rows["draft_first_ms"] = first = times(state, Plan(1, "model"))[0]
        if hierarchy.outer.rows > 2:
            rows["draft_next_ms"] = max(times(state, Plan(2, "model"))[0] - first, 0.0)
    return rows
