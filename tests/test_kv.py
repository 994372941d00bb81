"""What a target's cache gives away and takes back: positions, wherever they lie. Of the caches of triforce/cache."""

import torch
from conftest import make_state, random_prompt, run_rounds

PROMPTS = [random_prompt(150), random_prompt(90, seed=1)]


def used(pair, **settings):
    """A DecodeBatch whose rows have flushed, and whose tails are partly filled."""
    state = make_state(*pair, PROMPTS, sampling={"temperature": 0.8}, **settings)
    run_rounds(state, 40)
    assert state.num_flushes >= 4
    return state


def test_slots_of_the_tail_are_moved_several_at_once(pair):
    """All are read before any is written."""
    cache = used(pair).cache
    before = [kv.clone() for kv in cache.tail.kv]
    cache.tail.move(torch.tensor([[3, 4, 9], [0, 1, 2]]), torch.tensor([[2, 3, 4], [0, 1, 2]]))
    for kv, old in zip(cache.tail.kv, before, strict=True):
        assert torch.equal(kv[:, 0, :, 2:5], old[:, 0, :, [3, 4, 9]]) and torch.equal(kv[:, 1], old[:, 1])


def test_positions_are_read_across_the_border_of_the_tail(pair):
    cache = used(pair).cache
    for row, border in enumerate(cache.lens):
        for start, stop in ((0, 8), (border - 8, border), (border - 5, border + 7), (border, border + 9),
                            (border + 3, border + 9)):
            here = [cache.prefix.k[1][row, :, at] if at < border else cache.tail.kv[1][0, row, :, at - border]
                    for at in range(start, stop)]
            assert torch.equal(torch.stack(here, 1), cache.load(1, row, start, stop)[0])
