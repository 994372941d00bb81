"""The controller finds the cheapest plan, learns rates, and comes back to what it left."""

import random

import pytest

from triforce.controller import Controller, Costs, Plan, at, emitted

GPU_128K = Costs({8: 20.1}, {4: 5.0}, {"model": (0.25, 0.2)})


def settle(controller: Controller, rates: dict[str, float], rounds: int = 400, seed: int = 0) -> dict[Plan, int]:
    """Rounds against levels that accept with the given chances; counts the plans of the second half."""
    rng, chosen = random.Random(seed), {}

    def chain(rate, count):
        kept = next((i for i in range(count) if rng.random() >= rate), count)
        return kept, kept + (kept < count)

    for i in range(rounds):
        plan = controller.choose()
        observed, drafted = {}, plan.gamma
        if plan.retrieval and plan.source:
            drafted = 0
            hits = tests = 0
            for _ in range(plan.rounds):
                kept, tested = chain(rates[plan.source], plan.gamma_inner)
                drafted, hits, tests = drafted + kept + 1, hits + kept, tests + tested
            drafted = min(drafted, plan.gamma)
            observed[plan.source] = hits, tests
        kept = 0
        if plan.gamma:
            name = "retrieval" if plan.retrieval else plan.source
            kept, tested = chain(rates[name], drafted)
            observed[name] = kept, tested
        controller.update(kept + 1, **observed)
        if 2 * i >= rounds:
            chosen[plan] = chosen.get(plan, 0) + 1
    return chosen


@pytest.mark.parametrize("costs", [
    GPU_128K,
    Costs({8: 4.0}, {4: 3.6}, {"model": (0.25, 0.2)}),  # a short context: the retrieval level cannot pay
    Costs({1: 15.0, 2: 19.0, 4: 28.0, 8: 32.0}, {1: 5.0, 4: 6.0}, {"model": (1.5, 1.2)}),  # a CPU, where rows cost
])
@pytest.mark.parametrize("rates", [{"retrieval": 0.92, "model": 0.6}, {"retrieval": 0.6, "model": 0.1},
                                   {"retrieval": 0.97, "model": 0.9}, {"retrieval": 0.02, "model": 0.02}])
def test_comes_near_the_best_plan_of_a_sweep(costs, rates):
    controller = Controller(costs, 7, 3)
    chosen = settle(controller, rates)
    best = min(controller.time_per_token(plan, rates) for plan in controller.plans)
    spent = sum(controller.time_per_token(plan, rates) * count for plan, count in chosen.items()) / sum(chosen.values())
    assert spent <= 1.05 * best
    assert spent <= 1.05 * controller.time_per_token(Plan(), rates)  # never slower than autoregression


def test_recovers_when_acceptance_does():
    controller = Controller(GPU_128K, 7, 3)
    settle(controller, {"retrieval": 0.05, "model": 0.05})
    good = {"retrieval": 0.92, "model": 0.6}
    chosen = settle(controller, good, 600)
    best = min(controller.time_per_token(plan, good) for plan in controller.plans)
    spent = sum(controller.time_per_token(plan, good) * count for plan, count in chosen.items()) / sum(chosen.values())
    assert spent <= 1.08 * best


def test_helpers():
    assert at({1: 10.0, 3: 14.0}, 2) == 12 and at({8: 5.0}, 1) == 5 and at({1: 1.0, 2: 2.0}, 9) == 2
    assert emitted(0.5, 0) == 1 and emitted(0.5, 2) == 1.75
