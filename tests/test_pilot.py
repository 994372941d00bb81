"""When the pilot learns and chooses: while the device works, and all ranks by the first one's clock."""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_state, random_pair, random_prompt

from triforce.decode.controller import Controller
from triforce.decode.pilot import Pilot
from triforce.decode.plan import AUTOREGRESSION, PADDED, DraftPlan, Padding
from triforce.decode.verifier import Verifier


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
        chosen = state.pilot._next or DraftPlan(padded=state.pilot.padding.plain)
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
    monkeypatch.setattr(Verifier, "is_recorded", is_recorded)
    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    state.rewind(60, None, Padding(plain=False))
    plans, padded = state.pilot.controller.plans, is_recorded and drafts
    monkeypatch.setattr(Controller, "choose", lambda self, **known: plans[drafts])
    assert plans[0].gamma == 0 < plans[1].gamma
    state.round()
    outer = state.hierarchy.outer
    assert state.last_round.plan == DraftPlan(padded=padded)
    assert outer.num_rows == (outer.row_unit if padded else 1)
    state.pilot.learn()
    costs = state.pilot.controller.costs
    [shown] = [part for part, seen in zip(costs.number, costs.seen, strict=True) if seen]
    assert shown == (("verify", outer.num_rows) if padded else ("plain", 1))
    state.round()
    assert state.last_round.plan == plans[drafts]


def test_the_last_round_of_a_text_is_learned_from(pair):
    state = make_state(*pair, [random_prompt(100)], auto=True, gamma=3)
    state.round()
    assert not state.pilot.controller.costs.seen.any()
    state.pilot.learn()
    assert state.pilot.controller.costs.seen.any()


def test_ranks_learn_from_the_first_ones_times_and_only_of_the_same_generation():
    """One process that plays two ranks: both say the same, and the first has another clock."""
    target, draft = random_pair()
    told = []

    def all_gather(own):
        first = own.clone()
        first[:, -2:] = torch.where(own[:, -2:] > 0, 7_000_000, 0)  # microseconds
        told.append(first[0, -1].item())
        return torch.cat([first, own])

    target.group = SimpleNamespace(rank=0, size=2, all_gather=all_gather, agree=lambda value: value)
    state = make_state(target, draft, [random_prompt(100)], auto=True, ngram=True)
    for padding in (PADDED, Padding(False, False), PADDED):  # each has plans of its own
        state.rewind(200, padding=padding)
        told.clear()
        for _ in range(12):
            state.round()
        assert told[0] == 0 and all(told[1:])  # nothing is told of the round before the first
        assert state.pilot.controller.costs.values.max() > 5_000  # seven seconds, by the first rank's clock


def test_what_looking_up_brings_is_the_mean_of_the_rows(pair, monkeypatch):
    """Of those that have not ended."""
    quotes, new = random_prompt(50) * 4, random_prompt(200, seed=1)
    state, told = make_state(*pair, [quotes, new], auto=True, ngram=True), []
    monkeypatch.setattr(Controller, "choose", lambda self, remaining, ngram: told.append(ngram) or self.plans[0])
    pilot = state.pilot
    both, most = [meter.emitted(state.hierarchy.outer.rows) for meter in pilot.meters], state.hierarchy.outer.rows
    pilot._best()
    assert both[0][most] > both[1][most] + 1
    assert told[-1] == pytest.approx([(a + b) / 2 for a, b in zip(*both, strict=True)])
    pilot.close_row(1)
    pilot._best()
    assert told[-1] == both[0]


def test_ranks_begin_with_the_first_ones_guess():
    """A rank that has no draft guesses otherwise than the others, and must not choose by that."""
    target, draft = random_pair()
    first = {}

    def agree(value):
        if value is None:
            return None
        costs, rates = value
        costs.values *= 2
        first["costs"] = costs
        return costs, rates

    target.group = SimpleNamespace(rank=1, size=2, all_gather=lambda own: torch.cat([own, own]), agree=agree)
    state = make_state(target, draft, [random_prompt(100)], auto=True)
    assert state.pilot.controller.costs is first["costs"]
