"""A prefix in host memory, streamed in pieces, against the same prefix on the device."""

import subprocess
import sys

import pytest
import torch
from conftest import (
    assert_view_holds_its_selection,
    bits,
    make_engine,
    make_state,
    random_pair,
    random_prompt,
    run_rounds,
    slow,
)
from torch.overrides import TorchFunctionMode

import triforce
from triforce.decode.plan import AUTOREGRESSION, ONE_ROW, DraftPlan
from triforce.errors import UserError

CONTEXT, NEW = 640, 80
PROMPTS = [random_prompt(310), random_prompt(205, seed=1), random_prompt(450, seed=2)]
SIZES = {"flush_interval": 16, "chunk_size": 4, "budget": 64}


@pytest.fixture(scope="module")
def models():
    return random_pair(std=0.2)


def state_of(models, prompts=None, **kw):
    target, draft = models
    settings = {"capacity": 2048, "budget": 256, "chunk_size": 8, "flush_interval": 64, "rebuild_interval": 32,
                **kw}
    return make_state(target, draft, prompts or [random_prompt(CONTEXT)], **settings)


@pytest.mark.parametrize("resident,piece", [(0, 64), *slow((1, 192))])
def test_greedy_bits_do_not_depend_on_drafting(models, resident, piece):
    where = {"num_resident_layers": resident, "piece_tokens": piece}
    plain = bits(state_of((models[0], None), retrieval=False, **where), NEW)[:2]
    for more in ({}, {"gamma": 3, "gamma_inner": 1}, {"retrieval": False}):
        state = state_of(models, **where, **more)
        tokens, hashes, rejected, _ = bits(state, NEW)
        assert (tokens, hashes) == plain
        assert state.num_flushes >= 2 and rejected["full"] >= 10
        if state.hierarchy.view is not None:
            assert state.hierarchy.view.num_rebuilds >= 2
        state.rewind(1000)
        assert bits(state, 20, plan=AUTOREGRESSION)[:2] == (plain[0][:20], plain[1][:20])


def test_one_piece_gives_the_bits_of_a_resident_prefix(models):
    """The same split points: nothing else may differ. (A selection comes a verify later, so drafts are others.)"""
    drawn = {"sampling": {"temperature": 0.8, "top_p": 0.9}}
    for more, how, layers in (({}, {}, 0), (drawn, {"plan": AUTOREGRESSION}, 1)):
        resident = bits(state_of(models, **more), NEW, **how)[:2]
        state = state_of(models, num_resident_layers=layers, piece_tokens=2048, **more)
        assert bits(state, NEW, **how)[:2] == resident


def test_a_rebuild_is_gathered_by_the_next_verify_of_any_kind(models):
    """Also by one of one row, in a round without drafts, or it would bring what was newest before a flush."""
    state = state_of(models, num_resident_layers=0, sampling={"temperature": 0.8})

    state.pilot.think, plain = lambda: None, 0
    state.pilot.choose = lambda: (ONE_ROW if state.hierarchy.view.awaiting else DraftPlan(3, "model", True, 1, 2))
    for _ in range(80):
        awaited, flushes = state.hierarchy.view.awaiting, state.num_flushes
        (tokens,) = state.round()
        assert not (awaited and state.hierarchy.view.awaiting)
        if awaited and state.num_flushes == flushes:
            plain += 1
            assert len(tokens) == 1
            assert_view_holds_its_selection(state.hierarchy.view, 0)
    assert plain >= 2 and state.num_flushes >= 1


def test_what_crosses_the_bus_lies_in_one_run(models):
    """A driver copies it by itself. What does not, a CPU's threads gather first, which other programs hold up."""
    offload, crossed = state_of(models, num_resident_layers=0).cache.prefix.offload, []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function.__name__ in ("to", "copy_", "__setitem__"):
                host = args[0][args[1]] if function.__name__ == "__setitem__" else args[0]
                crossed.append(host.is_contiguous())
            return function(*args, **(kwargs or {}))

    _, _, _, heads, dim = offload.host[0].shape
    kv = torch.randn(2, heads, 8, dim)
    with Watching():
        offload.store(0, 0, 16, kv)
        found = offload.load(0, 0, 16, 24)
    assert torch.equal(found, kv) and crossed == [True] * 4


def test_prefill_appends_to_what_lies_on_the_host(models):
    prompt = random_prompt(700)
    state = state_of(models, [prompt[:400]], num_resident_layers=0, piece_tokens=128)
    said = run_rounds(state, 30)[0]
    state.close_row(0)
    begun = prompt[:400] + said
    extra = len(state.texts()[0]) - len(begun)  # tokens of the last round beyond those that were looked at
    state.prefill(0, prompt[400:])
    state.begin(200)
    text = state.tape.tokens[0, : len(state.texts()[0])].tolist()
    assert text[: len(begun)] == begun and text[len(begun) + extra :] == prompt[400:]
    fresh = state_of(models, [text])
    assert run_rounds(state, 60) == run_rounds(fresh, 60)


