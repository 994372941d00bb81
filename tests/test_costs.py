"""Costs are guessed, learned from rounds, and kept for the next text."""

import os
import pickle
import random
import subprocess
import sys

import pytest
from conftest import make_engine, make_state, random_prompt

from triforce.controller import Costs
from triforce.pilot import LAYER_ON_CPU, guess
from triforce.plan import PADDED, Padding, Plan


def true() -> Costs:
    return Costs({1: 15.0, 4: 28.0, 8: 32.0}, {1: 5.0, 4: 6.0}, {"model": (1.5, 1.2), "ngram": (0.4, 0.1)})


@pytest.mark.parametrize("plan, expected", [
    (Plan(), (0.0, 15.0)),
    (Plan(3, "model"), (1.5 + 2 * 1.2, 28.0)),
    (Plan(2, None, True, 0, 2), (10.0, 28.0)),  # 3 rows in a step of 4
    (Plan(5, "model", True, 2, 3), (3 * (6.0 + 1.5 + 1.2), 32.0)),
    (Plan(7, "ngram"), (0.4 + 6 * 0.1, 32.0)),
])
def test_what_a_round_takes(plan, expected):
    assert true().milliseconds(plan) == pytest.approx(expected)


def test_a_round_that_checks_nothing_has_a_price_of_its_own_where_it_takes_another_step():
    costs = Costs({8: 2.0}, {1: 0.0}, plain=1.0, growth=0.5)
    assert [costs.milliseconds(Plan(padded=padded)) for padded in (True, False)] == [(0.0, 2.0), (0.0, 1.0)]
    drafting, _ = costs.milliseconds(Plan(7, None, True, 0, 7, branches=4))
    assert drafting == pytest.approx(1.5, abs=1e-4)  # the first row of a branch is known


def test_rounds_set_a_wrong_guess_right():
    """From a guess that is wrong in every part, rounds of several plans lead to what those plans take."""
    rng = random.Random(0)
    learned = Costs({1: 3.0, 4: 3.0, 8: 3.0}, {1: 4.0, 4: 4.0}, {"model": (0.1, 0.1), "ngram": (1.0, 1.0)}, seen=0)
    plans = [Plan(), Plan(3, "model"), Plan(1, "model"), Plan(7, "ngram"), Plan(3, None, True, 0, 3),
             Plan(7, "model", True, 3, 2), Plan(7, "model", True, 1, 4)]
    for _ in range(200):
        plan = rng.choice(plans)
        sums = learned.drafting(plan), learned.checking(plan)
        for parts, took in zip(sums, true().milliseconds(plan), strict=True):
            if took:
                learned.observe(parts, took * rng.uniform(0.97, 1.03))
    for plan in plans:
        assert learned.milliseconds(plan) == pytest.approx(true().milliseconds(plan), rel=0.12)


def test_the_first_verify_sets_the_scale_of_all():
    learned = Costs({8: 1.0}, {4: 0.5}, {"model": (0.1, 0.1)}, seen=0)
    learned.observe(learned.checking(Plan()), 20.0, checks=True)
    assert learned.values == pytest.approx([20.0, 10.0, 2.0, 2.0])
    learned.observe(learned.drafting(Plan(1, "model")), 0.5)
    assert learned.values == pytest.approx([20.0, 10.0, 0.5, 2.0])


def test_what_lies_idle_gets_another_chance():
    learned = Costs({8: 20.0}, {4: 10.0})
    for _ in range(Costs.STALE):
        assert learned["retrieval", 4] == 10.0
        learned.pass_by(1)
        learned.observe(learned.checking(Plan()), 20.0, checks=True)
    assert learned["verify", 8] == 20.0 and learned["retrieval", 4] == pytest.approx(10.0 * Costs.HOPE)


def test_a_check_after_a_pause_is_believed_at_once():
    for after, expected in ((Costs.FORGOTTEN - 1, 15.0 * 2**Costs.SHARE), (Costs.FORGOTTEN, 30.0)):
        learned = true()
        learned.pass_by(after)
        learned.observe(learned.checking(Plan(7, "model")), 32.0, checks=True)
        learned.observe(learned.checking(Plan()), 30.0, checks=True)
        assert learned["verify", 1] == pytest.approx(expected) and learned["verify", 8] == pytest.approx(32.0)
    learned.pass_by(Costs.FORGOTTEN)
    learned.observe(learned.drafting(Plan(1, "model")), 5.0)  # a draft that catches up
    assert learned["model", "first"] < 3


def test_a_check_of_fewer_rows_takes_no_longer_than_one_of_more():
    """So a time that says so is not believed. A guess, or a draft's time, says nothing of that."""
    costs = Costs({1: 20.0, 4: 9.0, 8: 30.0, 16: 5.0}, {1: 25.0}, {"model": (1.0, 1.0)}, plain=40.0)
    costs.seen[costs.number["verify", 16]] = 0
    believed = dict(zip(costs.number, costs.believed, strict=True))
    expected = dict(zip(costs.number, costs.values, strict=True)) | {("verify", 1): 9.0, ("plain", 1): 9.0}
    assert believed == expected


def test_guesses_know_how_much_is_read(pair):
    state = make_state(*pair, [random_prompt(600)], ngram=True)
    costs, longer = (guess(state.hierarchy, PADDED, [length]) for length in (600, 6000))
    assert set(costs.sources) == {"model", "ngram"} and not costs.seen.any()
    assert [costs.step("verify", rows) for rows in (1, 4, 5)] == [("verify", rows) for rows in (4, 4, 8)]
    config, more = state.target.config, (longer["verify", 8] - costs["verify", 8]) / 1.56
    assert more == pytest.approx(5400 * config.kv_elements_per_token * 4 / 2e7)
    assert longer["model", "first"] == costs["model", "first"] and costs["retrieval", 3] < costs["verify", 8]
    layers = [LAYER_ON_CPU * model.config.n_layer for model in pair]
    assert costs["verify", 8] / 1.56 > layers[0] < costs["retrieval", 3]
    assert costs["model", "first"] > layers[1] and costs["ngram", "first"] < 0.01
    plain = guess(state.hierarchy, Padding(False, True), [600])["plain", 1]
    assert plain == pytest.approx(costs["verify", 8] / 1.56, rel=0.01)
    alone = guess(state.hierarchy, Padding(False, False), [600])
    assert [alone.step("verify", rows)[1] for rows in range(1, 9)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_ranks_can_tell_each_other():
    learned = true()
    learned.observe(learned.checking(Plan()), 30.0)
    told = pickle.loads(pickle.dumps(learned))
    for costs in (learned, told):
        costs.observe(costs.checking(Plan()), 40.0)
    assert told.values.tolist() == learned.values.tolist() and told.number == learned.number


def test_a_second_text_begins_with_what_the_first_learned(pair):
    """In another State, too; and with its acceptance rates. Not so texts of other lengths."""
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
