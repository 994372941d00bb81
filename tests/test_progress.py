"""Bars where there is somebody to look, whatever of tqdm is there."""

import sys
import time
from types import SimpleNamespace

import pytest
from conftest import make_engine, random_prompt

from triforce import progress

SIZES = {"flush_interval": 16, "chunk_size": 4, "budget": 64}


class Drawn:
    """In the place of a bar of tqdm: what it was told."""

    made: list = []

    def __init__(self, what, total, unit):
        self.what, self.total, self.n, self.seen, self.closed = what, total, 0, [], 0
        Drawn.made.append(self)

    def update(self, more):
        self.n += more
        self.seen.append(self.n)

    def close(self):
        self.closed += 1


@pytest.fixture
def drawn(monkeypatch):
    Drawn.made = []
    monkeypatch.setattr(progress, "make", Drawn)
    return Drawn.made


@pytest.fixture
def notebook(monkeypatch):
    shell = SimpleNamespace(kernel=object(), config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_a_bar_follows_the_work(drawn):
    bar = progress.Bar("prefill", 200)
    bar(1.0)
    assert drawn == []  # it was done before anybody could look
    bar(0.25)
    bar(0.5)
    assert drawn[0].seen == [50, 100] and not drawn[0].closed
    bar(1.0)
    bar(1.0)  # said twice
    assert drawn[0].closed == 1 and len(drawn) == 1
    bar(0.1)  # the next group of prompts
    assert drawn[1].seen == [20]
    bar.count(10)  # and another
    assert drawn[1].closed == 1 and drawn[2].seen == [10]
    bar.close()
    bar.close()
    assert drawn[2].closed == 1


def test_a_notebook_shows_bars(pair, notebook, drawn):
    engine = make_engine(*pair, **SIZES, max_batch_size=2, prefill_chunk_size=8)
    engine.generate([random_prompt(40), random_prompt(30), random_prompt(60)], 20)
    assert {bar.what for bar in drawn} == {"prefill", "decode"}
    assert all(bar.closed == 1 for bar in drawn)
    assert [bar.seen[-1] for bar in drawn if bar.what == "decode"] == [60]  # of both groups
    drawn.clear()
    for _ in engine.stream(random_prompt(50, seed=1), 5):
        pass
    assert [bar.what for bar in drawn] == ["prefill"]  # what is said shows how far it is
    drawn.clear()
    engine.generate(random_prompt(45), 5, on_decode=lambda count: None)
    assert drawn == []  # the caller has his own


def test_progress_is_of_all_prompts(pair):
    """However many of them run side by side."""
    engine, shares, counts = make_engine(*pair, **SIZES, max_batch_size=2, prefill_chunk_size=8), [], []
    engine.generate([random_prompt(40), random_prompt(30), random_prompt(60)], 20, on_prefill=shares.append,
                    on_decode=counts.append)
    assert counts == sorted(counts) and counts[-1] == 60
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] == 1.0


def test_a_shell_of_ipython_is_no_notebook(monkeypatch):
    for shell in (None, SimpleNamespace(config={})):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not progress.in_notebook()


def test_a_notebook_without_widgets_gets_text(notebook, monkeypatch, capsys, recwarn):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    bar = progress.Bar("prefill", 100)
    for step in range(1, 5):
        time.sleep(0.4)  # a bar is drawn after a second
        bar(step / 5)
    assert "prefill" in (shown := capsys.readouterr().err) and "80%" in shown
    bar.close()
    assert not recwarn.list and bar.bar is None
