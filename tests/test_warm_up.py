"""What runs beside the reading of weights: it goes through all that an answer runs, and nothing depends on it."""

import contextlib
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt

import triforce
from triforce import warm_up
from triforce.config import Settings
from triforce.float8 import Float8
from triforce.graphs import SPARE
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
    state = warm_up.warm_up(TARGET, draft, settings, torch.float32, CPU, 2**30, length=2000)
    assert state.lens[0] >= state.prompt_end[0] + len(rounds) and state.target.config.n_layer == 1
    drafters = {plan.drafter for plan in rounds}
    expected = {"model": draft is not None, "ngram": settings.ngram, "retrieval": settings.retrieval}
    assert drafters == {None, *(name for name, drafts in expected.items() if drafts)}
    # More rounds of the retrieval level, and more than two drafted tokens, run nothing else.
    for plan in rounds:
        if plan.retrieval:
            assert plan.rounds == 1 and plan.gamma_inner == (0 if plan.source is None else min(settings.gamma_inner, 2))
    assert not settings.retrieval or state.hierarchy.view.num_rebuilds == state.hierarchy.view.kind.renews
    gone = weakref.ref(state)
    del state
    assert gone() is None  # at once: the weights need the memory


def stream_of(device):
    return SimpleNamespace(device=device, used=contextlib.nullcontext)


def started(monkeypatch, target=TARGET, draft=DRAFT, device=GPU, weight_bytes=2**30):
    """Whether it begins; with how many free bytes, and rows of questions."""
    ran = []
    monkeypatch.setattr(warm_up.memory, "available", lambda device: 20 * 2**30)
    monkeypatch.setattr(warm_up, "warm_up", lambda *args: ran.append(args[-2:]))
    thread = warm_up.begin(target, draft, Settings().resolve(CPU), torch.float16, stream_of(device), weight_bytes)
    if thread is not None:
        thread.join()
        assert not thread.daemon  # or else Python would end it in a call of PyTorch's, and the process with it
    return ran


def test_it_begins_on_a_gpu(monkeypatch):
    assert started(monkeypatch) == [(19 * 2**30 - SPARE, 0)] == started(monkeypatch, draft=None)
    assert started(monkeypatch, weight_bytes=10 * 2**30) == [(10 * 2**30 - SPARE, 2)]
    fp8 = replace(TARGET, float8=Float8(0, 0))
    for other in ({"device": CPU}, {"target": fp8}, {"draft": fp8}):
        assert not started(monkeypatch, **other)


def test_it_leaves_the_weights_their_memory(monkeypatch):
    """What it needs is what a plan of the same says, which is what it holds."""
    settings, made = Settings().resolve(CPU, query_group=2), []
    real = warm_up._blank
    monkeypatch.setattr(warm_up, "_blank", lambda *args: made.append(real(*args)) or made[-1])
    needed, free = [], 0
    check = warm_up.memory.state_parts
    monkeypatch.setattr(warm_up.memory, "state_parts", lambda *args, **more: needed.append(check(*args, **more)) or
                        needed[-1])
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free, length=2000) is None and not made
    weights = warm_up.memory.weight_parts(replace(TARGET, n_layer=1), replace(DRAFT, n_layer=1), torch.float32)
    free = sum(part.bytes for part in [*weights, *needed[0]])
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free - 1, length=2000) is None and not made
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free, length=2000) is not None
    assert [model.config.n_layer for model in made] == [1, 1]
    made.clear(), needed.clear()
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free, 2, length=2000).batch == 1
    free = sum(part.bytes for part in [*weights, *needed[0], *needed[1]])
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free - 1, 2, length=2000).batch == 1
    assert warm_up.warm_up(TARGET, DRAFT, settings, torch.float32, CPU, free, 2, length=2000).batch == 2


@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_a_process_that_ends_meanwhile_ends_as_it_would(pause):
    code = ("import sys, threading, time, torch\nfrom triforce import warm_up\nfrom triforce.config import Settings\n"
            "from triforce.model import ModelConfig\nfrom triforce.streams import ComputeStream\n"
            "warm_up.ROUNDS, cpu = 100000, torch.device('cpu')\n"
            "args = (ComputeStream(cpu), ModelConfig(512, 64, 4, 4, 2, 16, 128), None,\n"
            "        Settings().resolve('cpu', query_group=2), torch.float32, cpu, 2**30, 0, 2000)\n"
            "thread = threading.Thread(target=warm_up._quietly, args=args)\nthread.start()\n"
            f"time.sleep({pause})\nassert thread.is_alive()\nsys.exit(3)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and not done.stderr


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


@pytest.mark.parametrize("what", ["prefill", "open", "logits", "rows"])
def test_whatever_takes_time_or_memory_waits_for_it(what, tmp_path, monkeypatch):
    engine, path, ids = make_engine(*random_pair()), tmp_path / "a.prefix", random_prompt(100)
    engine.prefill(ids).save(path)
    rows = engine.caches.rows
    monkeypatch.setattr(engine.caches, "rows", lambda *args: seen.append(bool(done)) or rows(*args))
    calls = {"prefill": lambda: engine.prefill(ids), "open": lambda: engine.open(path),
             "logits": lambda: engine.logits([ids]), "rows": lambda: engine.generate(ids, 2)}
    done, seen = [], []
    engine.caches.warming = threading.Timer(0.3, done.append, [1])
    engine.caches.warming.start()
    calls[what]()
    assert done and engine.caches.warming is None and all(seen) and bool(seen) == (what == "rows")
