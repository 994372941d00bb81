"""The controller learns costs and rates, finds the cheapest plan, and comes back to what it left."""

import copy
import functools
import random
import statistics
import time
from random import Random

import pytest
from conftest import make_engine, random_prompt
from controller import kept, milliseconds, one_round

from triforce.decode.controller import Controller, Costs, Rate, emitted
from triforce.decode.pilot import tally
from triforce.decode.plan import DraftPlan, Padding
from triforce.decode.tape import ACCEPTED, BONUS, MISSED
from triforce.decode.verifier import RowRound

UNPADDED = Padding(False, False, False)


def gpu_128k(**more) -> Costs:
    return Costs({8: 20.1}, {4: 5.0}, {"model": (0.25, 0.2)}, **more)


def settle(controller: Controller, rates: dict[str, float], rounds: int = 400,
           seed: int = 0) -> dict[DraftPlan, int]:
    """Rounds against levels that accept with the given chances; counts the plans of the second half."""
    rng, chosen, takes = random.Random(seed), {}, functools.partial(milliseconds, copy.deepcopy(controller.costs))
    for i in range(rounds):
        plan = controller.choose()
        num_tokens, observed = one_round(rng, plan, rates)
        controller.timed(plan, *takes(plan))
        controller.update(num_tokens, **observed)
        if 2 * i >= rounds:
            chosen[plan] = chosen.get(plan, 0) + 1
    return chosen


def time_of(controller: Controller, plan: DraftPlan, rates: dict[str, float]) -> float:
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
    assert spent <= 1.05 * time_of(controller, DraftPlan(), rates)  # never slower than autoregression


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
    rates = {"retrieval": 0.8, "model": 0.5}
    assert len(controller.plans) == len(set(controller.plans)) > 60
    assert time_of(controller, DraftPlan(), rates) == 15
    two = (1.5 + 1.2 + 28) / (1 + 0.5 + 0.25)  # in a step of 4 rows
    assert time_of(controller, DraftPlan(2, "model"), rates) == pytest.approx(two)
    alone = (3 * 5.0 + 28) / (1 + 0.8 + 0.64 + 0.512)
    assert time_of(controller, DraftPlan(3, None, True, 0, 3), rates) == pytest.approx(alone)
    drafted = 2 * (1 + 0.5 + 0.25)  # the mean of two rounds of the level between
    hierarchy = (2 * (1.5 + 1.2 + 6.5) + 28) / emitted(0.8, drafted)
    assert time_of(controller, DraftPlan(5, "model", True, 2, 2), rates) == pytest.approx(hierarchy)
    looked_up = [1.0, 1.3, 1.5, 1.6]  # a right one makes the next likelier: no rate says that
    times = dict(zip(controller.plans, controller.times_per_token(rates, looked_up), strict=True))
    assert times[DraftPlan(2, "ngram")] == pytest.approx((0.4 + 28) / 1.5)
    assert times[DraftPlan(7, "ngram")] == pytest.approx((0.4 + 28) / 1.6)  # more count as the last
    assert times[DraftPlan(5, "ngram", True, 3, 2)] == pytest.approx((2 * (0.4 + 6.5) + 28) / emitted(0.8, 2 * 1.6))
    assert times[DraftPlan(2, "model")] == pytest.approx(two)
    assert emitted(0.5, 0) == 1 and emitted(0.5, 2) == 1.75


def test_what_has_to_be_recorded_first_must_pay():
    """A retrieval level where a draft does nearly as well: it is begun for a long text alone, and kept once begun."""
    costs = gpu_128k(plain=20.0, preparing=50.0)

    def chosen(remaining: float) -> DraftPlan:
        return Controller(costs, 7, 3, Padding(plain=False)).choose(remaining)

    assert chosen(8).retrieval  # all has been recorded
    costs.seen[costs.number["retrieval", 4]] = 1
    assert [(plan.gamma > 0, plan.retrieval) for plan in map(chosen, (32, 100_000))] == [(True, False), (True, True)]
    costs.seen[costs.number["verify", 8]] = 0
    assert chosen(8).gamma == 0  # not even a verify is there


def test_what_hardly_gains_is_left_alone():
    """Self-speculation where a drafting step takes nearly as long as a verify: it may gain 3%, or lose 15."""
    for rate in (0.9, 0.8, 0.5):
        controller = Controller(Costs({4: 6.6}, {1: 5.2}, plain=6.35), 3, 0, Padding(plain=False))
        assert settle(controller, {"retrieval": rate})[DraftPlan(padded=False)] >= 190


def test_what_costs_next_to_nothing_is_tried_at_once_in_long_rounds():
    """Where a verify takes long, no short round would ever be chosen, and what none has shown would stay unseen."""
    for guessed, expected in ((0.001, "ngram"), (2.0, None)):
        costs = Costs({64: 67.0}, {5: 2.4}, {"model": (1.5, 1.2), "ngram": (guessed, 0.0)})
        costs.seen[costs.number["ngram", "first"]] = 0
        controller = Controller(costs, 63, 4)
        controller.rates["retrieval"].update(500, 505)
        plan = controller.choose(ngram=[1.0, 1.7, 2.2, 2.6, 2.9])
        assert plan.source == expected and plan.gamma > Controller.SHORT, plan


