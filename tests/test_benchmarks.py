"""Benchmarks that have no tests of their own run on the embedded pair, and write the rows that they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("command,key,expected", [
    (["on_chip", "--contexts", "600", "--seeds", "1", "--max-new-tokens", "32", "--warm-up", "16", "--plain-tokens",
      "4", "--device", "cpu"], "context", {600}),
    (["batch", "--contexts", "400", "--batches", "2", "--ways", "draft", "--gammas", "2", "--rounds", "4", "--warm-up",
      "8", "--device", "cpu"], "way", {"autoregression", "draft"}),
    (["questions", "--context", "600", "--questions", "2", "--samples", "2", "--singles", "1", "--max-new-tokens", "16",
      "--device", "cpu"], "gpus", {1}),
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
