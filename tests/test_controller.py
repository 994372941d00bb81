"""The controller finds the cheapest plan, learns rates, and comes back to what it left."""

import copy
import itertools
import math
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from controller import kept, one_round  # noqa: E402

from triforce.controller import (  # noqa: E402
    Controller,
    Costs,  # noqa: E402
    Rate,
    at_least,
    emitted,
)
from triforce.pilot import Tally  # noqa: E402
from triforce.plan import Padding, Plan  # noqa: E402
from triforce.speculator import RowRound  # noqa: E402

UNPADDED = Padding(False, False, False)


def gpu_128k(**more) -> Costs:
    return Costs({8: 20.1}, {4: 5.0}, {"model": (0.25, 0.2)}, **more)


def settle(controller: Controller, rates: dict[str, float], rounds: int = 400,
           seed: int = 0) -> dict[Plan, int]:
    """Rounds against levels that accept with the given chances; counts the plans of the second half."""
    rng, chosen, takes = random.Random(seed), {}, copy.deepcopy(controller.costs).milliseconds
    for i in range(rounds):
        plan = controller.choose()
        num_tokens, observed = one_round(rng, plan, rates)
        controller.timed(plan, *takes(plan))
        controller.update(num_tokens, **observed)
        if 2 * i >= rounds:
            chosen[plan] = chosen.get(plan, 0) + 1
    return chosen


def time_of(controller: Controller, plan: Plan, rates: dict[str, float]) -> float:
    return controller.times_per_token(rates)[controller.plans.index(plan)]


@pytest.mark.parametrize("costs", [
    gpu_128k(),
    Costs({8: 4.0}, {4: 3.6}, {"model": (0.25, 0.2)}),  # a short context: the retrieval level cannot pay
    Costs({1: 15.0, 2: 19.0, 4: 28.0, 8: 32.0}, {1: 5.0, 4: 6.0}, {"model": (1.5, 1.2)}),  # a CPU, where rows cost
])
@pytest.mark.parametrize("rates", [{"retrieval": 0.92, "model": 0.6}, {"retrieval": 0.6, "model": 0.1},
                                   {"retrieval": 0.97, "model": 0.9}, {"retrieval": 0.02, "model": 0.02}])
def test_comes_near_the_best_plan_of_a_sweep(costs, rates):
    controller = Controller(copy.deepcopy(costs), 7, 3)
    chosen = settle(controller, rates)
    best = min(controller.times_per_token(rates))
    spent = sum(time_of(controller, plan, rates) * count for plan, count in chosen.items()) / sum(chosen.values())
    assert spent <= 1.05 * best
    assert spent <= 1.05 * time_of(controller, Plan(), rates)  # never slower than autoregression


def test_recovers_when_acceptance_does():
    controller = Controller(gpu_128k(), 7, 3)
    settle(controller, {"retrieval": 0.05, "model": 0.05})
    good = {"retrieval": 0.92, "model": 0.6}
    chosen = settle(controller, good, 600)
    best = min(controller.times_per_token(good))
    spent = sum(time_of(controller, plan, good) * count for plan, count in chosen.items()) / sum(chosen.values())
    assert spent <= 1.08 * best


def test_the_table_says_what_each_plan_takes():
    costs = Costs({1: 15.0, 2: 19.0, 4: 28.0}, {1: 5.0, 4: 6.5}, {"model": (1.5, 1.2), "ngram": (0.4, 0.0)})
    controller = Controller(costs, 7, 3)
    rates = {"retrieval": 0.8, "model": 0.5, "ngram": 0.2}
    assert len(controller.plans) == len(set(controller.plans)) > 60
    assert time_of(controller, Plan(), rates) == 15
    two = (1.5 + 1.2 + 28) / (1 + 0.5 + 0.25)  # in a step of 4 rows
    assert time_of(controller, Plan(2, "model"), rates) == pytest.approx(two)
    alone = (3 * 5.0 + 28) / (1 + 0.8 + 0.64 + 0.512)
    assert time_of(controller, Plan(3, None, True, 0, 3), rates) == pytest.approx(alone)
    drafted = {}  # of at most 5, with their chances: in either round 1, 2 or 3
    for one, two in itertools.product(((1, 0.5), (2, 0.25), (3, 0.25)), repeat=2):
        count = min(one[0] + two[0], 5)
        drafted[count] = drafted.get(count, 0) + one[1] * two[1]
    hierarchy = (2 * (1.5 + 1.2 + 6.5) + 28) / sum(chance * emitted(0.8, count) for count, chance in drafted.items())
    assert time_of(controller, Plan(5, "model", True, 2, 2), rates) == pytest.approx(hierarchy)
    assert emitted(0.5, 0) == 1 and emitted(0.5, 2) == 1.75


