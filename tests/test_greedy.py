"""Greedy tokens and logits are the same bits with speculation on and off, for every drafter, budget and gamma. A
promise of the whole library, not of one module."""

import pytest
import torch
from conftest import bits, bits_of_rows, make_state, random_pair, random_prompt, slow

from triforce.decode.plan import AUTOREGRESSION
from triforce.model import Transformer

CONTEXT, NEW = 1050, 112  # the first flush is after 39 tokens, the second after 103
FLUSHED = 70  # tokens that cross the first flush
LEVELS = ("triforce", "retrieval", "query", "snapkv", "streaming", "draft", "ngram", "ngram only")
VARIANTS = [(levels, 256, 6) for levels in LEVELS] + [("triforce", 512, 3), ("triforce", 256, 1)]
VARIANTS += slow(*((levels, 512, 3) for levels in LEVELS[1:]), ("draft", 256, 1))


@pytest.fixture(scope="module")
def models():
    return random_pair(std=0.2)


@pytest.fixture(scope="module")
def plain(models):
    """Without any drafter, in the same padded step."""
    state = make_state(models[0], None, [random_prompt(CONTEXT)], retrieval=False, capacity=4096,
                       flush_interval=64)
    return bits(state, NEW)[:2]


@pytest.mark.parametrize("levels,budget,gamma", VARIANTS)
def test_bits_do_not_depend_on_drafting(models, plain, levels, budget, gamma):
    target, draft = models
    state = make_state(target, draft if levels in ("triforce", "draft") else None, [random_prompt(CONTEXT)],
                       capacity=4096, retrieval=levels not in ("draft", "ngram only"), ngram="ngram" in levels,
                       draft_cache=levels if levels in ("query", "snapkv", "streaming") else None,
                       budget=budget, gamma=gamma, chunk_size=8, flush_interval=64,
                       rebuild_interval=32)
    tokens, hashes, rejected, offsets = bits(state, NEW)
    assert (tokens, hashes) == plain
    assert min(rejected.get(name, 20) for name in ("full", "retrieval")) >= (20 if levels == "triforce" else 0)
    assert rejected["full"] >= (20 if levels != "ngram only" else 1)
    assert state.num_flushes >= 2
    if levels == "triforce":  # rounds began where a block may cross a flush position; below, at every such place
        assert len(set(range(64 - 7, 64)) & offsets) >= 5
    if state.hierarchy.view is not None:
        assert state.hierarchy.view.num_rebuilds >= 2 or not state.hierarchy.view.kind.renews
    state.rewind(1000)
    assert bits(state, FLUSHED, plan=AUTOREGRESSION)[:2] == tuple(one[:FLUSHED] for one in plain)


def test_blocks_end_at_flush_borders_from_every_offset(models, plain):
    """A block that starts k tokens before a flush position emits at most k, for every k below M."""
    target, draft = models
    border = CONTEXT // 64 * 64
    for shift in range(8):
        prompt = random_prompt(CONTEXT)[: border - 7 + shift]  # of which the last token is pending
        state = make_state(target, draft, [prompt], capacity=4096, flush_interval=64, chunk_size=8, budget=256,
                           )
        on = bits(state, 24)[:2]
        assert state.num_flushes == 1 and state.cache.lens == [border]  # to emit past it is to miss it
        state.rewind(1000)
        assert bits(state, 24, plan=AUTOREGRESSION)[:2] == on


def test_batch_rows_do_not_depend_on_neighbours(models):
    """At a fixed batch size, a row's greedy tokens and logits are the same bits whatever is drafted, and whatever
    stands beside it."""
    target, draft = models

    def state_of(prompts):
        return make_state(target, draft, prompts)

    prompts = [random_prompt(300, seed=1), random_prompt(137, seed=2), [5]]
    state = state_of(prompts)
    on = bits_of_rows(state, 40)
    assert state.hierarchy.outer.totals[:, 1].min() >= 40  # drafted
    assert on == bits_of_rows(state_of(prompts), 40, plan=AUTOREGRESSION)
    others = [prompts[0], random_prompt(137, seed=3), [9]]  # the same lengths, other texts
    assert bits_of_rows(state_of(others), 40)[0] == on[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16, torch.float64)])
@pytest.mark.parametrize("how", [{}, {"draft_cache": "streaming"}], ids=["retrieval", "streaming"])
def test_rows_whose_views_differ_in_length(dtype, how):
    """In these dtypes a view lies apart from the tail on a CPU: one row's is still its whole prefix, and while one row
    has flushed the other has not."""
    target, draft = (Transformer.random(model.config, seed=i, std=0.2, dtype=dtype)
                     for i, model in enumerate(random_pair()))
    prompts = [random_prompt(20), random_prompt(150, seed=1), random_prompt(33, seed=2)]
    sizes = {"budget": 64, "flush_interval": 16, "chunk_size": 4, "gamma": 4}
    on = make_state(target, draft, prompts, **sizes, **how)
    off = make_state(target, None, prompts, **sizes, retrieval=False)
    assert bits_of_rows(on, 40) == bits_of_rows(off, 40)
    assert on.hierarchy.outer.totals[:, 1].min() >= 10 and on.num_flushes >= 6
