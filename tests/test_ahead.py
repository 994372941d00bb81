"""Steps that are recorded before they run: graphs of a CPU, which run the function when they are replayed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import make_state, random_prompt

from triforce.drafting.protocol import Drafter
from triforce.graphs import Compiler, Graphed

PROMPT = random_prompt(100)


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU would say. works: on the prompt, when it is asked."""
    now = SimpleNamespace(capturing=False, works=True)

    def record(self, args):
        def replay():
            now.capturing = True
            self.function(*args)
            now.capturing = False

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(Graphed, "_record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: not now.works))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return now


# As on a GPU, all padded steps have all rows; and no flush, before which more would be recorded.
BLOCKS = {"gamma": 3, "block_size": 4, "flush_interval": 96, "budget": 128}


def recording_state(pair, **settings):
    compiler = Compiler(torch.device("cpu"), recorder=object())
    return make_state(*pair, [PROMPT], compiler=compiler, **(BLOCKS | settings))


def steps_of(state) -> dict[str, Graphed]:
    levels = zip(("full", "retrieval"), state.hierarchy.levels, strict=False)
    found = {name: level.step for name, level in levels}
    for name, source in state.hierarchy.sources.items():
        found |= {f"{name} {rows}": step for rows, step in source.steps.items()} if name == "model" else {}
        found |= {name: source.step} if name == "ngram" else {}
    return found


def prepared(state) -> set[str]:
    return {name for name, step in steps_of(state).items() if step.graphs}


DRAFT, LEVELS = {"model 4", "model 1"}, {"full", "retrieval"}
KINDS = {"triforce": ({}, LEVELS | DRAFT), "one token of the draft": ({"gamma_inner": 1}, LEVELS | {"model 4"}),
         "draft alone": ({"retrieval": False}, {"full"} | DRAFT), "coupled": ({"rule": "coupled"}, LEVELS | DRAFT),
         "ngram": ({"ngram": True}, LEVELS | {"ngram"}), "retrieval alone": ({}, LEVELS)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_ahead_is_what_the_first_rounds_run(pair, gpu, kind):
    settings, expected = KINDS[kind]
    pair = (pair[0], None) if kind in ("ngram", "retrieval alone") else pair
    state, plain = recording_state(pair, **settings), make_state(*pair, [PROMPT], **(BLOCKS | settings))
    assert prepared(state) == expected
    for _ in range(3):
        assert state.round() == plain.round()
    for name in expected:
        assert len(steps_of(state)[name].graphs) == 1 and not steps_of(state)[name]._unplayed


def test_nothing_is_recorded_ahead_once_the_device_is_done(pair, gpu, monkeypatch):
    gpu.works = False
    state = recording_state(pair)
    assert prepared(state) == set()
    monkeypatch.setattr(state.target, "group", object())  # ranks record the same, whichever of them is done
    state._record_ahead()
    assert prepared(state) == LEVELS | DRAFT


def test_a_users_drafter_runs_before_it_is_recorded(pair, gpu):
    """It may choose its kernels by trying, and make what it needs in `open`."""
    gpu.works = False
    state = recording_state(pair)
    gpu.works, state.hierarchy.sources["custom"] = True, Drafter()
    state._record_ahead()
    assert prepared(state) == set()
    del state.hierarchy.sources["custom"]
    state._record_ahead()
    assert prepared(state) == LEVELS | DRAFT


def test_rows_that_nobody_knows_yet_are_not_recorded(pair, gpu):
    """Of a plan without padding: as many as will have been drafted."""
    gpu.works = False
    state = recording_state(pair, retrieval=False)
    [plan] = state.pilot.ahead()
    for padded in (False, True):
        for prepare in state.hierarchy.outer.preparations_of_round(replace(plan, padded=padded)):
            prepare()
        assert prepared(state) == ({"full"} if padded else set()) | DRAFT
