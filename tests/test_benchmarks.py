"""Benchmarks that have no tests of their own run on the embedded pair, and write the rows that they promise."""

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
