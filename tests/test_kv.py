"""What the stores of keys and values give away and take back: `state_dict`, and positions wherever they lie.

Of triforce/kv/ as a whole.
"""

import pytest
import torch
from conftest import make_state, random_prompt, run_rounds

PROMPTS = [random_prompt(150), random_prompt(90, seed=1)]
KINDS = [{}, {"num_resident_layers": 1, "piece_tokens": 48}, {"draft_cache": "snapkv"}]


def used(pair, **settings):
    """A State whose rows have flushed, and whose tails are partly filled."""
    state = make_state(*pair, PROMPTS, sampling={"temperature": 0.8}, **settings)
    run_rounds(state, 40)
    assert state.num_flushes >= 4
    return state


def stores(state) -> list:
    return [state.cache, state.cache.prefix, state.hierarchy.view]


@pytest.mark.parametrize("settings", KINDS)
def test_a_saved_cache_is_loaded_whole(pair, settings):
    """Into a State that held something else: tensors, lengths on the host and on the device, and what was selected."""
    first, second = used(pair, **settings), make_state(*pair, [random_prompt(20, seed=8), [5]], **settings)
    assert second.hierarchy.view.selected == [False, False]
    for store, other in zip(stores(first), stores(second), strict=True):
        saved = {name: tensor.clone() for name, tensor in store.state_dict().items()}
        assert saved["lens"].tolist() == store.lens and any(length > 0 for length in store.lens)
        if store is not first.cache:
            other.own_len.fill_(-1)
        other.load_state_dict(saved)
        assert other.lens == store.lens
        if store is not first.cache:
            assert other.len.tolist() == store.lens and other.own_len.tolist() == store.own_len.tolist()
        loaded = other.state_dict()
        assert loaded.keys() == saved.keys()
        for name, tensor in saved.items():
            assert torch.equal(loaded[name], tensor), name
    assert second.cache.prefix.len.tolist() == first.cache.lens
    assert second.hierarchy.view.selected == first.hierarchy.view.selected == [True, True]
    for row, length in enumerate(first.lens):
        for i in range(first.target.config.n_layer):
            kv = [state.cache.load(i, row, 0, length) for state in (first, second)]
            assert torch.equal(*kv) and kv[0].shape[2] == length and kv[0].abs().sum() > 0


def test_positions_are_read_and_written_across_the_border_of_the_tail(pair):
    cache = used(pair).cache
    for row, border in enumerate(cache.lens):
        for start, stop in ((0, 8), (border - 8, border), (border - 5, border + 7), (border, border + 9),
                            (border + 3, border + 9)):
            kv = torch.randn(2, 2, stop - start, 8)
            around = [cache.load(1, row, a, b).clone() for a, b in ((max(start - 2, 0), start), (stop, stop + 2))]
            cache.store(1, row, start, kv)
            assert torch.equal(cache.load(1, row, start, stop), kv)
            for place, (a, b) in zip(around, ((max(start - 2, 0), start), (stop, stop + 2)), strict=True):
                assert torch.equal(cache.load(1, row, a, b), place)
            here = [cache.prefix.k[1][row, :, at] if at < border else cache.tail.kv[1][0, row, :, at - border]
                    for at in range(start, stop)]
            assert torch.equal(torch.stack(here, 1), kv[0])
