"""Streams, with a GPU that is made up, and what of an engine works on its own. What a real GPU does: test_cuda.py."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt

import triforce
from triforce import prefix_file, streams
from triforce.caches import Caches
from triforce.hierarchy import Hierarchy
from triforce.model import Output, Transformer
from triforce.streams import ComputeStream, like_this_thread, on_new_stream, use_one_stream

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Gpus:
    """In place of `torch.cuda`: streams are objects, and what is asked of them is noted down."""

    def __init__(self):
        self.log, self.here = [], threading.local()
        self.defaults = {0: FakeStream(self, GPU), 1: FakeStream(self, OTHER)}

    def current_device(self):
        return getattr(self.here, "device", 0)

    def set_device(self, device):
        self.here.device = device.index

    def number(self, device):
        return self.current_device() if device.index is None else device.index

    def Stream(self, device, priority=0):  # noqa: N802
        return FakeStream(self, torch.device("cuda", self.number(device)), priority)

    def default_stream(self, device):
        return self.defaults[self.number(device)]

    def current_stream(self, device):
        number = self.number(device)
        return getattr(self.here, f"stream{number}", self.defaults[number])

    def set_stream(self, stream):
        setattr(self.here, f"stream{stream.device.index}", stream)

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)


class FakeStream:
    def __init__(self, gpus, device, priority=0):
        self.gpus, self.device, self.priority = gpus, device, priority

    def wait_stream(self, other):
        self.gpus.log.append((self, "waits for", other))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(streams.torch, "cuda", made := Gpus())
    monkeypatch.setattr(streams, "_unused", type(streams._unused)(list))
    monkeypatch.setattr(streams, "_locks", {})
    return made


def test_a_stream_belongs_to_the_gpu_that_its_maker_used(gpu):
    gpu.set_device(OTHER)
    own = ComputeStream(torch.device("cuda"))
    gpu.set_device(GPU)
    assert own.cuda.device == own.device == OTHER
    gpu.log.clear()
    with own.used():
        assert gpu.current_stream(OTHER) is own.cuda and gpu.current_stream(GPU) is gpu.defaults[0]
    assert gpu.log == [(own.cuda, "waits for", gpu.defaults[1]), (gpu.defaults[1], "waits for", own.cuda)]
    del own
    assert ComputeStream(torch.device("cuda")).cuda.device == GPU


def test_a_program_may_use_one_stream_for_all(gpu):
    """But not in the place of one that the user chose."""
    with gpu.stream(theirs := gpu.Stream(GPU)):
        own = ComputeStream(GPU)
        use_one_stream(GPU)
        assert gpu.current_stream(GPU) is theirs is not own.cuda
    assert gpu.log == [(own.cuda, "waits for", theirs)]  # where weights may still be made
    use_one_stream(GPU)
    mine = gpu.current_stream(GPU)
    assert mine is not gpu.defaults[0] and gpu.log[1:] == [(mine, "waits for", gpu.defaults[0])]
    first, second = ComputeStream(GPU), ComputeStream(torch.device("cuda"))
    assert first.cuda is second.cuda is mine and first.lock is second.lock
    assert in_a_thread(lambda: ComputeStream(GPU).cuda) is not mine


def test_the_stream_takes_its_turn_with_the_one_before(gpu):
    own = ComputeStream(GPU)
    gpu.log.clear()
    with own.alone():
        assert gpu.current_stream(GPU) is own.cuda
        with own.used():  # nothing to wait for
            assert gpu.log == [(own.cuda, "waits for", gpu.defaults[0])]
        assert in_a_thread(lambda: own.lock.acquire(blocking=False)) is False
    assert gpu.current_stream(GPU) is gpu.defaults[0]
    assert gpu.log == [(own.cuda, "waits for", gpu.defaults[0]), (gpu.defaults[0], "waits for", own.cuda)]
    with pytest.raises(ZeroDivisionError), own.used():
        raise ZeroDivisionError
    assert gpu.log[2:] == gpu.log[:2] and gpu.current_stream(GPU) is gpu.defaults[0]


def in_a_thread(function):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_threads_begin_where_they_are_told(gpu):
    with gpu.stream(mine := gpu.Stream(OTHER)):
        begin, apart = like_this_thread(OTHER), on_new_stream(OTHER)

    def begun(begin):
        return in_a_thread(lambda: (begin(), gpu.current_device(), gpu.current_stream(OTHER))[1:])

    assert begun(lambda: None) == (0, gpu.defaults[1])
    assert begun(begin) == (1, mine)
    (first, one), (second, two) = begun(apart), begun(apart)
    assert first == second == 1 and len({mine, gpu.defaults[1], one, two}) == 4


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
    for owner, name in ((Transformer, "prefill"), (Transformer, "forward"), (Output, "forward"), (Caches, "release"),
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


def test_a_document_is_read_on_it_and_written_apart_from_it(monkeypatch, tmp_path):
    """Another thread may record a step while this one saves."""
    engine, begun = make_engine(*random_pair()), []
    for name in ("like_this_thread", "on_new_stream"):
        monkeypatch.setattr(prefix_file, name, lambda device, name=name: lambda: begun.append(name))
    engine.prefill(random_prompt(400)).save(tmp_path / "book")
    assert set(begun) == {"on_new_stream"}
    begun.clear()
    engine.open(tmp_path / "book")
    assert set(begun) == {"like_this_thread"}