@pytest.mark.parametrize("inner, rounds", [(1, 1), (1, 5), (3, 2), (3, 4)])
def test_how_much_is_drafted_has_the_law_of_its_rounds(inner, rounds):
    kept = [(k + 1, 0.6**k * (0.4 if k < inner else 1)) for k in range(inner + 1)]  # tokens of a round, their chance
    ways = [tuple(zip(*way, strict=True)) for way in itertools.product(kept, repeat=rounds)]
    for j, chance in enumerate(at_least(0.6, 3, 7)[inner - 1, rounds]):
        assert chance == pytest.approx(sum(math.prod(chances) for counts, chances in ways if sum(counts) >= j))


def test_what_is_hardly_known_has_the_benefit_of_the_doubt():
    rate = Rate(0.5)
    hoped = rate.value
    rate.update(500, 1000)
    assert 0.5 < rate.value < 0.52 < hoped == pytest.approx(0.625)  # of four tests


def test_rounds_without_drafts_have_a_price_of_their_own():
    costs = Costs({16: 10.3}, {5: 5.5}, {"model": (0.3, 0.3)}, plain=9.6)
    controller = Controller(costs, 15, 4, Padding(plain=False))
    assert time_of(controller, Plan(padded=False), {"retrieval": 0.9, "model": 0.5}) == 9.6
    assert time_of(controller, Plan(1, "model"), {"retrieval": 0.9, "model": 0.5}) == pytest.approx(10.6 / 1.5)
    chosen = settle(controller, {"retrieval": 0.02, "model": 0.02})
    assert max(chosen, key=chosen.get) == Plan(padded=False)


def test_what_has_to_be_recorded_first_must_pay():
    """A retrieval level where a draft does nearly as well: it is begun for a long text alone, and kept once begun."""
    costs = gpu_128k(plain=20.0, preparing=50.0)

    def chosen(remaining: float) -> Plan:
        return Controller(costs, 7, 3, Padding(plain=False)).choose(remaining)

    assert chosen(8).retrieval  # all has been recorded
    costs.seen[costs.number["retrieval", 4]] = 1
    assert [(plan.gamma > 0, plan.retrieval) for plan in map(chosen, (32, 100_000))] == [(True, False), (True, True)]
    costs.seen[costs.number["verify", 8]] = 0
    assert chosen(8).gamma == 0  # not even a verify is there


@pytest.mark.parametrize("remaining", [16, 64, 100_000])
def test_trees_have_to_pay_for_what_they_record(remaining):
    """They need a retrieval level: where it is not worth its recording, no tree begins it."""
    chosen = []
    for trees in (None, (64, 8)):
        costs = Costs({64: 15.0}, {5: 2.2}, {"model": (0.4, 0.3)}, growth=2.5, preparing=54.0)
        costs.seen[costs.number["retrieval", 5]] = 1
        chosen.append(Controller(costs, 63, 4, trees=trees).choose(remaining).retrieval)
    assert chosen == [remaining > 1000] * 2


def test_what_hardly_gains_is_left_alone():
    """Self-speculation where a drafting step takes nearly as long as a verify: it may gain 3%, or lose 15."""
    for rate in (0.9, 0.8, 0.5):
        controller = Controller(Costs({4: 6.6}, {1: 5.2}, plain=6.35), 3, 0, Padding(plain=False))
        assert settle(controller, {"retrieval": rate})[Plan(padded=False)] >= 190


def test_before_a_slow_verify_rounds_are_long_at_once():
    """As where a document streams from host memory: what all that is drafted should take is little beside it."""
    for checks in ([], [1200.0]):
        costs = Costs({64: 1200.0}, {5: 5.0}, {"model": (0.5, 0.5)}, seen=0)
        controller = Controller(costs, 63, 4)
        for took in checks:
            controller.timed(Plan(), 0.0, took)
        plan = controller.choose()
        assert plan.retrieval and plan.gamma > 16
        steps = plan.rounds * (1 + plan.gamma_inner)
        assert costs.milliseconds(plan)[0] + 1.9 * steps <= Controller.CHEAP * 1200  # whatever is not recorded yet


def test_without_evidence_rounds_are_plain_then_short():
    controller = Controller(Costs({16: 8.0}, {5: 0.8}, {"model": (0.1, 0.1)}, seen=0), 15, 4)
    assert controller.choose() == Plan()
    controller.timed(Plan(), 0.0, 8.0)
    plan = controller.choose()
    assert 0 < plan.gamma <= Controller.SHORT and 2 * plan.rounds <= Controller.SHORT
    for _ in range(2):  # the first is slow, and does not count
        controller.timed(plan, 2.0, 8.0)
    assert controller.choose().gamma > Controller.SHORT or controller.choose().rounds > 2


