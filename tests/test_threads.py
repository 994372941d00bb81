"""Threads for the cores that other programs leave, the same bits whatever their number; and streams of a GPU that is
made up. What a real GPU does: test_cuda.py."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from conftest import kept, make_engine, random_pair, random_prompt, slow

import triforce
from triforce.runtime import streams, threads
from triforce.runtime.streams import ComputeStream
from triforce.runtime.threads import Threads

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def four():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world(monkeypatch):
    """Four cores, a clock, and work of others, that pass by hand."""
    world = SimpleNamespace(now=0.0, taken=0.0)

    def pass_by(seconds: float, others: float) -> None:
        world.now, world.taken = world.now + seconds, world.taken + seconds * others

    world.pass_by = pass_by
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(threads, "taken_by_others", lambda: world.taken)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: range(4))
    return world


def test_as_many_threads_as_others_leave_cores(four, world):
    chosen, seen = Threads(CPU), []
    for others in (0.0, 0.4, 0.9, 2.2, 7.0, -0.1):
        world.pass_by(1.0, others)
        with chosen.working():
            seen.append(torch.get_num_threads())
        assert torch.get_num_threads() == 4
    assert seen == [4, 4, 3, 2, 1, 4]
    torch.set_num_threads(2)
    chosen = Threads(CPU)  # two are the most that there are to be
    world.pass_by(1.0, 0.0)
    with chosen.working():
        assert torch.get_num_threads() == 2


def test_what_others_take(monkeypatch, tmp_path):
    """User, nice, system, irq, softirq and stolen time of the cores of this process, less what it took itself."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  9999 0 0 0 0 0 0 0 0 0\ncpu0 100 20 300 5000 600 7 8 90 0 0\ncpu1 1 1 1 1 1 1 1 1 1 1\n"
                    "cpu10 777 0 0 0 0 0 0 0 0 0\nintr 5 5 5\n")
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_CLK_TCK": 100}[name])
    monkeypatch.setattr("time.process_time", lambda: 1.5)
    assert threads.taken_by_others() == pytest.approx((525 + 6) / 100 - 1.5)


def test_generations_and_prefills_have_threads_for_free_cores(four, world):
    engine, seen = make_engine(*random_pair(), gamma=3), []

    def look(*_):
        seen.append(torch.get_num_threads())
        world.pass_by(1.0, 2.0)

    world.pass_by(1.0, 2.0)
    engine.generate(random_prompt(20), 4, temperature=0.0, on_prefill=look)
    rounds, in_prefill = engine.buffers.state.hierarchy.round, len(seen)
    engine.buffers.state.hierarchy.round = lambda *args: look() or rounds(*args)
    engine.generate(random_prompt(20), 4, temperature=0.0)
    assert 1 < in_prefill < len(seen) and set(seen) == {2} and torch.get_num_threads() == 4


@pytest.mark.parametrize("options", [{}, *slow({"sampling": "coupled"})])
def test_the_number_of_threads_changes_no_bits(options):
    """A text during which the number changes again and again is that of one thread, to the last bit of its K/V."""
    engine = triforce.load("tiny", device="cpu", **options)
    engine.threads = Threads(torch.device("cuda"))  # chooses nothing
    prompt = engine.tokenizer.encode("It was the best of times, it was the worst of times. " * 6)
    before, found = torch.get_num_threads(), []
    try:
        for counts in ((1,), (1, 3, 2)):
            engine.release()
            numbers = itertools.cycle(counts)

            def change(*_, numbers=numbers):
                torch.set_num_threads(next(numbers))

            torch.set_num_threads(counts[0])
            out = engine.generate(prompt, 16, temperature=0.8 if "sampling" in options else 0.0, seed=3,
                                  ignore_eos=True, on_prefill=change, on_decode=change)
            cache = engine.buffers.state.cache
            kv = [kept(cache, i, 0, 0, len(prompt) + 12) for i in range(engine.target.config.n_layer)]
            found.append((out.tokens, torch.stack(kv)))
    finally:
        torch.set_num_threads(before)
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_a_thread_that_began_meanwhile_has_the_usual_number(four, world):
    """PyTorch gives a new thread the number that was set last, by whichever thread."""
    chosen = Threads(CPU)

    def other() -> int:
        with chosen.working():
            return torch.get_num_threads()

    with ThreadPoolExecutor(1) as one:
        world.pass_by(1.0, 3.0)
        with chosen.working():
            assert torch.get_num_threads() == one.submit(torch.get_num_threads).result() == 1
        world.pass_by(1.0, 0.0)
        assert one.submit(other).result() == torch.get_num_threads() == 4


@pytest.mark.parametrize("interval,dtype,expected", [(64, torch.float32, 1), (100, torch.float32, 4),
                                                     (64, torch.bfloat16, 4)])
def test_with_odd_flush_intervals_nothing_is_chosen(four, world, interval, dtype, expected):
    """Nor in half precision."""
    chosen = Threads(CPU, interval, dtype)
    world.pass_by(1.0, 3.0)
    with chosen.working():
        assert torch.get_num_threads() == expected


class FakeStream(SimpleNamespace):
    __hash__ = object.__hash__


class Gpu:
    """In place of `torch.cuda`: what waits for which stream is noted down."""

    def __init__(self):
        self.log = []
        self.default = self.here = self.named("default")

    def named(self, name: str) -> FakeStream:
        return FakeStream(name=name, device=GPU, wait_stream=lambda other: self.log.append((name, other.name)))

    def Stream(self, device, priority=0):  # noqa: N802
        return self.named("own")

    def current_device(self):
        return 0

    def default_stream(self, device):
        return self.default

    def current_stream(self, device):
        return self.here

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = before


def test_the_stream_takes_its_turn_with_the_one_before(monkeypatch):
    monkeypatch.setattr(streams.torch, "cuda", gpu := Gpu())
    monkeypatch.setattr(streams, "_unused", type(streams._unused)(list))
    own = ComputeStream(GPU)
    gpu.log.clear()
    with own.lock, own.used():
        assert gpu.current_stream(GPU) is own.cuda
        with own.used():  # nothing to wait for
            assert gpu.log == [("own", "default")]
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(own.lock.acquire, blocking=False).result() is False
    assert gpu.current_stream(GPU) is gpu.default and gpu.log == [("own", "default"), ("default", "own")]
    with pytest.raises(ZeroDivisionError), own.used():
        raise ZeroDivisionError
    assert gpu.log[2:] == gpu.log[:2] and gpu.current_stream(GPU) is gpu.default
