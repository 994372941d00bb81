"""What an engine plans for a call: the budget, buffers that fit it, the ids that it takes; and how far it has come.

Of engine.py.
"""


import pytest
from conftest import make_engine, random_pair, random_prompt

from triforce.engine.engine import Engine
from triforce.errors import UserError
from triforce.model import ModelConfig, Transformer


def engine_of(pair, **more) -> Engine:
    return make_engine(pair[0], pair[1], flush_interval=16, chunk_size=4, **more)


@pytest.mark.parametrize("offload, budgets", [
    (False, {10: 1024, 16_384: 1024, 40_000: 1280, 65_536: 2048, 120_000: 3840, 10**6: 4096}),
    (True, {10: 1024, 16_384: 1024, 40_000: 2560, 65_536: 4096, 120_000: 7680, 10**6: 8192})])
def test_the_default_budget_is_a_share_of_the_prompt(pair, offload, budgets):
    engine = engine_of(pair, offload=offload)
    assert {length: engine.resolve_budget(length) for length in budgets} == budgets
    alone = engine_of(pair, retrieval=False, draft_cache="snapkv")  # a draft model has a view for each row
    assert alone.resolve_budget(10**6, sharing=8) == alone.resolve_budget(10**6) > 0
    for rows in (2, 8):  # that read one view of what they share
        assert {length: engine.resolve_budget(length, sharing=rows) // 2 for length in budgets} == budgets


def test_budgets_that_are_given(pair):
    assert engine_of(pair, budget=64).resolve_budget(10**6) == engine_of(pair, budget=64).resolve_budget(
        10**6, sharing=8) == 64
    engine = engine_of(pair, budget=0.25)
    assert [engine.resolve_budget(length) for length in (8, 1000, 1001, 10_000)] == [24, 252, 252, 2500]
    assert make_engine(pair[0], retrieval=False).resolve_budget(1000) == 0
    for budget in (5000, 0.9):  # no more than a row has room for, in whole chunks
        settings = make_engine(*pair, budget=budget).settings
        chunk = settings.chunk_size
        assert settings.view_tokens(5000, room=1001) == -(-1001 // chunk) * chunk < settings.view_tokens(5000)


def test_ids_that_the_draft_does_not_know_are_refused(pair):
    small = Transformer.random(ModelConfig(40, 16, 1, 2, 2, 8, 32), seed=1, std=0.3)
    engine = engine_of((pair[0], small), budget=64)
    assert engine.vocab_size == 40
    with pytest.raises(UserError, match="token id 50 is outside the vocabulary of 40"):
        engine.generate([1, 50], 4)
    tokens = engine.generate(random_prompt(50, vocab_size=40), 60, temperature=3.0, top_p=1.0).tokens
    assert len(tokens) == 60 and max(tokens) < 40


def test_the_progress_of_a_batch(pair):
    engine = engine_of(random_pair(), budget=64, max_batch_size=2)
    shares = []
    engine.generate([random_prompt(100), random_prompt(200)], 4, on_prefill=shares.append)
    assert shares == sorted(set(shares)) and shares[-1] == 1 and 0.5 in shares and 0 < shares[0] <= 0.5
