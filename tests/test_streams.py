"""Streams, with a GPU that is made up, and what of an engine works on its own. What a real GPU does: test_cuda.py."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import random_prompt

import triforce
from triforce import prefix_file, streams
from triforce.buffers import Buffers
from triforce.cpu import Linear
from triforce.hierarchy import Hierarchy
from triforce.model import Transformer
from triforce.streams import ComputeStream

GPU = torch.device("cuda", 0)


class FakeStream:
    device = GPU

    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def wait_stream(self, other) -> None:
        self.log.append((self.name, other.name))


class Gpu:
    """In place of `torch.cuda`: what waits for which stream is noted down."""

    def __init__(self):
        self.log, self.here = [], threading.local()
        self.default = FakeStream("default", self.log)

    def Stream(self, device, priority=0):  # noqa: N802
        return FakeStream("own", self.log)

    def current_device(self):
        return 0

    def default_stream(self, device):
        return self.default

    def current_stream(self, device):
        return getattr(self.here, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here.stream = self.current_stream(GPU), stream
        try:
            yield
        finally:
            self.here.stream = before


def test_the_stream_takes_its_turn_with_the_one_before(monkeypatch):
    monkeypatch.setattr(streams.torch, "cuda", gpu := Gpu())
    monkeypatch.setattr(streams, "_unused", type(streams._unused)(list))
    own, users = ComputeStream(GPU), []
    gpu.log.clear()
    with own.alone():
        assert gpu.current_stream(GPU) is own.cuda
        with own.used():  # nothing to wait for
            assert gpu.log == [("own", "default")]
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(own.lock.acquire, blocking=False).result() is False
    assert gpu.current_stream(GPU) is gpu.default and gpu.log == [("own", "default"), ("default", "own")]
    with pytest.raises(ZeroDivisionError), own.used():
        raise ZeroDivisionError
    assert gpu.log[2:] == gpu.log[:2] and gpu.current_stream(GPU) is gpu.default
    x = SimpleNamespace(record_stream=users.append)
    assert own.hand_out(x) is x and users == [gpu.default]


# -- what works on it --------------------------------------------------------------------------------------------------

class Spy(ComputeStream):
    """Knows which threads are within."""

    def __init__(self, device):
        super().__init__(device)
        self.within, self.handed_out, self.cuda = threading.local(), 0, None

    @contextlib.contextmanager
    def used(self):
        depth = self.depth
        self.within.depth = depth + 1
        try:
            yield
        finally:
            self.within.depth = depth

    @property
    def depth(self):
        return getattr(self.within, "depth", 0)

    def hand_out(self, x):
        assert self.depth == 0
        self.handed_out += 1
        return x


@pytest.fixture
def spied(monkeypatch):
    """Of what touches a GPU, whether it was within, by name."""
    engine, found = triforce.load("tiny", device="cpu"), []
    engine.compute_stream = spy = Spy(torch.device("cpu"))
    for owner, name in ((Transformer, "prefill"), (Transformer, "forward"), (Linear, "forward"), (Buffers, "release"),
                        (Hierarchy, "acceptance_rates"), (prefix_file, "write")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real, name=name, **more: found.append(
            (name, spy.depth > 0)) or real(*args, **more))
    return engine, found


def test_all_that_an_engine_computes_is_on_its_stream(spied, tmp_path):
    engine, found = spied
    book = engine.prefill(random_prompt(400))
    assert engine.generate(random_prompt(9), 8, prefix=book, temperature=0).tokens
    stream = engine.stream(random_prompt(50), 30)
    next(iter(stream))
    stream.close()
    chat = engine.chat(book)
    chat.send("Who?", max_new_tokens=4)
    chat.save(tmp_path / "chat")
    with engine.holding_still():
        assert engine.compute_stream.depth == 1
    engine.open(tmp_path / "chat")
    engine.logits([random_prompt(20)])
    assert engine.compute_stream.handed_out == 1
    engine.release()
    assert set(found) == {(name, True) for name in ("prefill", "forward", "release", "acceptance_rates", "write")}
