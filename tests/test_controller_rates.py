"""What a controller believes: rates that forget, speculation that must promise enough.

Of controller.py.
"""

import statistics
from random import Random

import pytest

from triforce.decode.controller import INNER_LEAVES, LEAVES, Controller, Costs, emitted
from triforce.decode.plan import DraftPlan


@pytest.mark.parametrize("leaf", [0.0, 0.3])
def test_expected_tokens_of_rounds_with_leaves(leaf):
    """Against rounds that are played: one level, and two."""
    dice, rate, inner, rounds, most = Random(0), 0.7, 2, 3, 7

    def play(drafted: int) -> int:
        kept = next((i for i in range(drafted) if dice.random() >= rate), drafted)
        return kept + 1 + (kept < drafted and dice.random() < leaf)

    alone = statistics.fmean(play(4) for _ in range(40_000))
    assert alone == pytest.approx(emitted(rate, 4, leaf), abs=0.03)
    between = [min(sum(play(inner) for _ in range(rounds)), most) for _ in range(40_000)]

    costs = Costs({most + 1: 10.0}, {1 + inner: 3.0}, {"model": (0.2, 0.2)})
    controller = Controller(costs, most, inner, leaves=(leaf > 0, leaf > 0))
    for name in (LEAVES, INNER_LEAVES) if leaf else ():
        for _ in range(2000):
            controller.update(0, **{name: (3, 10)})
    plan = DraftPlan(most, "model", True, inner, rounds)
    found = sum(costs.milliseconds(plan)) / controller.times_per_token({"model": rate, "retrieval": rate})[
        controller.plans.index(plan)]
    assert found == pytest.approx(statistics.fmean(map(play, between)), rel=0.03)  # by the mean of what is drafted


def test_speculation_is_begun_where_it_promises_6_percent():
    """3% for being another plan, and 3% since what it takes is an estimate."""
    begun = {}
    for step in [4.0 + 0.05 * i for i in range(120)]:  # of a view by itself, beside a verify of 10
        controller = Controller(Costs({4: 10.0}, {1: step}), 3, 0)
        times = controller.times_per_token({name: rate.value for name, rate in controller.rates.items()})
        begun[min(times[1:]) / times[0]] = controller.choose() != DraftPlan()
    assert any(0.95 < promise < 0.97 for promise in begun) and any(promise < 0.93 for promise in begun)
    assert all(now == (promise < 0.97**2) for promise, now in begun.items())
