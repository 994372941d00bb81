"""Benchmarks that have no tests of their own run on the embedded pair, and write the rows that they promise."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("command,key,expected", [
    (["million", "--tokens", "600", "900", "--new", "8", "--device", "cpu"], "context", {600, 900}),
    (["coupled", "--context", "600", "--gammas", "auto", "--ways", "rejection", "coupled, tree", "--tree-size", "64",
      "--side-by-side", "--samples", "2", "--seeds", "1", "--max-new-tokens", "24", "--warm-up", "4", "--same", "8",
      "--device", "cpu"],
     "rule", {"rejection", "coupled, tree"}),
    (["float8", "--contexts", "600", "--max-new-tokens", "4", "--device", "cpu"], "context", {600, None}),
    (["first_tokens", "--context", "600", "--texts", "1", "--new", "2", "6"], "speculate", {True, False}),
    (["first_tokens", "--context", "600", "--texts", "1", "--new", "6", "--wrong", "--gpus", "2"], "wrong",
     {True}),
], ids=lambda value: value[0] if isinstance(value, list) else "")
def test_it_writes_its_rows(command, key, expected, tmp_path):
    name, *flags = command
    out = tmp_path / "rows.jsonl"
    done = subprocess.run([sys.executable, f"benchmarks/{name}.py", *flags, "--out", str(out)],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row.get(key) for row in rows} == expected


def test_a_plot_of_questions_shows_what_was_asked(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    questions, figures = importlib.import_module("questions"), []
    monkeypatch.setattr(questions, "save", lambda figure, *_: figures.append(figure))
    row = {"ms_a_token": 2.0, "shape": None, "checkpoint": "tiny", "offload": False, "gpus": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"what": what, **row}) + "\n" for what in ("prefill", "one by one")))
    questions.plot(path)
    [axes] = figures[0].axes
    assert [line.get_label() for line in axes.lines] == ["one by one"]


def test_tables_of_first_tokens_say_what_was_saved(tmp_path, monkeypatch, capsys):
    """Run by run, and text by text: half a second of five is lost in the one run, and saved in the other."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    first_tokens = importlib.import_module("first_tokens")
    rows = []
    for code, took in (("a", 1.5), ("b", 0.5)):
        for speculate, after in ((True, took), (False, 1.0)):
            rows += [{"code": code, "text": text, "speculate": speculate, "load": 3.0 + text, "prefill": 1.0,
                      "preparing": 0.0, "tokens_a_verify": 1.0, "tokens": [32], "from_prefill": [after],
                      "from_start": [4.0 + text + after]} for text in (0, 0, 1, -1)]
    first_tokens.print_tables([*rows, {**rows[0], "code": "c"}])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if " tokens " in line and "%" in line] == ["-10.0%", "+10.0%"]
    assert [line for line in lines if "code" in line] == ["code a", "code b", "code c"]
    assert sum("3 texts" in line for line in lines) == 2 and "no text has both rows" in lines


@pytest.mark.slow
def test_of_several_ranks_the_first_one_writes(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/coupled.py",
               "--context", "600", "--gammas", "4", "--ways", "coupled", "--seeds", "1", "--max-new-tokens", "12",
               "--same", "8", "--no-draws", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["temperature"] for row in rows] == [0.6, 1.0] and all(row["same_as_without"] for row in rows)
    assert done.stdout.count("--- coupled") == 2