def test_rounds_set_the_times_right():
    """Drafting that takes longer in its place than on its own is left alone, and taken up when it is fast again."""
    controller = Controller(gpu_128k(), 7, 3)
    first = controller.choose()
    assert first.retrieval and first.source == "model"
    drafting, checking = gpu_128k().milliseconds(first)
    for _ in range(16):
        controller.timed(first, 5 * drafting, checking)
    other = controller.choose()
    assert not other.retrieval
    assert controller.costs.milliseconds(first)[0] == pytest.approx(5 * drafting, rel=0.05)
    for _ in range(40):
        controller.timed(first, drafting, checking)
    assert controller.choose() == first


def test_a_hiccup_changes_no_mind():
    for slow in ((1000, 1), (1, 1000), (1000, 1000)):
        controller = Controller(gpu_128k(), 7, 3)
        plan = controller.choose()
        took = gpu_128k().milliseconds(plan)
        for i in range(10):
            controller.timed(plan, *(one * (times if i == 5 else 1) for one, times in zip(took, slow, strict=True)))
            assert controller.choose() == plan


def no_good(mean: float) -> dict[str, Rate]:
    """Rates of earlier texts, of which so much was kept."""
    rate = Rate(0.5)
    rate.hits = mean * rate.tests
    return {"model": rate}


def test_a_draft_that_was_no_good_in_earlier_texts_is_hardly_tried():
    """And one that has become good is taken up again."""
    def costs():
        return Costs({1: 10.5, 2: 12.0, 4: 15.0, 8: 20.0}, {}, {"model": (1.0, 1.0)})

    tried = {}
    for mean in (0.5, 0.05):
        controller, tried[mean] = Controller(costs(), 7, 0, UNPADDED, rates=no_good(mean)), 0
        for _ in range(256):
            plan = controller.choose()
            tried[mean] += plan.gamma > 0
            controller.timed(plan, *costs().milliseconds(plan))
            controller.update(1, **({"model": (0, 1)} if plan.gamma else {}))
    assert tried[0.05] <= 4 < tried[0.5]
    chosen = settle(Controller(costs(), 7, 0, rates=no_good(0.05)), {"model": 0.9}, 200)
    assert max(chosen, key=chosen.get).gamma > 0


def test_what_is_never_right_is_tried_ever_more_seldom():
    """Until something of it is kept."""
    costs = Costs({1: 10.5, 2: 12.0, 4: 15.0, 8: 20.0}, {}, {"model": (1.0, 1.0)})
    controller, waits = Controller(costs, 7, 0, UNPADDED, rates=no_good(0.05)), [0]
    while len(waits) < 12:
        is_tried = controller.choose().gamma > 0
        controller.update(1, **({"model": (int(len(waits) == 8 and waits[-1] > 0), 1)} if is_tried else {}))
        waits[-1] += not is_tried
        if is_tried and waits[-1]:
            waits.append(0)
    assert waits[1] > 1.5 * waits[0] and max(waits) < 500 and waits[8] < waits[7] / 2, waits


def test_short_texts_come_back_to_a_draft_that_was_no_good_in_one():
    """They end before what lies idle is tried again."""
    rates, drafted = no_good(0.03), []
    while len(drafted) < 8 and not sum(drafted):
        costs = Costs({1: 7.8, 8: 8.9}, {}, {"model": (0.7, 0.5)}, preparing=54.0)
        controller = Controller(costs, 7, 0, UNPADDED, rates=rates)
        plans = [controller.choose(remaining=48)]
        while len(plans) < 48 and plans[-1].gamma == 0:
            controller.update(1)
            plans.append(controller.choose(remaining=48 - len(plans)))
        drafted.append(plans[-1].gamma > 0)
        rates["model"].begin()
    assert drafted[0] is False and drafted[-1] is True


def test_what_earlier_texts_showed_counts_no_more_than_a_guess():
    rate = Rate(0.5)
    rate.update(90, 100)
    mean = rate.mean
    rate.begin()
    assert rate.tests == Rate.WEIGHT and rate.mean == pytest.approx(mean) and mean > 0.8
    rate.idle(10_000)
    assert rate.mean == pytest.approx(0.5)


HOPELESS = {"model": (0, 1)}  # of one round, what a draft that is never right shows


def tiny(**more) -> Costs:
    return Costs({1: 10.5, 2: 12.0, 4: 15.0, 8: 20.0}, {}, {"model": (1.9, 1.4), "ngram": (0.01, 0.0)}, **more)


