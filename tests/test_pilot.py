"""When the pilot learns and chooses: while the device works."""

import time

import pytest
from conftest import make_state, random_prompt

from triforce.controller import Controller
from triforce.pilot import Pilot
from triforce.plan import AUTOREGRESSION, Padding, Plan
from triforce.speculator import Speculator


def test_a_round_is_learned_from_and_the_next_one_chosen_while_the_device_works(pair, monkeypatch):
    """Between the verify that is enqueued and the host's read."""
    state, order = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), []
    state.pilot._on_cpu = False
    outer, think = state.hierarchy.outer, Pilot.think
    check, read = outer.check, outer.outbox.read
    monkeypatch.setattr(outer, "check", lambda *args: (order.append("check"), check(*args))[1])
    monkeypatch.setattr(outer.outbox, "read", lambda: (order.append("read"), read())[1])
    monkeypatch.setattr(Pilot, "think", lambda self: (order.append("think"), think(self))[1])
    for _ in range(6):
        [chosen, *_] = state.pilot._planned or [Plan(padded=state.pilot.padding.plain)]
        state.round()
        assert state.last_round.plan is chosen or state.last_round.plan == AUTOREGRESSION
    assert order == ["check", "think", "read"] * 6
    assert state.pilot.controller.costs.seen.any()


def test_on_a_cpu_a_choice_knows_the_last_round(pair, monkeypatch):
    """Nothing goes on beside it there."""
    state, rounds, known = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), [], []
    monkeypatch.setattr(Controller, "timed", lambda self, plan, *times: rounds.append(plan))
    monkeypatch.setattr(Controller, "choose", lambda self, **kwargs: known.append(len(rounds)) or self.plans[1])
    for _ in range(6):
        state.round()
    assert known == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_recorded,drafts", [(True, True), (True, False), (False, True)])
def test_where_steps_are_recorded_the_first_round_takes_the_step_that_checks_drafts(pair, is_recorded, drafts,
                                                                                    monkeypatch):
    """It drafts nothing. What that takes is taken for the time of a verify. Where no drafts are to come, it takes the
    step of such rounds."""
    monkeypatch.setattr(Speculator, "is_recorded", is_recorded)
    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    state.rewind(60, None, Padding(plain=False))
    plans, padded = state.pilot.controller.plans, is_recorded and drafts
    monkeypatch.setattr(Controller, "choose", lambda self, **known: plans[drafts])
    assert plans[0].gamma == 0 < plans[1].gamma
    state.round()
    outer = state.hierarchy.outer
    assert state.last_round.plan == Plan(padded=padded)
    assert outer.num_rows == (outer.row_unit if padded else 1)
    state.pilot.learn()
    costs = state.pilot.controller.costs
    [shown] = [part for part, seen in zip(costs.number, costs.seen, strict=True) if seen]
    assert shown == (("verify", outer.num_rows) if padded else ("plain", 1))
    state.round()
    assert state.last_round.plan == plans[drafts]


def test_what_the_first_rounds_follow_is_known_before_them(pair, monkeypatch):
    """So their steps can be recorded beside the prefill. The controller is asked once."""
    monkeypatch.setattr(Speculator, "is_recorded", True)
    state, asked = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), []
    state.pilot._on_cpu = False
    monkeypatch.setattr(Controller, "choose", lambda self, **known: asked.append(known) or self.plans[1])
    state.pilot.ahead()
    state.rewind(50)  # broken off before a round: the next text is still the first
    asked.clear()
    ahead = state.pilot.ahead()
    followed = []
    for count in (1, 2):
        state.round()
        followed.append(state.last_round.plan)
        assert len(asked) == count  # in the second round, for the third
    assert followed == ahead == [Plan(padded=True), state.pilot.controller.plans[1]]
    for plan in (AUTOREGRESSION, Plan(2, "model")):
        state.rewind(50, plan)
        assert state.pilot.ahead() == [plan]


def test_a_new_text_begins_with_a_plan_of_its_own(pair):
    """And learns nothing from the last round of the text before."""
    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    for _ in range(4):
        state.round()
    state.pilot._planned = [Plan(3, "model")]
    state.rewind(400, AUTOREGRESSION)
    assert state.round() and state.last_round.plan == AUTOREGRESSION
    state.rewind(400)
    assert not state.pilot._unseen


def test_the_last_round_of_a_text_is_learned_from(pair):
    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    state.round()
    assert not state.pilot.controller.costs.seen.any()
    state.pilot.learn()
    assert state.pilot.controller.costs.seen.any()


def test_the_controller_is_told_what_may_come(pair, monkeypatch):
    """The tokens that may come are each text's own, and as many more as the texts before it had. What others learned
    counts for texts of the same settings only, whose recorded steps are the same."""
    state, told = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), []
    monkeypatch.setattr(Controller, "choose", lambda self, remaining, **known: (
        told.append((remaining, state.known[0])), Plan(3, "model"))[1])
    earlier = 0
    for max_new_tokens in (512, 300, 40):
        told.clear()
        if max_new_tokens < 512:
            state.rewind(max_new_tokens)
        first = state.known[0]
        for _ in range(8):
            state.round()
        assert told and all(remaining == max_new_tokens - (known - first) + earlier for remaining, known in told)
        state.pilot.learn()
        earlier += state.known[0] - first
    assert earlier >= 24 and state.pilot.controller.costs.seen.any()
    state.params.set(temperature=0.5, top_p=0.9, top_k=None, min_p=None, seed=[0])
    state.rewind(20)
    assert not state.pilot.controller.costs.seen.any()


def test_thinking_does_not_count_as_the_rounds_time(pair, monkeypatch):
    state, learn = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), Pilot.learn
    monkeypatch.setattr(Pilot, "learn", lambda self: (time.sleep(0.3), learn(self))[1])
    for _ in range(2):
        state.round()
        assert state.last_round.timing.checking < 250
