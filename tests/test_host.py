"""What a host program does around an engine: settings of PyTorch, threads, forks, pickles."""

import contextlib
import copy
import pickle
import threading

import pytest
import torch
from conftest import make_engine, python, random_pair, random_prompt, refused, slow

import triforce
from triforce.decode.batch import DecodeBatch
from triforce.model import Transformer
from triforce.runtime.host import own_settings

TEXT = "It was the best of times, it was the worst of times. " * 3
BACKENDS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@contextlib.contextmanager
def changed(write, value, usual):
    write(value)
    try:
        yield
    finally:
        write(usual)


def precise(value: str) -> None:
    for backend in BACKENDS:
        backend.fp32_precision = value


HOSTS = {
    "float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": lambda: changed(torch.set_default_device, "meta", None),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "matmul precision": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
    "precision": lambda: changed(precise, "tf32", "ieee"),
}
BREAK = "float64", "default device", "autocast", "inference mode"  # what is not kept out, an engine fails by


def settings() -> dict:
    return {"dtype": torch.get_default_dtype(), "device": torch.get_default_device().type,
            "autocast": torch.is_autocast_enabled("cpu"), "inference": torch.is_inference_mode_enabled(),
            "deterministic": torch.get_deterministic_debug_mode(),
            "precision": {backend.fp32_precision for backend in BACKENDS} - {"none"} or {"ieee"}}


USUAL = {"dtype": torch.float32, "device": "cpu", "autocast": False, "inference": False, "deterministic": 0,
         "precision": {"ieee"}}


def used(engine, file) -> list:
    """Tokens from every way in. The host's settings are the same between two pieces as before."""
    before, law = settings(), {"temperature": 0.8, "seed": 3, "ignore_eos": True}
    stream = engine.stream(TEXT, 6, **law)
    for _ in stream:
        assert settings() == before
    found = [stream.result.tokens, engine.generate(TEXT, 4, temperature=0.0).tokens]
    book = engine.prefill(TEXT)
    found += [out.tokens for out in engine.generate(["Why?", "Who?"], 4, prefix=book, **law)]
    found.append(engine.chat(book).send("When?", max_new_tokens=4, **law).tokens)
    book.save(file)
    found.append(engine.generate("What?", 4, prefix=engine.open(file), **law).tokens)
    found.append(engine.logits([[5, 6, 7]]).tolist())
    engine.release()
    assert settings() == before
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return used(triforce.load("tiny", device="cpu", gamma=3), tmp_path_factory.mktemp("usual") / "book")


@pytest.mark.parametrize("name", [*BREAK, *slow(*(name for name in HOSTS if name not in BREAK))])
def test_settings_of_the_host_change_no_token(name, usual, tmp_path, watched):
    """Those that held while an engine was loaded, and those that hold while it is used: it computes with the usual."""
    prefills = watched(Transformer, "prefill", lambda *args, **more: settings())
    rounds = watched(DecodeBatch, "round", lambda *args: settings())
    with HOSTS[name]():
        before = settings()
        assert before != USUAL
        engine = triforce.load("tiny", device="cpu", gamma=3)
        assert settings() == before
        assert used(engine, tmp_path / "book") == usual
    assert len(prefills + rounds) > 9 and all(one | {"inference": False} == USUAL for one in prefills + rounds)
    assert engine.generate(TEXT, 4, temperature=0.0).tokens == usual[1]


def test_settings_of_the_process_are_the_host_s_again_once_the_last_thread_has_left():
    """They are one for all threads: who leaves first does not take them from the others."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with own_settings():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with HOSTS["float64"]():
        with own_settings():
            thread.start()
            inside.wait(60)
        assert torch.get_default_dtype() == torch.float32
        leave.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64


FORKS = """
import os, signal, sys, threading, time
sys.path.insert(0, "tests")
from conftest import make_engine, random_pair, random_prompt
import triforce
from triforce import api

engine = make_engine(*random_pair(), flush_interval=16, chunk_size=4, budget=64)
prompt, begun = random_prompt(60), threading.Event()
stream = engine.stream(prompt, 20)
next(stream)


def child(name, function):
    pid = os.fork()
    if pid == 0:
        try:
            told = f"returned {function()}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        print(name, told, flush=True)
        os._exit(0)
    until = time.monotonic() + 10
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            print(name, "hangs", flush=True)
            until = time.monotonic() + 10
        time.sleep(0.02)


child("close", stream.close)
child("next", lambda: next(stream))
print("parent", len(list(stream)) > 0, flush=True)
busy = threading.Thread(target=lambda: engine.generate(prompt, 7000, ignore_eos=True,
                                                       on_decode=lambda count: begun.set()), daemon=True)
busy.start()
begun.wait()
holding = threading.Thread(target=api._lock.__enter__)  # which never lets go of it
holding.start()
holding.join()
child("generate", lambda: engine.generate(prompt, 4).tokens)
child("release", engine.release)
child("logits", lambda: engine.logits([prompt]))
child("load", lambda: triforce.load("tiny", device="cpu"))
child("api", lambda: triforce.generate("Hello", device="cpu"))
assert busy.is_alive()
sys.stdout.flush()
os._exit(0)
"""


def test_a_forked_process_is_told_instead_of_hanging():
    """It has none of its parent's threads: not those that hold locks, nor those of PyTorch."""
    done = python("-c", FORKS)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert told.pop("close") == "returned None" and told.pop("parent") == "True"
    assert told.keys() == {"next", "generate", "release", "logits", "load", "api"}
    assert all("UserError: process" in text and "was forked from process" in text for text in told.values()), told


def test_what_cannot_be_pickled_says_what_to_do():
    engine = make_engine(*random_pair(), tokenizer=triforce.load("tiny", device="cpu").tokenizer)
    prompt = random_prompt(40)
    stream = engine.stream(prompt, 4)
    for one, what in ((engine, "load one in each process"), (engine.prefill(prompt), "save it"),
                      (engine.chat(), "save it"), (stream, "result")):
        for function in (pickle.dumps, copy.copy, copy.deepcopy):
            refused(what, function, one)
    list(stream)
    out = engine.generate(prompt, 4)
    assert pickle.loads(pickle.dumps(out)).tokens == out.tokens
