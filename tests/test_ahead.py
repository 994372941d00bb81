"""Steps that are recorded before they run: graphs of a CPU, which run the function when they are replayed."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_view_holds_its_selection, make_state, random_prompt

from triforce import graphs, narrowing
from triforce import state as state_module
from triforce.drafting.protocol import Drafter
from triforce.graphs import Compiler, Graphed, finish
from triforce.kv.prefix import PrefixStore
from triforce.plan import AUTOREGRESSION
from triforce.sampling import Uses

PROMPT = random_prompt(100)


@pytest.fixture
def gpu(monkeypatch):
    """What a GPU would say. works: on the prompt, when it is asked."""
    now = SimpleNamespace(capturing=False, works=True)

    class Recorded(graphs.Recording):
        def go_on(self, until):
            self.graphs = [SimpleNamespace(replay=self.replay)]
            return True

        def replay(self):
            now.capturing = True
            finish(self.function(*self.args))
            now.capturing = False

    monkeypatch.setattr(graphs, "Recording", Recorded)
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
    for name, source in state.hierarchy.sources.items():
        found |= {f"{name} {rows}": step for rows, step in source.steps.items()} if name == "model" else {}
        found |= {name: source.step} if name == "ngram" else {}
    return found


def prepared(state) -> set[str]:
    return {name for name, step in steps_of(state).items() if step.graphs}


def test_a_text_with_other_settings_has_steps_of_its_own(pair, gpu):
    """In the same buffers: what was recorded for greedy rows has no temperature in it."""
    state = recording_state(pair)
    for temperature in (0.0, 0.8, 0.0):
        state.params.set(temperature=temperature, top_p=1.0, top_k=None, min_p=None, seed=[0])
        state.rewind(30)
        for _ in range(3):
            state.round()
    [step] = {step for name, step in steps_of(state).items() if name == "full"}
    assert {key[0][1] for key in step.graphs} >= {Uses(True, False, False, False, False, False),
                                                  Uses(False, True, False, False, False, False)}


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


def test_a_view_of_what_rows_share_is_gathered_by_what_was_recorded_ahead(pair, gpu):
    document = random_prompt(300)
    prompts = [document[:288] + random_prompt(20, seed=row) for row in (1, 2)]
    how = BLOCKS | {"flush_interval": 32, "budget": 64, "base": 288, "num_resident_layers": 0, "piece_tokens": 160}
    state, plain = recording_state(pair, prompts, **how), make_state(*pair, prompts, **how)
    [(key, _)] = state.hierarchy.outer.step.graphs.items()
    assert key[5] is True and key in state.hierarchy.outer.step._unplayed
    assert state.round() == plain.round()
    assert not state.hierarchy.outer.step._unplayed and not state.hierarchy.view.shared.awaiting
    assert [state.round() for _ in range(6)] == [plain.round() for _ in range(6)]


def test_a_step_that_gathers_for_some_rows_is_not_recorded(pair, gpu, monkeypatch):
    """There are too many such sets of rows."""
    prompts = [random_prompt(n, seed=n) for n in (300, 310, 290)]
    how = BLOCKS | {"flush_interval": 32, "budget": 64, "rebuild_interval": 8, "num_resident_layers": 0}
    state, plain = recording_state(pair, prompts, **how), make_state(*pair, prompts, **how)
    outer, view, go_on, some, recorded = state.hierarchy.outer, state.hierarchy.view, graphs.Recording.go_on, 0, []

    def noted(self, until):
        recorded.extend([len(view.awaiting)] * (self.function == outer.step.function))
        return go_on(self, until)

    monkeypatch.setattr(graphs.Recording, "go_on", noted)
    for _ in range(30):
        some += len(view.awaiting) in (1, 2)
        assert state.round() == plain.round()
    assert some > 5 and outer.step.graphs and set(recorded) <= {0, 3}


def test_nothing_is_recorded_ahead_once_the_device_is_done(pair, gpu, monkeypatch):
    gpu.works = False
    state = recording_state(pair)
    assert prepared(state) == set()
    monkeypatch.setattr(state.target, "group", object())  # ranks record the same, whichever of them is done
    state._record_ahead()
    assert prepared(state) == LEVELS | DRAFT


def test_what_the_next_round_runs_is_recorded_beside_a_round(pair, gpu):
    """While the device works on it, too; and the times of such a round are not believed."""
    gpu.works = False
    state, plain = recording_state(pair, retrieval=False), make_state(*pair, [PROMPT], **BLOCKS, retrieval=False)
    gpu.works, seconds, times = True, [], []
    for _ in range(4):
        assert state.round() == plain.round()
        assert prepared(state) == {"full"} | DRAFT
        seconds.append(state.recording)
        times.append(state.last_round.timing is not None)
    assert seconds[0] > 0 and len(set(seconds)) == 1  # nothing more ran as it is written
    assert times == [False, False, True, True]  # the first replay takes longer


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_nothing_is_recorded_beside_a_round_that_may_be_the_last(pair, gpu, tokens):
    """It would hold up the last tokens. A round of three drafted ones may bring four."""
    gpu.works = False
    state = recording_state(pair, retrieval=False, max_new_tokens=tokens)
    gpu.works = True
    state.round()
    assert prepared(state) == ({"model 1"} if tokens < 5 else {"full"} | DRAFT)  # which ran twice


def state_of_four(pair, temperature: float, monkeypatch, **more):
    """Over a document, as on a GPU. Up to now there was no time for narrower steps."""
    monkeypatch.setattr(PrefixStore, "can_narrow", True)
    monkeypatch.setattr(state_module, "SPARE_TIME", 0.0)
    prompts = [random_prompt(96) + random_prompt(20 + row, seed=row) for row in range(4)]
    law = {"temperature": temperature}
    state = make_state(*pair, prompts, base=96, sampling=law, retrieval=False, **BLOCKS, **more)
    state._on_cpu = False
    state.rewind(200)
    for _ in range(4):
        state.round()
    monkeypatch.setattr(state_module, "SPARE_TIME", 0.5)
    return state


def widths_of(state) -> set[int | None]:
    return {key[6] for key in state.hierarchy.outer.step.graphs}


@pytest.mark.parametrize("works", [True, False])
def test_steps_of_narrower_batches_are_recorded_beside_rounds(pair, gpu, works, monkeypatch):
    """For when rows end. The time of a round is believed if the device was not done before that."""
    state = state_of_four(pair, 0.8, monkeypatch, compiler=Compiler(torch.device("cpu"), recorder=object()))
    plain = state_of_four(pair, 0.8, monkeypatch)
    assert widths_of(state) == {None}
    gpu.works, state._verify = works, 1e6  # the verify takes long
    assert state.round() == plain.round()
    assert widths_of(state) == {None, 2, 1} and (state.last_round.timing is not None) == works
    seconds = state.recording
    for row, width in ((3, None), (0, 2), (1, 1)):
        for one in (state, plain):
            one.close_row(row)
        assert state.round() == plain.round() and state.hierarchy.outer.num_computed == width
    assert state.recording == seconds


@pytest.mark.parametrize("how", ["a short verify", "bits are promised", "ranks", "never timed"])
def test_when_no_narrower_steps_are_recorded(pair, gpu, how, monkeypatch):
    compiler = Compiler(torch.device("cpu"), recorder=object())
    if how == "bits are promised":  # and it would save something
        for name, value in {"TILE": 8, "LONG": 96, "MERGED": 0.0, "SPREAD": 0.0}.items():
            monkeypatch.setattr(narrowing, name, value)
        monkeypatch.setattr(narrowing, "TILES", 1000)
    state = state_of_four(pair, 0.0 if how == "bits are promised" else 0.8, monkeypatch, compiler=compiler)
    assert state.hierarchy.outer.num_attending == (4 if how == "bits are promised" else None)
    if how == "bits are promised":
        monkeypatch.setattr(state.narrower, "record", None)  # no round asks for it
    state._verify = {"a short verify": 1e-6, "never timed": None}.get(how, 1e6)
    if how == "ranks":
        monkeypatch.setattr(state.target, "group", object())
    gpu.works, recorded = False, compiler.num_recorded
    state._record_narrower(time.perf_counter())
    assert widths_of(state) == {None} and compiler.num_recorded == recorded  # so rounds are timed


def test_what_streams_past_is_not_recorded_beside_a_round(pair, gpu):
    """For which rows the next verify gathers follows from what this round brings."""
    state = recording_state(pair, num_resident_layers=0)
    state.hierarchy.outer.step.graphs.clear()
    state._think(AUTOREGRESSION)
    assert not state.hierarchy.outer.step.graphs


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