def test_rounds_set_the_times_right():
    """Drafting that takes longer in its place than on its own is left alone, and taken up when it is fast again."""
    controller = Controller(gpu_128k(), 7, 3)
    first = controller.choose()
    assert first.retrieval and first.source == "model"
    drafting, checking = milliseconds(gpu_128k(), first)
    for _ in range(16):
        controller.timed(first, 5 * drafting, checking)
    other = controller.choose()
    assert not other.retrieval
    assert milliseconds(controller.costs, first)[0] == pytest.approx(5 * drafting, rel=0.05)
    for _ in range(40):
        controller.timed(first, drafting, checking)
    assert controller.choose() == first


def test_a_hiccup_changes_no_mind():
    for slow in ((1000, 1), (1, 1000), (1000, 1000)):
        controller = Controller(gpu_128k(), 7, 3)
        plan = controller.choose()
        took = milliseconds(gpu_128k(), plan)
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
            controller.timed(plan, *milliseconds(costs(), plan))
            controller.update(1, **({"model": (0, 1)} if plan.gamma else {}))
    assert tried[0.05] <= 6 < 2 * tried[0.5] / 3
    chosen = settle(Controller(costs(), 7, 0, rates=no_good(0.05)), {"model": 0.9}, 200)
    assert max(chosen, key=chosen.get).gamma > 0


HOPELESS = {"model": (0, 1)}  # of one round, what a draft that is never right shows


def tiny(**more) -> Costs:
    return Costs({1: 10.5, 2: 12.0, 4: 15.0, 8: 20.0}, {}, {"model": (1.9, 1.4), "ngram": (0.01, 0.0)}, **more)


def busy_then_idle(costs: Costs, busy: int, tokens: int) -> tuple[Controller, float]:
    """n-grams of which one in ten is right, and a draft that never is. The machine is busy in the first rounds, which
    take twice as long. Returns the controller, and the time of all rounds."""
    controller = Controller(costs, 7, 0, UNPADDED)
    rng, spent, emitted = random.Random(0), 0.0, 0
    for i in range(10_000):
        plan = controller.choose(ngram=[1.0, 1.1, 1.11])
        took = [one * (2 if i < busy else 1) for one in milliseconds(tiny(), plan)]
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
    costs = controller.costs
    assert controller.plan == DraftPlan(padded=False)
    assert costs.values[costs.number["verify", 1]] == pytest.approx(10.5, rel=0.05)
    assert spent < 1.1 * 256 * 10.5 + busy * 20


def test_many_rows_try_what_lies_idle_no_oftener_than_one():
    """A draft that is never right, on the tally of a batch: each test of it costs a round, of however many rows."""
    tried = {}
    for rows in (1, 32):
        controller, tried[rows] = Controller(Costs({4: 10.0}, {}, {"model": (0.3, 0.3)}), 3, 0), 0
        for i in range(1200):
            plan = controller.choose()
            tried[rows] += plan.gamma > 0 and i >= 100
            tokens, seen = tally(plan, [RowRound([5], [], 0, plan.gamma, False)] * rows)
            controller.update(tokens, **seen)
    assert 0 < tried[32] <= tried[1]


def test_what_counts_of_a_round():
    """A drafter that proposed nothing has missed; what was checked behind a rejection, and a row that has ended, say
    nothing."""
    ended = RowRound([], [], 0, 4, False)
    for count, drafted, seen in ((0, 0, (0, 1)), (2, 4, (2, 3)), (4, 4, (4, 4))):
        row = RowRound([5] * (count + 1), [], count, drafted, False)
        assert tally(DraftPlan(4, "model"), [row, ended]) == (count + 1, {"model": seen})
    row = RowRound([5] * 3, [ACCEPTED, MISSED, ACCEPTED, BONUS], 2, 4, False)
    assert tally(DraftPlan(4, "model", True, 1, 2), [row]) == (3, {"retrieval": (2, 3), "model": (1, 2)})


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


def test_expected_tokens_of_rounds():
    """Against rounds that are played: one level, and two."""
    dice, rate, inner, rounds, most = Random(0), 0.7, 2, 3, 7

    def play(drafted: int) -> int:
        return kept(dice, rate, drafted) + 1

    alone = statistics.fmean(play(4) for _ in range(40_000))
    assert alone == pytest.approx(emitted(rate, 4), abs=0.03)
    between = [min(sum(play(inner) for _ in range(rounds)), most) for _ in range(40_000)]

    costs = Costs({most + 1: 10.0}, {1 + inner: 3.0}, {"model": (0.2, 0.2)})
    controller = Controller(costs, most, inner)
    plan = DraftPlan(most, "model", True, inner, rounds)
    found = sum(milliseconds(costs, plan)) / controller.times_per_token({"model": rate, "retrieval": rate})[
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
    assert milliseconds(true(), plan) == pytest.approx(expected)


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
        for parts, took in zip(sums, milliseconds(true(), plan), strict=True):
            if took:
                learned.observe(parts, took * rng.uniform(0.97, 1.03))
    for plan in plans:
        assert milliseconds(learned, plan) == pytest.approx(milliseconds(true(), plan), rel=0.12)


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
