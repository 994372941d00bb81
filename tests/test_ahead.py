"""Steps that are recorded before they run: graphs of a CPU, which run the function when they are replayed."""

from types import SimpleNamespace

import pytest
import torch
from conftest import assert_view_holds_its_selection, make_state, random_prompt

from triforce import graphs
from triforce.graphs import Compiler, Graphed
from triforce.plan import AUTOREGRESSION
from triforce.sampling import Uses

PROMPT = random_prompt(100)


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU would say. works: on the prompt, when it is asked."""
    now = SimpleNamespace(capturing=False, works=True)

    def recorded(function, args, compiler):
        def replay():
            now.capturing = True
            function(*args)
            now.capturing = False

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(graphs, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, query=lambda: not now.works))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return now


# As on a GPU, all padded steps have all rows; and no flush, before which more would be recorded.
BLOCKS = {"gamma": 3, "block_size": 4, "flush_interval": 96, "budget": 128}


def recording_state(pair, prompts=(PROMPT,), **settings):
    compiler = Compiler(torch.device("cpu"), recorder=object())
    return make_state(*pair, list(prompts), compiler=compiler, **(BLOCKS | settings))


def steps_of(state) -> dict[str, Graphed]:
    levels = zip(("full", "retrieval"), state.hierarchy.levels, strict=False)
    found = {name: level.step for name, level in levels}
    return found | {name: source.step for name, source in state.hierarchy.sources.items() if name != "custom"}


def prepared(state) -> set[str]:
    """Names of steps, those of the draft with their rows."""
    found = set()
    for name, step in steps_of(state).items():
        found |= {f"model {key[4]}" for key in step.graphs} if name == "model" else {name} if step.graphs else set()
    return found


def test_a_text_with_other_settings_has_steps_of_its_own(pair, gpu):
    """In the same buffers: what was recorded for greedy rows has no temperature in it."""
    state = recording_state(pair)
    for temperature in (0.0, 0.8, 0.0):
        state.params.set(temperature=temperature, top_p=1.0, top_k=None, min_p=None, seed=[0])
        state.rewind(30)
        for _ in range(3):
            state.round()
    [step] = {step for name, step in steps_of(state).items() if name == "full"}
    assert {key[0] for key in step.graphs} >= {Uses(True, False, False, False, False, False),
                                                  Uses(False, True, False, False, False, False)}


def test_a_step_over_few_pieces_from_the_host_is_recorded(pair, gpu):
    """Once for what gathers, and once for what does not. Where there are many pieces, none is."""
    prompt, settings, said = random_prompt(300), BLOCKS | {"flush_interval": 32, "rebuild_interval": 1}, []
    for tokens in (160, 152, 64):  # of 288, and soon of 320
        state = recording_state(pair, [prompt], **settings, num_resident_layers=0, piece_tokens=tokens)
        outer = state.hierarchy.outer
        assert ("full" in prepared(state)) == outer.is_recorded == (tokens > 64)
        said.append([state.round() for _ in range(18)])
        assert state.num_flushes == 1 and outer.is_recorded == (tokens == 160)
        if tokens == 152:  # nothing is recorded for a length of three pieces
            assert {key[1] for key in outer.step.graphs} == {288}
            continue
        gathers = {(key[1], key[5]) for key in outer.step.graphs}  # by the length of the prefix; after a flush, too
        assert gathers == ({(288, False), (288, True), (320, True)} if tokens == 160 else set())
        assert state.hierarchy.view.awaiting == [0]
        state.round(AUTOREGRESSION)
        assert_view_holds_its_selection(state.hierarchy.view)
    plain = make_state(*pair, [prompt], **settings, num_resident_layers=0, piece_tokens=160)
    assert said == [[plain.round() for _ in range(18)]] * 3 and plain.hierarchy.view.num_rebuilds > 4
