"""What runs beside the reading of weights: it goes through all that an answer runs, and nothing depends on it."""

import threading
import weakref

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt, slow

from triforce.config import Settings
from triforce.decode.batch import DecodeBatch
from triforce.engine import warm_up
from triforce.model import ModelConfig

CPU = torch.device("cpu")
TARGET, DRAFT = ModelConfig(512, 64, 4, 4, 2, 16, 128), ModelConfig(480, 32, 2, 2, 2, 16, 64)


@pytest.mark.parametrize("draft", [DRAFT, None], ids=["draft", "no-draft"])
@pytest.mark.parametrize("options", [{}, {"retrieval": False}, *slow({"sampling": "coupled", "tree_size": 16}),
                                     {"draft": "ngram"}, *slow({"draft_cache": "snapkv"})], ids=str)
def test_it_goes_through_every_plan_and_leaves_nothing(monkeypatch, options, draft):
    settings = Settings(**options).resolve(CPU, has_model=draft is not None, query_group=2)
    plans, real = [], DecodeBatch.round
    monkeypatch.setattr(DecodeBatch, "round", lambda state, plan: plans.append(plan) or real(state, plan))
    state = warm_up.warm_up(TARGET, draft, settings, torch.float32, CPU, 2**30, length=2000)
    expected = {"model": draft is not None, "ngram": settings.ngram, "retrieval": settings.retrieval}
    assert {plan.drafter for plan in plans} == {None, *(name for name, drafts in expected.items() if drafts)}
    assert state.lens[0] >= 1900 and state.target.config.n_layer == 1
    assert not settings.retrieval or state.hierarchy.view.num_rebuilds == state.hierarchy.view.kind.renews
    gone = weakref.ref(state)
    del state
    assert gone() is None  # at once: the weights need the memory


@pytest.mark.parametrize("what", ["prefill", "open", "logits", "rows"])
def test_whatever_takes_time_or_memory_waits_for_it(what, tmp_path, monkeypatch):
    engine, path, ids = make_engine(*random_pair()), tmp_path / "a.prefix", random_prompt(100)
    engine.prefill(ids).save(path)
    rows = engine.buffers.rows
    monkeypatch.setattr(engine.buffers, "rows", lambda *args: seen.append(bool(done)) or rows(*args))
    calls = {"prefill": lambda: engine.prefill(ids), "open": lambda: engine.open(path),
             "logits": lambda: engine.logits([ids]), "rows": lambda: engine.generate(ids, 2)}
    done, seen = [], []
    engine.warming = threading.Timer(0.3, done.append, [1])
    engine.warming.start()
    calls[what]()
    assert done and engine.warming is None and all(seen) and bool(seen) == (what == "rows")
