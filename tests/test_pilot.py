"""When the pilot learns and chooses: while the device works."""

import time

import pytest
from conftest import make_state, random_prompt

from triforce.controller import Controller
from triforce.costs import Shelf
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
    assert sum(state.pilot.controller.learned.seen) > 0


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
    """It drafts nothing. What that takes is not taken for the time of a round without speculation. Where no drafts are
    to come, it takes the step of such rounds."""
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
    state.pilot.keep()
    assert state.pilot.controller.learned.seen.any() != padded
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


def test_where_nothing_drafts_few_rounds_are_followed_by_a_choice(pair, monkeypatch):
    """On a CPU, which does nothing beside: after a quarter as many rounds as none has drafted for. All rounds are
    learned from, and a choice comes at once after a draft. A try does not make them frequent again."""
    state, chosen, learned = make_state(*pair, [random_prompt(100)], auto=True, gamma=3, max_new_tokens=400), [], []
    plain, drafts = Plan(padded=state.pilot.padding.plain), Plan(1, "model", padded=state.pilot.padding.drafts)
    update = Controller.update
    monkeypatch.setattr(Controller, "choose", lambda self, **known: chosen.append(len(rounds)) or
                        (drafts if len(rounds) == 62 or 82 <= len(rounds) < 86 else plain))
    monkeypatch.setattr(Controller, "update", lambda *args, **seen: learned.append(1) or update(*args, **seen))
    rounds = []
    for _ in range(90):
        state.round()
        rounds.append(state.last_round.plan)
    waits = {later: later - earlier for earlier, later in zip(chosen, chosen[1:], strict=False)}
    assert [i for i, plan in enumerate(rounds) if plan.gamma] == [62, 82, 83, 84, 85] and len(learned) >= 88
    assert list(waits.values())[:12] == [1, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5, 7]  # up to the 30th
    assert list(waits.items())[12:20] == [(38, 8), (46, 8), (54, 8), (62, 8), (63, 1), (68, 5), (74, 6), (82, 8)]
    assert set(list(waits.values())[20:]) == {1}


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
    kept = []

    class Listening(Shelf):
        def put(self, name, learned):
            kept.append(learned.seen.copy())

    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    state.pilot.shelf = Listening(None)
    state.round()
    assert not state.pilot.controller.learned.seen.any()
    state.pilot.keep()
    assert kept[0].any()


def test_the_controller_is_told_what_is_recorded_and_what_may_come(pair, monkeypatch):
    """Rounds that draft are counted over the texts of a State, whose graphs stay; the tokens that may come are each
    text's own, and as many more as the texts before it had."""
    state, told = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), []
    monkeypatch.setattr(Controller, "choose", lambda self, remaining, **known: (
        told.append((remaining, state.known[0], dict(self.rounds_with))), Plan(3, "model"))[1])
    counted = earlier = 0
    for max_new_tokens in (512, 300, 40):
        told.clear()
        if max_new_tokens < 512:
            state.rewind(max_new_tokens)
        first = state.known[0]
        for _ in range(8):
            state.round()
        assert all(remaining == max_new_tokens - (known - first) + earlier for remaining, known, _ in told)
        assert told[0][2].get("drafts", 0) == counted
        state.pilot.keep()
        counted, earlier = state.pilot._rounds_with["drafts"], earlier + state.known[0] - first
    state.params.set(temperature=0.5, top_p=0.9, top_k=None, min_p=None, seed=[0])
    state.rewind(20)
    assert not state.pilot._rounds_with  # its steps are others
    assert counted > 0 and earlier >= 24


def test_thinking_does_not_count_as_the_rounds_time(pair, monkeypatch):
    state, think = make_state(*pair, [random_prompt(100)], auto=True, gamma=3), Pilot._learn_and_choose
    monkeypatch.setattr(Pilot, "_learn_and_choose", lambda self: (time.sleep(0.3), think(self))[1])
    for _ in range(2):
        state.round()
        assert state.last_round.timing.checking < 250
