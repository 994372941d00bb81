"""Times each step of a hierarchy where its rows stand.

Steps are rehearsed: they write K/V from the pending token on, and tokens behind it, which later rounds write anew.
"""

import contextlib
import statistics
import time
from typing import TYPE_CHECKING

import torch

from triforce.costs import Costs, guess
from triforce.plan import Padding, Plan

if TYPE_CHECKING:
    from triforce.hierarchy import Hierarchy

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


@torch.inference_mode()
def measure(hierarchy: "Hierarchy", padding: Padding, group=None) -> Costs:
    """Costs of every step that a plan can take, where the rows stand. group: the ranks that measure together."""
    outer, inner, device = hierarchy.outer, hierarchy.inner, hierarchy.outer.length.device
    here = outer.length.clone()
    recorded = 3 if device.type == "cuda" else 1  # a graph is warmed up, then recorded, then replayed
    with contextlib.ExitStack() as rehearsals:
        for level in hierarchy.levels:
            rehearsals.enter_context(level.rehearsal())

        def step(level, rows: int) -> float:
            probs = outer.draft_probs if level is inner else None
            return milliseconds(lambda: level.rehearse(here, rows, probs), device, group=group,
                                warm_up=recorded if level.is_recorded else 1)

        costs = guess(hierarchy, padding, here.tolist())
        costs.seen[:] = costs.WELL
        for (what, rows), i in costs.number.items():
            if what in ("verify", "plain", "retrieval"):
                costs.values[i] = step(inner if what == "retrieval" else outer, rows)
        outer.length.copy_(here)
        for name, source in hierarchy.sources.items():
            source.catch_up(here.tolist())

            def propose(count: int, level, source=source, name=name) -> float:
                def call():
                    source.propose(here, Plan(count, name), level.draft_probs)
                    source.commit(here)

                return milliseconds(call, device, warm_up=recorded, group=group)

            if inner is not None:
                propose(min(2, inner.rows - 1), inner)  # compiles it for that level as well
            one = propose(1, outer)
            costs.values[costs.number[name, "first"]] = one
            costs.values[costs.number[name, "further"]] = max(propose(2, outer) - one, 0.0) if outer.rows > 2 else 0.0
    return costs
