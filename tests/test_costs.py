"""Costs are guessed, learned from rounds, and kept for the next process."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import make_engine, make_state, random_prompt

from triforce.controller import Controller
from triforce.costs import LAYER_ON_CPU, Costs, Learned, Shelf, guess
from triforce.plan import PADDED, Padding, Plan

TRUE = Costs({1: 15.0, 4: 28.0, 8: 32.0}, {1: 5.0, 4: 6.0}, {"model": (1.5, 1.2), "ngram": (0.4, 0.1)})


def unknown(costs: Costs) -> Learned:
    return Learned(costs, [0] * len(costs.parts()))


def test_parts_and_back():
    assert TRUE.having(TRUE.parts()) == TRUE
    with_plain = Costs({8: 2.0}, plain=1.0)
    assert with_plain.having(with_plain.parts()) == with_plain


@pytest.mark.parametrize("plan, expected", [
    (Plan(), (0.0, 15.0)),
    (Plan(3, "model"), (1.5 + 2 * 1.2, 28.0)),
    (Plan(2, None, True, 0, 2), (10.0, 15 + 2 / 3 * 13)),  # 3 rows lie between 1 and 4
    (Plan(5, "model", True, 2, 3), (3 * (5 + 2 / 3 * 1 + 1.5 + 1.2), 30.0)),
    (Plan(7, "ngram"), (0.4 + 6 * 0.1, 32.0)),
])
def test_what_a_round_takes(plan, expected):
    assert TRUE.milliseconds(plan) == pytest.approx(expected)


def test_rounds_set_a_wrong_guess_right():
    """From a guess that is wrong in every part, rounds of several plans lead to what those plans take."""
    rng = random.Random(0)
    learned = unknown(Costs({1: 3.0, 4: 3.0, 8: 3.0}, {1: 4.0, 4: 4.0}, {"model": (0.1, 0.1), "ngram": (1.0, 1.0)}))
    plans = [Plan(), Plan(3, "model"), Plan(1, "model"), Plan(7, "ngram"), Plan(3, None, True, 0, 3),
             Plan(7, "model", True, 3, 2), Plan(7, "model", True, 1, 4)]
    for _ in range(200):
        plan = rng.choice(plans)
        for weights, took in zip((TRUE.drafting(plan), TRUE.checking(plan)), TRUE.milliseconds(plan), strict=True):
            learned.observe(learned.weights(weights), took * rng.uniform(0.97, 1.03))
    for plan in plans:
        for now, true in zip(learned.now().milliseconds(plan), TRUE.milliseconds(plan), strict=True):
            assert now == pytest.approx(true, rel=0.12)


def test_the_first_verify_sets_the_scale_of_all():
    learned = unknown(Costs({8: 1.0}, {4: 0.5}, {"model": (0.1, 0.1)}))
    learned.observe(learned.weights({("verify", 8): 1.0}), 20.0)
    assert learned.now() == Costs({8: 20.0}, {4: 10.0}, {"model": (2.0, 2.0)})
    learned.observe(learned.weights({("model", "first"): 1.0}), 0.5)  # what is like it is as new
    assert learned.now() == Costs({8: 20.0}, {4: 10.0}, {"model": (0.5, 0.5)})


def test_what_lies_idle_gets_another_chance():
    learned = Learned(Costs({8: 20.0}, {4: 10.0}))
    for _ in range(300):
        learned.pass_by(1)
        learned.observe(learned.weights({("verify", 8): 1.0}), 20.0)
    assert learned.now().verify == pytest.approx({8: 20.0}) and learned.now().retrieval == pytest.approx({4: 9.0})


def test_without_evidence_rounds_are_plain_then_short():
    costs = Costs({16: 8.0}, {5: 0.8}, {"model": (0.1, 0.1)})
    controller = Controller(costs, 15, 4, seen=[0] * len(costs.parts()))
    assert controller.choose() == Plan()
    controller.timed(Plan(), 0.0, 8.0)
    plan = controller.choose()
    assert 0 < plan.gamma <= Controller.SHORT and 2 * plan.rounds <= Controller.SHORT
    for _ in range(2):  # the first is slow, and does not count
        controller.timed(plan, 2.0, 8.0)
    assert controller.choose().gamma > Controller.SHORT or controller.choose().rounds > 2


def test_guesses_know_how_much_is_read(pair):
    state = make_state(*pair, [random_prompt(600)], ngram=True)
    costs = guess(state.hierarchy, PADDED, [600])
    longer = guess(state.hierarchy, PADDED, [6000])
    assert set(costs.sources) == {"model", "ngram"} and list(costs.verify) == [4, 8]
    assert [costs.checking(Plan(gamma, "model")) for gamma in (0, 3, 4)] == [{("verify", n): 1.0} for n in (4, 4, 8)]
    config, more = state.target.config, (longer.verify[8] - costs.verify[8]) / 1.56
    assert more == pytest.approx(5400 * config.kv_elements_per_token * 4 / 2e7) and longer.sources == costs.sources
    assert costs.retrieval[3] < costs.verify[8]
    layers = [LAYER_ON_CPU * model.config.n_layer for model in pair]
    assert costs.verify[8] / 1.56 > layers[0] < min(costs.retrieval.values())
    assert costs.sources["model"][0] > layers[1] and costs.sources["ngram"][0] < 0.01
    assert guess(state.hierarchy, Padding(False, True), [600]).plain == pytest.approx(costs.verify[8] / 1.56, rel=0.01)
    assert list(guess(state.hierarchy, Padding(False, False), [600]).verify) == [1, 2, 3, 4, 6, 8]


def test_a_check_of_fewer_rows_takes_no_longer_than_one_of_more():
    """So a time that says so is not believed, whatever is kept. A guess, or a draft's time, says nothing of that."""
    costs = Costs({1: 20.0, 4: 9.0, 8: 30.0, 16: 5.0}, {1: 25.0}, {"model": (1.0, 1.0)}, plain=40.0)
    names = [*costs.parts()]
    seen = [int(name != ("verify", 16)) for name in names]
    learned = Learned(costs, seen)
    assert learned.now() == costs
    assert costs.having(dict(zip(names, learned.believed.tolist(), strict=True))) == replace(
        costs, verify={1: 9.0, 4: 9.0, 8: 30.0, 16: 5.0}, plain=9.0)


