"""Streams, with a GPU that is made up. What a real one does with them: test_cuda.py."""

import contextlib
import threading

import pytest
import torch

from triforce import streams
from triforce.streams import ComputeStream, like_this_thread, on_new_stream

GPU = torch.device("cuda", 0)


class Gpu:
    """In place of `torch.cuda`: streams are objects, and what is asked of them is noted down."""

    def __init__(self):
        self.log, self.default, self.here = [], FakeStream(self), threading.local()
        self.set_device = lambda device: self.log.append(("device", device))

    def Stream(self, device):  # noqa: N802
        return FakeStream(self)

    def default_stream(self, device):
        return self.default

    def current_stream(self, device):
        return getattr(self.here, "stream", self.default)

    def set_stream(self, stream):
        self.here.stream = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream(GPU)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)


class FakeStream:
    def __init__(self, gpu):
        self.gpu = gpu

    def wait_stream(self, other):
        self.gpu.log.append((self, "waits for", other))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(streams.torch, "cuda", made := Gpu())
    monkeypatch.setattr(streams, "_unused", type(streams._unused)(list))
    return made


def test_streams_are_used_again_when_their_owners_are_gone(gpu):
    first, second = ComputeStream(GPU), ComputeStream(GPU)
    assert first.cuda is not second.cuda  # they may record at once
    was = first.cuda
    del first
    assert ComputeStream(torch.device("cuda", 1)).cuda not in (was, second.cuda)  # of another device
    assert ComputeStream(GPU).cuda is was


def test_a_thread_that_chose_a_stream_keeps_it(gpu):
    with gpu.stream(mine := gpu.Stream(GPU)):
        own = ComputeStream(GPU)
    assert own.cuda is mine
    del own
    assert ComputeStream(GPU).cuda is not mine  # nobody else gets it


def test_the_stream_takes_its_turn_with_the_one_before(gpu):
    own = ComputeStream(GPU)
    with own.used():
        assert gpu.current_stream(GPU) is own.cuda
        with own.used():  # nothing to wait for
            assert gpu.log == [(own.cuda, "waits for", gpu.default)]
    assert gpu.current_stream(GPU) is gpu.default
    assert gpu.log == [(own.cuda, "waits for", gpu.default), (gpu.default, "waits for", own.cuda)]
    with pytest.raises(ZeroDivisionError), own.used():
        raise ZeroDivisionError
    assert gpu.log[2:] == gpu.log[:2] and gpu.current_stream(GPU) is gpu.default


def in_a_thread(begin, gpu):
    found = []
    thread = threading.Thread(target=lambda: (begin(), found.append(gpu.current_stream(GPU))))
    thread.start()
    thread.join()
    return found[0]


def test_threads_begin_where_they_are_told(gpu):
    with gpu.stream(mine := gpu.Stream(GPU)):
        begin, apart = like_this_thread(GPU), on_new_stream(GPU)
    assert in_a_thread(lambda: None, gpu) is gpu.default
    assert in_a_thread(begin, gpu) is mine
    assert len({mine, gpu.default, in_a_thread(apart, gpu), in_a_thread(apart, gpu)}) == 4
    assert [what for what in gpu.log if what[0] == "device"] == [("device", GPU)] * 3


def test_on_a_cpu_there_are_none():
    own, x = ComputeStream(torch.device("cpu")), torch.ones(2)
    with own.used():
        assert own.cuda is None
    assert own.hand_out(x) is x
    like_this_thread(torch.device("cpu"))()
    on_new_stream(torch.device("cpu"))()
