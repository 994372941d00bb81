"""What ranks learn of times: all choose by the first one's clock."""

from types import SimpleNamespace

import torch
from conftest import make_state, random_pair, random_prompt

from triforce.decode.plan import PADDED, Padding


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
