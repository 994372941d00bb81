"""Speculation and autoregression take turns in one text, and the table says what that showed."""

import pytest
from conftest import make_engine, random_prompt

from triforce import compare
from triforce.generation import Stats
from triforce.plan import ONE_ROW
from triforce.state import State


@pytest.fixture
def clock(monkeypatch):
    """Seconds pass only in rounds: 1 a token with speculation, 3 without, and 10 in the first one."""
    now, plans = [0.0], []
    real = State.round

    def round(state, plan=None):
        emitted = real(state, plan)
        now[0] += (3.0 if plan == ONE_ROW else 1.0) * len(emitted[0]) if plans else 10.0
        plans.append((plan, len(emitted[0])))
        return emitted

    monkeypatch.setattr(State, "round", round)
    monkeypatch.setattr(compare.time, "perf_counter", lambda: now[0])
    return plans


def test_blocks_take_turns_in_one_text(pair, clock):
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64)
    ours, plain = compare.take_turns(engine, random_prompt(100), 120, temperature=0.0)
    assert set(ours) == {1.0} and set(plain) == {3.0} and len(ours) + len(plain) >= 6
    assert sum(count for _, count in clock) == 120  # all of it one text
    turns = [plan == ONE_ROW for plan, _ in clock]
    changes = [i for i in range(1, len(turns)) if turns[i] != turns[i - 1]]
    assert len(changes) >= 7 and not turns[0] and turns[1]
    for begin, end in zip(changes, changes[1:], strict=False):
        assert sum(count for _, count in clock[begin:end]) >= 10


def test_a_comparison_leaves_no_plan_behind(pair):
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64)
    prompt = random_prompt(100)
    before = engine.generate(prompt, 40, temperature=0.0)
    _, report = compare.compare(engine, prompt, 40, {"temperature": 0.0, "seed": 5}, before.stats, True)
    after = engine.generate(prompt, 40, temperature=0.0)
    assert after.tokens == before.tokens and after.stats.target_forwards == before.stats.target_forwards < 40
    assert report["greedy_first_difference"] is None and report["speculation"]["blocks"]


def test_the_table():
    """The whole run first: what both have in common, and then the tokens of each."""
    stats = Stats(100, new_tokens=101, load=2.0, ttft=8.0)
    lines, report = compare.table([0.1, 0.3], [0.3, 0.5, 0.4], stats, "speculation")
    assert report["speedup"] == pytest.approx(2) and report["speedup_of_run"] == pytest.approx(50 / 30)
    assert [line.split()[:3] for line in lines[1:5]] == [["whole", "run,", "101"], ["time", "per", "token"],
                                                         ["speed-up", "of", "the"], ["speed-up", "per", "token"]]
    assert "30.0 s (20.0 to 40.0)" in lines[1] and "50.0 s (40.0 to 60.0)" in lines[1]
    assert "200 ms (100 to 300)" in lines[2] and "2.00x (1.67 to 3.00)" in lines[4]
    assert all(len(line) <= 80 for line in lines)


def test_too_few_tokens_to_compare(pair):
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64)
    stats = engine.generate(random_prompt(60), 1, temperature=0.0).stats
    lines, report = compare.compare(engine, random_prompt(60), 1, {"temperature": 0.0}, stats, True)
    assert "too few" in lines[0] and "speedup" not in report and report["greedy_first_difference"] is None
