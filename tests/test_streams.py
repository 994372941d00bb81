"""Streams, with a GPU that is made up. What a real GPU does: test_cuda.py."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from triforce.runtime import streams
from triforce.runtime.streams import ComputeStream

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
