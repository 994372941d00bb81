"""What a generation reports, by a clock that moves with the models: a prefill takes 100 s, a pass of the target 1 s."""

import copy
from types import SimpleNamespace

import pytest
from conftest import make_engine, random_prompt, refused

from triforce.decode.batch import DecodeBatch
from triforce.model import Transformer

PREFILL = 100.0


class Timed:
    """An engine whose time is what its target takes; the retrieval level, a copy of it, and the draft take none."""

    def __init__(self, pair, monkeypatch, **settings):
        target, draft = (copy.deepcopy(model) for model in pair)
        self.now, self.rows = 0.0, []
        drafting = copy.deepcopy(target)
        clock, prefill = SimpleNamespace(perf_counter=lambda: self.now), Transformer.prefill
        for module in ("engine.session", "decode.hierarchy"):
            monkeypatch.setattr(f"triforce.{module}.time", clock)

        def prefilled(model, *args, **more):
            self.now += PREFILL if model is target else 0.0
            return prefill(model, *args, **more)

        monkeypatch.setattr(Transformer, "prefill", prefilled)
        target.register_forward_pre_hook(lambda _, args: self.step(args[0].shape[1]))
        made = {"flush_interval": 16, "chunk_size": 4, "rebuild_interval": 16, "max_seq_len": 300, **settings}
        self.engine = make_engine(target, draft, drafting=drafting, budget=64, max_batch_size=2, **made)

    def step(self, rows):
        self.rows.append(rows)
        self.now += 1.0


def test_times_of_autoregression(pair, monkeypatch):
    timed = Timed(pair, monkeypatch)
    for one_row in (False, True):
        timed.rows.clear()
        stats = timed.engine.generate(random_prompt(100), 20, temperature=0.0, speculate=False, one_row=one_row).stats
        assert stats.ttft == (1 if one_row else PREFILL + 1)  # the second call takes the prefill over
        assert stats.tbt == 1 and stats.tokens_per_second == 1
        assert timed.rows == [1 if one_row else 4] * 20  # unpadded steps are the faster ones
        assert stats.target_forwards == 20 and stats.block_efficiency == 1


def test_nothing_is_left_out_of_the_times(pair, monkeypatch):
    """With gamma="auto", a text of a fresh engine takes a prefill and its rounds: no step is run only to be timed."""
    timed = Timed(pair, monkeypatch, gamma="auto")
    stats = timed.engine.generate(random_prompt(100), 60, temperature=0.0).stats
    assert stats.prefill == PREFILL and stats.ttft == PREFILL + 1  # the first round is plain, and waits for nothing
    assert stats.decode == stats.target_forwards - 1 == len(timed.rows) - 1
    assert stats.tbt == pytest.approx(stats.decode / 59)


def test_counts(pair, monkeypatch):
    engine = Timed(pair, monkeypatch).engine
    stats = engine.generate(random_prompt(100), 48, temperature=0.0).stats
    state = engine.prepare([random_prompt(100)], 48, temperature=0.0, top_p=1.0, top_k=None, min_p=None, seed=[0])
    emitted = 0
    while emitted < 48:
        emitted += len(state.round()[0])
    assert stats.target_forwards == state.num_forwards and stats.block_efficiency == 48 / state.num_forwards
    assert state.num_flushes == 3  # at 112, 128 and 144 tokens
    assert stats.retrieval_rebuilds == state.hierarchy.view.num_rebuilds >= 2
    assert stats.acceptance_rate == state.hierarchy.acceptance_rates()[0]


def test_rows_that_have_ended_are_left_alone_and_report_what_was_theirs(pair, monkeypatch):
    said, rates, step = [0, 0], [None, None], DecodeBatch.round

    def observed(self, *args):
        before, emitted = list(said), step(self, *args)
        for row, tokens in enumerate(emitted):
            assert bool(tokens) == (before[row] < 40)
            said[row] += len(tokens)
            if before[row] < 40 <= said[row]:
                rates[row] = self.num_forwards, self.hierarchy.acceptance_rates()[row]
        return emitted

    monkeypatch.setattr(DecodeBatch, "round", observed)
    engine = Timed(pair, monkeypatch).engine
    outs = engine.generate([random_prompt(100), random_prompt(30)], 40, seed=3, temperature=0.8)
    assert [(out.stats.target_forwards, out.stats.acceptance_rate) for out in outs] == rates
    assert rates[0][0] != rates[1][0] and rates[0][1]["full"] != rates[1][1]["full"]


def test_what_just_fits_is_taken(pair, monkeypatch):
    engine = Timed(pair, monkeypatch).engine
    assert len(engine.generate(random_prompt(290), 10).tokens) == 10
    refused(r"exceed max_seq_len \(300\)", engine.generate, random_prompt(290), 11)
