"""What runs beside the reading of weights: it goes through all that an answer runs, and nothing depends on it."""

import threading
import weakref
from dataclasses import replace

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt

import triforce
from triforce import warm_up
from triforce.config import Settings
from triforce.model import ModelConfig
from triforce.state import State

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TARGET, DRAFT = ModelConfig(512, 64, 4, 4, 2, 16, 128), ModelConfig(480, 32, 2, 2, 2, 16, 64)
BLANK = [{}, {"retrieval": False}, {"sampling": "coupled"}, {"sampling": "coupled", "tree_size": 16}, {"gamma": 4},
         {"draft_cache": "snapkv"}, {"draft": "ngram"}]


@pytest.mark.parametrize("draft", [DRAFT, None], ids=["draft", "no-draft"])
@pytest.mark.parametrize("options", BLANK, ids=str)
def test_it_goes_through_every_plan_and_leaves_nothing(monkeypatch, options, draft):
    settings = Settings(**options).resolve(CPU, has_model=draft is not None, query_group=2)
    rounds, real = [], State.round
    monkeypatch.setattr(State, "round", lambda state, plan: rounds.append(plan) or real(state, plan))
    state = warm_up.warm_up(TARGET, draft, settings, torch.float32, CPU, 2000)
    assert state.lens[0] >= state.prompt_end[0] + len(rounds) and state.target.config.n_layer == 1
    drafters = {plan.drafter for plan in rounds}
    expected = {"model": draft is not None, "ngram": settings.ngram, "retrieval": settings.retrieval}
    assert drafters == {None, *(name for name, drafts in expected.items() if drafts)}
    assert not settings.retrieval or state.hierarchy.view.num_rebuilds == state.hierarchy.view.renews
    gone = weakref.ref(state)
    del state
    assert gone() is None  # at once: the weights need the memory


def started(monkeypatch, free=64 * 2**30, target=TARGET, device=GPU):
    """Whether it begins, and the thread in which it does."""
    ran = []
    monkeypatch.setattr(warm_up.memory, "available", lambda device: free)
    monkeypatch.setattr(warm_up, "warm_up", lambda *args: ran.append(threading.current_thread()))
    thread = warm_up.begin(target, DRAFT, Settings().resolve(CPU), torch.float16, device, 2**30)
    if thread is not None:
        thread.join()
    assert ran == [thread] * (thread is not None)
    return thread


def test_it_begins_on_one_gpu_with_room(monkeypatch):
    assert started(monkeypatch).daemon
    for other in ({"device": CPU}, {"free": 8 * 2**30}, {"free": None}, {"target": replace(TARGET, num_shards=2)}):
        assert started(monkeypatch, **other) is None


def test_what_goes_wrong_in_it_is_nobody_s_trouble(monkeypatch, capsys, caplog):
    monkeypatch.setattr(warm_up, "warm_up", lambda *args: 1 / 0)
    warm_up._quietly()
    assert not caplog.records and not any(capsys.readouterr())


def test_the_first_call_waits_for_it(monkeypatch):
    goes_on, begun = threading.Event(), []
    thread = threading.Thread(target=goes_on.wait, args=(20,), daemon=True)
    monkeypatch.setattr(warm_up, "begin", lambda *args: thread.start() or thread)
    for name in ("prefill", "prefill_all"):
        real = getattr(State, name)
        monkeypatch.setattr(State, name, lambda state, *args, real=real, **more: begun.append(thread.is_alive()) or
                            real(state, *args, **more))
    engine = triforce.load("tiny", device="cpu")
    assert thread.is_alive()
    timer = threading.Timer(0.5, goes_on.set)
    timer.start()
    engine.generate("It was a dark night", 4)
    assert begun and not any(begun) and engine.caches.warming is None


def test_a_document_waits_for_it():
    engine = make_engine(*random_pair())
    done = []
    engine.caches.warming = threading.Timer(0.3, done.append, [1])
    engine.caches.warming.start()
    engine.prefill(random_prompt(100))
    assert done and engine.caches.warming is None
