"""The target over its view alone: benchmarks/lossy.py."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import make_engine, random_prompt

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from lossy import ViewEngine, lend  # noqa: E402

KINDS = ("retrieval", "streaming", "snapkv")
PROMPT, NEW = 150, 40  # tokens; over two flushes and more


@pytest.fixture(scope="module")
def base():
    from conftest import random_pair

    return make_engine(random_pair()[0], flush_interval=16, chunk_size=4, budget=64, reuse=False)


def full(base, number: int = 0, law: dict | None = None) -> list[int]:
    """Of the full cache, after prompt `number`; greedy without a law."""
    law = law or {"temperature": 0.0}
    how = {"speculate": False, "one_row": law["temperature"] > 0}
    return base.generate(random_prompt(PROMPT, number), NEW, **law, **how).tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_all_tokens_loses_nothing(base, kind):
    whole, small = ([ViewEngine(base, kind, budget).generate(random_prompt(PROMPT, number), NEW, temperature=0.0)
                     for number in range(2)] for budget in (256, 64))
    assert [one.tokens for one in whole] == [full(base, number) for number in range(2)]
    assert [one.tokens for one in small] != [one.tokens for one in whole]
    assert all(one.stats.flushes >= 2 and one.stats.retrieval_rebuilds == 0 for one in whole)


def test_where_the_law_is_the_same_a_seed_draws_the_same(base):
    """Noise is keyed as at the full level, so that drawn answers can be compared, too; and a prompt may be lent."""
    law, ids = {"temperature": 0.8, "seed": 3}, random_prompt(PROMPT)
    expected, engine = full(base, law=law), ViewEngine(base, "retrieval", 256)
    assert engine.generate(ids, NEW, **law).tokens == expected
    document = lend(base, ids, engine, 20)
    lent = engine.generate(ids[len(document) :], NEW, prefix=document, **law)
    assert lent.tokens == expected and lent.stats.shared_tokens == len(document) > 0


def test_later_tokens_see_keys_and_values_that_were_computed_over_the_view(base):
    """At their positions, in the tail and, flushed, in the prefix. Those of the first layer depend on the token alone;
    those of the second on what the view showed."""
    engine, ids = ViewEngine(base, "retrieval", 64), random_prompt(PROMPT)
    tokens = engine.generate(ids, NEW, temperature=0.0).tokens
    base.generate(ids + tokens, 1, temperature=0.0, speculate=False)
    lossy, exact = engine.buffers.state.cache, base.buffers.state.cache
    start, stop = PROMPT, PROMPT + NEW - 1  # the last token is pending
    assert start < lossy.lens[0] < stop  # some are flushed, some are not
    first, second = ([cache.load(i, 0, start, stop) for cache in (lossy, exact)] for i in (0, 1))
    torch.testing.assert_close(*first)
    assert (second[0] - second[1]).abs().amax(dim=(0, 1, 3)).min() > 1e-4  # at every position
    before = [cache.load(1, 0, 0, PROMPT - 1) for cache in (lossy, exact)]
    torch.testing.assert_close(*before)  # the prompt is prefilled over all of it
