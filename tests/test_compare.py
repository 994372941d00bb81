"""The table of a comparison, and what a comparison leaves behind."""

import pytest
from conftest import make_engine, random_prompt

from triforce import compare
from triforce.generation import Stats


def test_a_comparison_leaves_no_plan_behind(pair):
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64)
    prompt = random_prompt(100)
    before = engine.generate(prompt, 40, temperature=0.0)
    _, report = compare.compare(engine, prompt, 40, {"temperature": 0.0, "seed": 5}, before.stats, True)
    after = engine.generate(prompt, 40, temperature=0.0)
    assert after.tokens == before.tokens and after.stats.target_forwards == before.stats.target_forwards < 40
    assert report["greedy_first_difference"] is None and report["greedy_tokens"] == 40 and report["speedup"] > 0


def test_the_table():
    """The whole run first: what both have in common, and then the tokens of each; with the least and the most."""
    stats = Stats(100, new_tokens=101, load=2.0, ttft=8.0)
    lines, report = compare.table([(0.2, 0.1, 0.3), (0.4, 0.4, 0.5)], stats, ["speculation", "autoregression"])
    assert report["speedup"] == pytest.approx(2) and report["speedup_of_run"] == pytest.approx(50 / 30)
    assert "whole run, 101 tokens" in lines[1] and "30.0 s (20.0 to 40.0)" in lines[1]
    assert "50.0 s (50.0 to 60.0)" in lines[1] and "200.0 ms (100.0 to 300.0)" in lines[2]
    assert "2.00x" in lines[4] and all(len(line) <= 80 for line in lines)


def test_too_few_tokens_to_compare(pair):
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64)
    stats = engine.generate(random_prompt(60), 1, temperature=0.0).stats
    lines, report = compare.compare(engine, random_prompt(60), 1, {"temperature": 0.0}, stats, True)
    assert "too few" in lines[0] and "speedup" not in report and report["greedy_first_difference"] is None