def test_each_row_of_a_batch_gathers_its_own(models):
    """Those that await it, from their own tokens; the others' views stay as they are."""
    prompts = [random_prompt(900), random_prompt(710, seed=1), random_prompt(840, seed=2)]
    state = state_of(models, prompts, rebuild_interval=10**6, num_resident_layers=1, piece_tokens=64)
    view = state.hierarchy.view
    state.round()
    for rows in ([0, 1, 2], [1], [0, 2]):
        for kv in (view.k[1], view.v[1]):
            kv.fill_(7.0)
        for row in rows:
            view.choose(row)
        assert view.awaiting
        state.round()
        assert not view.awaiting and state.num_flushes == 0
        for row in range(3):
            if row in rows:
                assert_view_holds_its_selection(state.hierarchy.view, row)
            else:
                assert (view.k[1][row] == 7.0).all() and (view.v[1][row] == 7.0).all()


def test_load_offloads(caplog):
    ids = random_prompt(400, vocab_size=4096)  # a view holds 256 of them
    caplog.set_level("INFO", logger="triforce")
    options, made = {"max_new_tokens": 12, "temperature": 0}, {"device": "cpu", "budget": 256}
    expected = triforce.load("tiny", **made).generate(ids, **options).tokens
    for more, resident in (({}, 0), ({"num_resident_layers": 3}, 3), ({"resident_memory": "20GiB"}, 8)):
        engine = triforce.load("tiny", **made, offload=True, **more)
        assert engine.generate(ids, **options).tokens == expected
        assert f"KV cache: {resident} of 8 layers on cpu" in caplog.text
        caplog.clear()
    triforce.load("tiny", **made, offload="auto").generate(ids, **options)
    assert "KV cache: 8 of 8 layers on cpu, 0.00 GiB in host memory" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_device_that_runs_out_leaves_the_engine_usable(pair, monkeypatch, error, states):
    engine = make_engine(*pair, offload=True, **SIZES)
    prompt = random_prompt(300)
    whole = engine.generate(prompt, max_new_tokens=20, temperature=0).tokens

    def fails(self, *args, **kw):
        raise error

    monkeypatch.setattr("triforce.decode.batch.DecodeBatch.round", fails)
    with pytest.raises(UserError, match="ran out of memory.*--max-seq-len") as told:
        engine.generate(prompt, max_new_tokens=20, temperature=0)
    assert (str(error) or "MemoryError") in str(told.value) and len(states) == 1
    monkeypatch.undo()
    assert engine.generate(prompt, max_new_tokens=20, temperature=0).tokens == whole
    assert len(states) == 2  # nothing was kept of what had failed


@pytest.mark.slow
def test_memory_that_the_system_refuses_is_no_traceback():
    """The address space of the process is bounded, as batch schedulers do."""
    code = ("import resource, triforce\n"
            "from triforce.runtime import free_memory\n"
            "engine = triforce.load('tiny', device='cpu', offload=True, max_seq_len=32768)\n"
            "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "hard = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, hard))\n"
            "for of_host in (free_memory.of_host, lambda: None):\n"  # refused before and in the middle
            "    free_memory.of_host = of_host\n"
            "    try:\n        engine.generate([5] * 300, 4)\n"
            "    except triforce.UserError as error:\n        print(error)\n"
            "resource.setrlimit(resource.RLIMIT_AS, (hard, hard))\n"
            "print(len(engine.generate([5] * 300, 4, ignore_eos=True).tokens))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    before, middle, after = done.stdout.splitlines()
    assert "GiB are free: KV cache of 8 layers in host memory" in before
    assert "ran out of memory" in middle and after == "4"


@pytest.mark.parametrize("piece", [112, *slow(32, 2048)])
def test_rows_of_a_batch_are_said_as_if_resident(pair, piece):
    """Also one of which nothing streams; the last piece is a partial one; and once more, rewound."""
    prompts, sizes = [*PROMPTS, [7]], {"capacity": 576, "max_new_tokens": 60}
    expected = run_rounds(make_state(*pair, prompts, **sizes), 40)
    state = make_state(*pair, prompts, **sizes, num_resident_layers=1, piece_tokens=piece)
    assert run_rounds(state, 40) == expected
    state.rewind(512)
    assert run_rounds(state, 20) == [row[:20] for row in expected]


def test_short_rows_of_a_batch_are_taken_whole(pair):
    """Views that hold all of a prefix are loaded row by row, and draft what the full level says."""
    state = make_state(*pair, [prompt[:120] for prompt in PROMPTS], budget=512, num_resident_layers=0, piece_tokens=48,
                       sampling={"temperature": 0.8})
    for _ in range(2):
        run_rounds(state, 50)
        assert all(rates["full"] > 0.99 for rates in state.hierarchy.acceptance_rates())
        state.rewind(512)
