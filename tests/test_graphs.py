"""Which calls of a step are recorded and which replayed, with recordings that only say what was called."""

import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt, refused

from triforce.runtime import graphs
from triforce.runtime.graphs import Compiler, Graphed


class Noting(Graphed):
    """A step that notes what happens; its graphs note their replays."""

    def __init__(self, num_lengths=0, warm_up=1):
        self.log = []
        super().__init__(self.note, Compiler(torch.device("cpu")), num_lengths, warm_up)

    def note(self, *args):
        self.log.append(("run", args))

    def what(self):
        done = [what for what, _ in self.log]
        self.log.clear()
        return done


def noted(function, args, compiler):
    """In the place of a recording: it says what is recorded."""
    log = function.__self__.log
    log.append(("record", args))
    return SimpleNamespace(replay=lambda: log.append(("replay", args)))


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphs, "recorded", noted)


@pytest.mark.parametrize("warm_up", [1, 4])
def test_first_it_runs_then_it_is_recorded_then_replayed(warm_up):
    step = Noting(warm_up=warm_up)
    for _ in range(warm_up + 3):
        step(7)
    assert step.what() == ["run"] * warm_up + ["record", "replay", "replay", "replay"]


def test_other_tensors_and_settings_have_graphs_of_their_own():
    """A step that was recorded where no row needed a filter leaves it out for good."""
    step, x, y = Noting(), torch.zeros(3), torch.zeros(3)
    for _ in range(2):
        step(x)
        step(y)
    step.what()
    for given in (y, x):
        step(given)
        assert step.log[-1][0] == "replay" and step.log[-1][1][0] is given
    step.what()
    for settings, done in (("drawn", ["run"]), ("drawn", ["record", "replay"]), ("greedy", ["run"]),
                           ("drawn", ["replay"])):
        step.compiler.settings = settings
        step(x)
        assert step.what() == done


@pytest.mark.parametrize("bad", [0o777, 0o770, None])
def test_nothing_is_compiled_into_a_folder_of_others(tmp_path, monkeypatch, bad):
    """What lies there is run. The folder is made for the user alone."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("TRIFORCE_CACHE", str(folder))
    assert graphs.cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    if bad is None:
        monkeypatch.setattr(graphs.os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.chmod(bad)
    refused("TRIFORCE_CACHE", graphs.cache_folder)


def test_where_compiled_kernels_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variables, folder in (({"TRIFORCE_CACHE": "~/kept"}, "kept"), ({"XDG_CACHE_HOME": ""}, ".cache/triforce"),
                              ({"XDG_CACHE_HOME": str(tmp_path / "elsewhere")}, "elsewhere/triforce")):
        monkeypatch.delenv("TRIFORCE_CACHE")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert graphs.cache_folder() == tmp_path / folder
        monkeypatch.setenv("TRIFORCE_CACHE", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIFORCE_CACHE", str(tmp_path / "file" / "below"))
    refused("TRIFORCE_CACHE", graphs.cache_folder)


@pytest.mark.parametrize("options", [{}, {"sampling": "coupled", "tree_size": 32}, {"max_batch_size": 2}])
def test_the_rounds_that_compile_take_every_step(options, monkeypatch):
    """Whatever plan follows, no answer waits for a compiler once more. Traced alone, which takes as many functions."""
    trace = functools.cache(functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="eager"))
    monkeypatch.setattr(graphs, "compiled", trace)
    target, draft = random_pair()
    engine = make_engine(target, draft, gamma="auto", gamma_inner=3, budget=128, flush_interval=32, compile=True,
                         **options)
    ids = [random_prompt(200 + 8 * row) for row in range(options.get("max_batch_size", 1))]
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256), torch.inference_mode():
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        state = engine.prepare(ids, 2000, temperature=0.8, seed=[0] * len(ids))
        traced, plans = torch._dynamo.utils.counters["stats"]["unique_graphs"], state.pilot.controller.plans
        assert traced > before + 5 and {plan.source for plan in plans if plan.retrieval} >= {*state.hierarchy.sources}
        for plan in plans:
            state.round(plan)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traced, plan
