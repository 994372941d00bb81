"""Costs are guessed, learned from rounds, and kept for the next text."""

import os
import random
import subprocess
import sys

import pytest
from conftest import make_engine, random_prompt

from triforce.decode.controller import Costs
from triforce.decode.plan import DraftPlan


def true() -> Costs:
    return Costs({1: 15.0, 4: 28.0, 8: 32.0}, {1: 5.0, 4: 6.0}, {"model": (1.5, 1.2), "ngram": (0.4, 0.1)})


@pytest.mark.parametrize("plan, expected", [
    (DraftPlan(), (0.0, 15.0)),
    (DraftPlan(3, "model"), (1.5 + 2 * 1.2, 28.0)),
    (DraftPlan(2, None, True, 0, 2), (10.0, 28.0)),  # 3 rows in a step of 4
    (DraftPlan(5, "model", True, 2, 3), (3 * (6.0 + 1.5 + 1.2), 32.0)),
    (DraftPlan(7, "ngram"), (0.4 + 6 * 0.1, 32.0)),
])
def test_what_a_round_takes(plan, expected):
    assert true().milliseconds(plan) == pytest.approx(expected)


def test_rounds_set_a_wrong_guess_right():
    """From a guess that is wrong in every part, rounds of several plans lead to what those plans take."""
    rng = random.Random(0)
    learned = Costs({1: 3.0, 4: 3.0, 8: 3.0}, {1: 4.0, 4: 4.0}, {"model": (0.1, 0.1), "ngram": (1.0, 1.0)}, seen=0)
    plans = [DraftPlan(), DraftPlan(3, "model"), DraftPlan(1, "model"), DraftPlan(7, "ngram"),
             DraftPlan(3, None, True, 0, 3),
             DraftPlan(7, "model", True, 3, 2), DraftPlan(7, "model", True, 1, 4)]
    for _ in range(200):
        plan = rng.choice(plans)
        sums = learned.drafting(plan), learned.checking(plan)
        for parts, took in zip(sums, true().milliseconds(plan), strict=True):
            if took:
                learned.observe(parts, took * rng.uniform(0.97, 1.03))
    for plan in plans:
        assert learned.milliseconds(plan) == pytest.approx(true().milliseconds(plan), rel=0.12)


def test_a_second_text_begins_with_what_the_first_learned(pair):
    """In another DecodeBatch, too; and with its acceptance rates. Not so texts of other lengths."""
    begun, seen, ended = [], [], []
    engine = make_engine(*pair, budget=64, flush_interval=16, chunk_size=4, gamma="auto", reuse=False)
    for length in (100, 1500, 101, 5000):
        state = engine.prepare([random_prompt(length, seed=length)], 60, temperature=0.0)
        begun.append({name: rate.mean for name, rate in state.pilot.controller.rates.items()})
        seen.append(state.pilot.controller.costs.seen.any())
        engine.generate(random_prompt(length, seed=length), 60, temperature=0.0)
        ended.append({name: rate.mean for name, rate in state.pilot.controller.rates.items()})
    assert seen == [False, True, True, False]
    assert begun[0] == begun[3] == {"retrieval": 0.9, "model": 0.5} != ended[0]
    assert begun[1:3] == [pytest.approx(one) for one in ended[:2]]


def test_a_stream_that_is_open_when_the_process_ends_leaves_nothing(tmp_path):
    """Python closes it when nothing can be imported any more."""
    script = """
import triforce
engine = triforce.load("tiny", device="cpu")
stream = engine.stream("Call me", 200)
for count, piece in enumerate(stream):
    if count == 5:
        break
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env={**os.environ, "TRIFORCE_CACHE": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.stat().st_size]
