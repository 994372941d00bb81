"""Times each step of a State where it stands, for the controller. Knows nothing of choices: it reports milliseconds.

What it runs writes K/V from the pending token on, in the draft's cache, too, and tokens behind it: the rounds to come
write all of that anew. What else it changes it puts back.
"""

import statistics
import time

import torch

from .controller import Costs

REPEATS = 5
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


def same_step(level, here: torch.Tensor, rows: int, probs: torch.Tensor | None):
    """A call that takes a step of `rows` rows from `here` [B], all of them drafted; each time the same."""
    def call():
        level.checked.fill_(rows - 1)
        level.length.copy_(here)
        level.base.copy_(here)
        torch.add(here, level.rows, out=level.limit)
        level.step(*level.view.extent, rows, level.checked, probs)

    return call


@torch.inference_mode()
def measure(state) -> Costs:
    """Costs of every step that a plan of `state` can take."""
    outer, inner, cache = state.outer, state.inner, state.cache
    touched = [outer.length, outer.limit, cache.query_weight, *cache.queries,
               *(level.totals for level in (outer, inner, state.one_row) if level is not None)]
    if "model" in state.sources:
        touched.append(state.sources["model"].length)
    before = [x.clone() for x in touched]
    costs = _measure(state)
    for x, value in zip(touched, before, strict=True):
        x.copy_(value)
    return costs


def _measure(state) -> Costs:
    outer, inner, device, group = state.outer, state.inner, state.target.device, state.target.group
    here = outer.length.clone()
    recorded = 3 if device.type == "cuda" else 1  # a graph is warmed up, then recorded, then replayed

    def timed(level, rows: int) -> float:
        warm_up = 1 if level.view.offload is not None else recorded
        call = same_step(level, here, rows, outer.draft_probs if level is inner else None)
        return milliseconds(call, device, warm_up=warm_up, group=group)

    def sizes(level) -> list[int]:
        if not level.tight:
            return [level.rows]
        return sorted({rows for rows in (1, 2, 3, 4, 6, 8, 16, 32) if rows < level.rows} | {level.rows})

    costs = Costs({rows: timed(outer, rows) for rows in sizes(outer)})
    if state.plain is not outer:
        costs.plain = timed(state.plain, 1)
    if inner is not None:
        costs.retrieval = {rows: timed(inner, rows) for rows in sizes(inner)}
    outer.length.copy_(here)
    for name, source in state.sources.items():
        def propose(count: int, checker, name=name, source=source):
            def call():
                source.gamma = count
                if name == "model":
                    source.length.copy_(here)
                source.propose(here, checker.rows - 1, checker.draft_probs)

            return milliseconds(call, device, warm_up=recorded, group=group)

        if inner is not None:
            propose(min(2, inner.rows - 1), inner)  # compiles it for that level as well
        one = propose(1, outer)
        costs.sources[name] = one, max(propose(2, outer) - one, 0.0) if outer.rows > 2 else 0.0
    return costs
