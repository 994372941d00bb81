"""What streams past, on streams that note who waits for whom: no copy overtakes a reader, and no reader a copy."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from conftest import make_state, random_prompt

from triforce.cache.offload import Offload, Passage
from triforce.decode.drafters.model import ModelDrafter
from triforce.decode.plan import DraftPlan
from triforce.decode.verifier import Verifier
from triforce.model import ModelConfig

CONFIG = ModelConfig(64, 32, 3, 4, 2, 8, 48)
PIECE = 8
STATES = [(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2))]  # of what is attended to


class Stream:
    """Work that is enqueued: each item comes after those before it, and after those that the stream waits for."""

    def __init__(self, device=None, priority=0):
        self.past: frozenset = frozenset()
        self.priority = priority

    def do(self, item) -> None:
        self.past |= {item}

    def record_event(self):
        return Event().record(self)

    def wait_event(self, event) -> None:
        assert event.past is not None, "PyTorch makes an event when it is first recorded"
        self.past |= event.past

    wait_stream = wait_event


class Event:
    past: frozenset | None = None

    def __init__(self, external=False):
        self.external = external

    def record(self, stream):
        self.past = stream.past
        return self


@pytest.fixture
def device(monkeypatch):
    """An Offload of 2 layers, and the stream that computes."""
    compute, now = Stream(), []
    now.append(compute)

    @contextlib.contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    for name, value in {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda _: now[-1]}.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def make(capacity: int) -> SimpleNamespace:
        made = Offload(CONFIG, 1, batch=1, capacity=capacity, interval=PIECE, piece=PIECE, device="cpu",
                       dtype=torch.float32, runs_on=torch.device("cuda"))
        made.on_cuda, made._pins = True, {}  # nothing is to be pinned
        made._open_stream()
        for kv in made.host.values():
            kv.normal_()
        found = SimpleNamespace(offload=made, compute=compute, copied=[], read=[])
        original = made.copy

        def copy(slot, i, start, length):
            for user in found.read:  # in the buffer that is overwritten
                assert user[0] != slot or user in made.copy_stream.past
            original(slot, i, start, length)
            found.copied.append((slot, i, start))
            made.copy_stream.do(("copy", len(found.copied), slot))

        made.copy = copy
        return found

    return make


def go_through(found, passage, length: int) -> None:
    """A step's reading: whatever it reads has been copied, and is what lies on the host."""
    staging, starts = found.offload.staging, []

    def attend(start, k, v):
        i = starts.count(0) + (start == 0)  # of layers 1 and 2
        slot = next(s for s, buffer in enumerate(staging) if buffer.data_ptr() == k.data_ptr())
        latest = max(item for item in range(len(found.copied)) if found.copied[item][0] == slot)
        assert found.copied[latest] == (slot, i, start)
        assert ("copy", latest + 1, slot) in found.compute.past
        here = found.offload.host[i][:, :, start : min(start + PIECE, length)].transpose(2, 3)
        assert torch.equal(torch.stack([k, v]), here)
        reading = (slot, len(found.read))
        found.read.append(reading)
        found.compute.do(reading)
        return STATES

    passage.on_piece = lambda i, start, piece: starts.append(start)
    for i in found.offload.layers:
        passage.attend(i, length, attend)
        assert len(starts) == i * -(-length // PIECE)


@pytest.mark.parametrize("length", [5, 16, 37, 100])
def test_every_piece_is_there_when_it_is_read(device, length):
    found = device(104)
    count, buffers = 2 * -(-length // PIECE), len(found.offload.staging)
    for _ in range(2):  # steps, one after the other
        before = len(found.copied)
        found.offload.run_ahead(length)
        assert len(found.copied) == before + min(buffers, count)
        go_through(found, Passage(found.offload, ahead=True), length)
        assert len(found.copied) == before + count
        before = len(found.copied)
        go_through(found, Passage(found.offload), length)  # as a prefill does
        assert len(found.copied) == before + count


def test_a_recording_that_is_broken_off_in_a_copy_can_be_ended(device):
    """What the copy stream was given to do for it, the stream that records waits for."""
    found, copy = device(104), Offload.copy

    def interrupted(*args):
        copy(found.offload, *args)
        found.offload.copy_stream.do("a copy")
        raise KeyboardInterrupt

    found.offload.copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        Passage(found.offload, ahead=True).attend(1, 100, lambda *_: STATES)
    assert "a copy" in found.compute.past


SHARED = {"base": 288, "flush_interval": 32, "num_resident_layers": 0, "piece_tokens": 64}


@pytest.mark.parametrize("how", [SHARED | {"base": 0}, SHARED], ids=["own", "shared"])
def test_the_first_pieces_are_on_their_way_while_tokens_are_drafted(pair, monkeypatch, how):
    """Those of what streams past, as far as it goes: of a shared prefix, all; of one's own, up to the last flush."""
    prompt, log = random_prompt(360), []

    def noted(name, function):
        return lambda self, *args: log.append(name) or function(self, *args)

    state = make_state(*pair, [prompt, prompt[:340]][: 1 + (how["base"] > 0)], retrieval=False, **how)
    monkeypatch.setattr(Offload, "run_ahead", lambda self, length: log.append(length))
    monkeypatch.setattr(Verifier, "check", noted("check", Verifier.check))
    monkeypatch.setattr(ModelDrafter, "propose", noted("draft", ModelDrafter.propose))
    state.round()
    assert log == [how["base"] or 352, "draft", "check"]
    del log[:]
    state.hierarchy.outer.round(DraftPlan(2, "model"))
    assert log == [how["base"] or 352, "draft", "check"]