class Levels:
    """What a name of costs depends on, of a hierarchy."""

    def __init__(self, base=0, streams=None, budget=64):
        self.cache = SimpleNamespace(prefix=SimpleNamespace(base=base, streams=streams))
        self.view = SimpleNamespace(budget=budget)


def test_what_was_learned_is_kept():
    learned, shelf, levels = unknown(TRUE), Shelf(), Levels()
    learned.observe(learned.weights({("verify", 1): 1.0}), 30.0)
    name = shelf.name(PADDED, [5000], levels)
    assert shelf.find(name, TRUE) is None
    shelf.put(name, learned)
    costs, seen = shelf.find(name, TRUE)
    assert costs == learned.now() and sum(seen) == 1
    others = [shelf.name(PADDED, [9000], levels), shelf.name(PADDED, [5000, 5000], levels),
              *(shelf.name(PADDED, [5000], Levels(**how)) for how in ({"base": 512}, {"streams": 1}, {"budget": 9}))]
    assert all(shelf.find(other, TRUE) is None for other in others) and len({name, *others}) == 6
    assert shelf.find(name, Costs({8: 1.0})) is None  # other parts


def test_a_second_text_begins_with_what_the_first_learned(pair):
    """In another State, too; and with its acceptance rates."""
    begun, seen, ended = [], [], []
    engine = make_engine(*pair, budget=64, flush_interval=16, chunk_size=4, gamma="auto", reuse=False)
    for length in (100, 1500, 101):
        state = engine.prepare([random_prompt(length, seed=length)], 60, temperature=0.0)
        begun.append({name: rate.mean for name, rate in state.pilot.controller.rates.items()})
        seen.append(state.pilot.controller.learned.seen.copy())
        engine.generate(random_prompt(length, seed=length), 60, temperature=0.0)
        ended.append(state.pilot.controller.lasting_rates())
    assert not seen[0].any() and seen[1].any() and seen[2].any()
    assert begun[0] == {"retrieval": 0.9, "model": 0.5} != ended[0]
    assert begun[1:] == [pytest.approx(one) for one in ended[:2]]


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