def busy_then_idle(costs: Costs, busy: int, tokens: int) -> tuple[Controller, float]:
    """n-grams of which one in ten is right, and a draft that never is. The machine is busy in the first rounds, which
    take twice as long. Returns the controller, and the time of all rounds."""
    controller = Controller(costs, 7, 0, UNPADDED)
    rng, spent, emitted = random.Random(0), 0.0, 0
    for i in range(10_000):
        plan = controller.choose(ngram=0.1)
        took = [one * (2 if i < busy else 1) for one in tiny().milliseconds(plan)]
        count = 1 + kept(rng, 0.1, plan.gamma) if plan.source == "ngram" else 1
        controller.timed(plan, *took)
        controller.update(count, **(HOPELESS if plan.source == "model" else {}))
        spent, emitted = spent + sum(took), emitted + count
        if emitted >= tokens:
            return controller, spent
    raise AssertionError("no text")


@pytest.mark.parametrize("busy", [2, 3, 8])
def test_a_busy_moment_is_not_believed_for_ever(busy):
    """What a round without speculation takes is not seen while others are chosen. It is believed to take no longer than
    a verify of more rows, and seen again."""
    guess = Costs({n: 6 + 0.5 * n for n in (1, 2, 4, 8)}, {}, {"model": (0.2, 0.2), "ngram": (0.01, 0.0)}, seen=0)
    controller, spent = busy_then_idle(guess, busy, 256)
    assert controller.plan == Plan(padded=False) and controller.costs["verify", 1] == pytest.approx(10.5, rel=0.05)
    assert spent < 1.1 * 256 * 10.5 + busy * 20


def test_what_has_long_been_known_to_be_slow_is_seen_again():
    """Costs of an earlier text, on a machine that was busy to its end."""
    costs = tiny()
    costs.values[costs.number["verify", 1]] = 16.0
    controller, _ = busy_then_idle(costs, 0, 300)
    assert controller.plan == Plan(padded=False) and controller.costs["verify", 1] == pytest.approx(10.5, rel=0.06)


@pytest.mark.parametrize("drafts", [{"ngram": (0.05, 0.0)}, {"model": (0.3, 0.2)}])
def test_a_gpus_jitter_is_no_reason_to_record_a_step(drafts):
    """In a fresh process, whose first round takes the step that checks: the other one is guessed to take as long."""
    rng = random.Random(0)
    for _ in range(20):
        costs = Costs({16: 20.5}, {}, drafts, plain=20.5, preparing=54.0, seen=0)
        takes = copy.deepcopy(costs).milliseconds
        controller, plans = Controller(costs, 15, 0, Padding(plain=False)), [Plan()]
        costs.seen[costs.number["verify", 16]] = 4
        for i in range(256):
            drafting, checking = takes(plans[-1])
            controller.timed(plans[-1], drafting, checking * rng.uniform(0.995, 1.005))
            count, seen = one_round(rng, plans[-1], {"model": 0.6, "ngram": 0.4})
            controller.update(count, **seen)
            plans.append(controller.choose(remaining=256 - i, ngram=0.4))
        assert all(plan.gamma for plan in plans[2:])


def test_where_speculation_is_far_better_it_goes_on():
    for rates in ((0.92, 0.6), (0.5, 0.4)):
        costs = Costs({8: 20.1}, {4: 5.0}, {"model": (0.25, 0.2)}, plain=20.0)
        chosen = settle(Controller(costs, 7, 3), dict(zip(("retrieval", "model"), rates, strict=True)), 600)
        assert max(chosen, key=chosen.get).gamma > 0 and chosen.get(Plan(), 0) < 0.05 * sum(chosen.values())


def test_many_rows_try_what_lies_idle_no_oftener_than_one():
    """A draft that is never right, on the tally of a batch: each test of it costs a round, of however many rows."""
    tried = {}
    for rows in (1, 32):
        controller, tried[rows] = Controller(Costs({4: 10.0}, {}, {"model": (0.3, 0.3)}), 3, 0), 0
        for i in range(1200):
            plan = controller.choose()
            seen = Tally(plan)
            tried[rows] += plan.gamma > 0 and i >= 100
            for _ in range(rows):
                seen.add(RowRound([5], [], 0, plan.gamma, False))
            controller.update(seen.tokens_a_row, **seen.counts)
    assert 0 < tried[32] <= tried[1]


def test_what_the_caller_knows_counts():
    controller = Controller(Costs({8: 20.0}, {4: 5.0}, {"model": (0.25, 0.2), "ngram": (0.3, 0.0)}), 7, 3)
    assert controller.choose(ngram=0.05).source == "model"
    assert controller.choose(ngram=0.95).source == "ngram"
    assert controller.choose(ngram=0.05).source == "model"


def test_choosing_takes_no_time():
    """It stands between two rounds, while a GPU waits: it takes well under the time of a verify."""
    controller = Controller(gpu_128k(), 63, 3)
    assert len(controller.plans) < 400
    plan = controller.choose()
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        controller.timed(plan, 10.0, 20.0)
        controller.choose()
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.001
