"""Which measured time becomes which cost, by clocks that steps set forward; and that measuring leaves no trace."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import make_engine, make_state, random_prompt

from triforce import calibration
from triforce.controller import Costs
from triforce.drafting.model import ModelDrafter
from triforce.drafting.ngram import NgramDrafter
from triforce.plan import PADDED, Padding
from triforce.speculator import Speculator
from triforce.tape import FULL


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds: a verify takes 100 and 1 a row, a retrieval step 10 and 1 a row, the draft's first token 4 and each
    further 3, looking up 0.5."""
    now = [0.0]

    def takes(owner, milliseconds):
        step = owner._step

        def timed(self, *args):
            now[0] += milliseconds(self, *args)
            return step(self, *args)

        monkeypatch.setattr(owner, "_step", timed)

    # The arguments of a step: dense length, longest length, starts, rows, and so on.
    takes(Speculator, lambda self, *args: (100 if self.level == FULL else 10) + args[3])
    takes(ModelDrafter, lambda self, *args: 4 if args[3] > 1 else 3)
    takes(NgramDrafter, lambda self, *args: 0.5)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: now[0] / 1e3))
    return now


def costs_of(pair, padding, draft=True, prompts=1, **settings) -> Costs:
    state = make_state(pair[0], pair[1] if draft else None, [random_prompt(100)] * prompts, gamma=7, gamma_inner=3,
                       auto=True, **settings)
    costs = calibration.measure(state.hierarchy, padding)
    for times in (costs.verify, costs.retrieval):
        for rows, milliseconds in times.items():
            times[rows] = round(milliseconds, 6)
    costs.sources = {name: tuple(round(x, 6) for x in times) for name, times in costs.sources.items()}
    costs.plain = costs.plain and round(costs.plain, 6)
    return costs


@pytest.mark.parametrize("prompts", [1, 3])
def test_each_step_has_its_own_cost(pair, clock, prompts):
    sources = {"model": (4.0, 3.0), "ngram": (0.5, 0.0)}
    # All of the outer level's steps are padded; those that check nothing are not; none are.
    assert costs_of(pair, PADDED, ngram=True, prompts=prompts) == Costs({8: 108}, {4: 14}, sources)
    assert costs_of(pair, Padding(plain=False), ngram=True, prompts=prompts) == Costs(
        {8: 108}, {4: 14}, sources, plain=101)
    assert costs_of(pair, Padding(False, False), ngram=True, prompts=prompts) == Costs(
        {1: 101, 2: 102, 3: 103, 4: 104, 6: 106, 8: 108}, {1: 11, 2: 12, 3: 13, 4: 14}, sources)


def test_levels_that_are_not_there_have_no_cost(pair, clock):
    assert costs_of(pair, PADDED, retrieval=False) == Costs({8: 108}, {}, {"model": (4.0, 3.0)})
    assert costs_of(pair, PADDED, draft=False) == Costs({8: 108}, {1: 11})
    assert costs_of(pair, PADDED, draft=False, retrieval=False, ngram=True) == Costs(
        {8: 108}, {}, {"ngram": (0.5, 0.0)})


def test_a_call_is_timed_by_its_fastest_repetition_and_a_slow_one_once(clock):
    """On a CPU, where other work only adds."""
    for times, expected, count in (([9.0, 5.0, 3.0, 4.0, 6.0, 7.0], 3.0, 6), ([400.0, 301.0, 1.0], 301.0, 2)):
        left = list(times)

        def call(left=left):
            clock[0] += left.pop(0)

        assert calibration.milliseconds(call, torch.device("cpu")) == pytest.approx(expected)
        assert len(times) - len(left) == count


VERIFY, RETRIEVAL, DRAFT = 20.0, 5.0, 0.5  # milliseconds of a pass; a row adds a tenth


class Timed:
    """A state, and a clock that its models' passes move. The retrieval level runs a copy of the target, so that each
    level's passes can be told apart."""

    def __init__(self, pair, monkeypatch, verify=VERIFY, **settings):
        target, draft = (copy.deepcopy(model) for model in pair)
        self.now, self.passes = 0.0, {"target": 0, "view": 0, "draft": 0}
        drafting = copy.deepcopy(target)
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self.now / 1e3))
        self.state = make_state(target, draft, [random_prompt(100)], drafting=drafting, **settings)
        for name, model, cost in (("target", target, verify), ("view", drafting, RETRIEVAL), ("draft", draft, DRAFT)):
            model.register_forward_pre_hook(lambda _, args, name=name, cost=cost: self.take(name, cost, args[0]))

    def take(self, name, cost, tokens):
        self.passes[name] += 1
        hiccup = 1000.0 if self.passes[name] % 4 == 3 else 0.0  # other work on the machine
        self.now += cost + 0.1 * tokens.shape[1] + hiccup


def test_each_step_has_its_own_price(pair, monkeypatch):
    costs = calibration.measure(Timed(pair, monkeypatch, gamma=7, gamma_inner=3).state.hierarchy, PADDED)
    assert costs.verify == pytest.approx({8: VERIFY + 0.8}) and costs.plain is None
    assert costs.retrieval == pytest.approx({4: RETRIEVAL + 0.4})
    first, further = costs.sources["model"]
    assert first == pytest.approx(DRAFT + 0.4) and further == pytest.approx(DRAFT + 0.1)  # 4 rows, then 1


def test_where_rows_cost_several_sizes_are_timed(pair, monkeypatch):
    timed = Timed(pair, monkeypatch, gamma=7, gamma_inner=3)
    costs = calibration.measure(timed.state.hierarchy, Padding(False, False))
    assert costs.verify == pytest.approx({rows: VERIFY + rows / 10 for rows in (1, 2, 3, 4, 6, 8)})
    assert costs.retrieval == pytest.approx({rows: RETRIEVAL + rows / 10 for rows in (1, 2, 3, 4)})


def test_slow_steps_are_timed_once(pair, monkeypatch):
    passes = []
    for verify in (VERIFY, 2 * calibration.SLOW):
        timed = Timed(pair, monkeypatch, verify=verify)
        calibration.measure(timed.state.hierarchy, PADDED)
        passes.append(timed.passes["target"])
    assert passes == [1 + calibration.REPEATS, 2]


@pytest.mark.parametrize("settings", [{}, {"retrieval": False}])
def test_measuring_leaves_no_trace(pair, settings):
    """Neither in what is said and drafted from then on, nor in the statistics."""
    states = [make_state(*pair, [random_prompt(100)], sampling={"temperature": 0.8}, **settings) for _ in range(2)]
    for turn in range(30):
        if turn in (3, 11):
            calibration.measure(states[0].hierarchy, PADDED)
        assert states[0].round() == states[1].round()
        rates = [state.hierarchy.acceptance_rates() for state in states]
        assert rates[0] == rates[1]


def test_steps_are_timed_once_for_a_length_if_that_is_worth_it(pair):
    """Not for a few tokens; then once; and again for a text that is 4,096 tokens longer."""
    target, draft = pair
    engine = make_engine(target, draft, flush_interval=16, chunk_size=4, gamma="auto", budget=64, max_seq_len=6000)
    timing = [engine.generate(random_prompt(length), count, temperature=0.0).stats.timing
              for length, count in ((200, 12), (200, 40), (300, 40), (4300, 40), (4400, 40))]
    assert [seconds > 0 for seconds in timing] == [False, True, False, True, False]
