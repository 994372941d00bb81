"""Several ranks against one, as processes on a CPU; and what ranks share, without processes.

Most of it is a promise of the whole library, not of parallel.py alone; `parallel_worker.py` is what each rank runs.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import slow

from triforce import cli
from triforce.engine.loading import check_draft_ranks
from triforce.errors import UserError
from triforce.model import ModelConfig
from triforce.parallel import Group, from_environment, shard_config

CONFIG = ModelConfig(65, 32, 2, 8, 4, 8, 48)
ROOT = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(count: int, *command: str, **kw) -> subprocess.CompletedProcess:
    return run([*TORCHRUN, str(count), *command], **kw)


def run(command: list[str], **kw) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **{"timeout": 240, **kw})


@pytest.mark.parametrize("count", [2, *slow(4, 8)])
def test_ranks_compute_what_one_computes(count):
    done = run([sys.executable, "tests/parallel_worker.py", str(count)])
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"rank {rank} of {count} done" in done.stdout for rank in range(count))


def test_the_command_line_speaks_once(capsys):
    flags = ["--max-new-tokens", "12", "--temperature", "0", "--device", "cpu", "--gamma", "4"]
    text = "It was the best of times, it was the worst of times, it was the age of wisdom."
    assert cli.main(["--prompt", text, *flags]) == 0
    alone = capsys.readouterr().out
    shared = torchrun(2, "generate.py", "--prompt-file", "-", *flags, input=text)
    assert shared.returncode == 0, shared.stderr[-3000:]
    assert shared.stdout == alone != ""
    assert shared.stderr.count("time per token") == 1


def test_uneven_shares_are_refused():
    config = ModelConfig(64, 32, 2, 12, 6, 8, 48)
    assert shard_config(config, Group(0, 3, "")).n_kv_head == 2
    with pytest.raises(UserError, match="4 ranks cannot share 6 KV heads .* 1 or 2 or 3 or 6"):
        shard_config(config, Group(0, 4, ""))
    done = run([sys.executable, "tests/parallel_worker.py", "3", "--prompt", "Once", "--device", "cpu"])
    assert done.returncode != 0
    assert done.stderr.count("error: 3 ranks cannot share 4 KV heads evenly; use --nproc-per-node 1 or 2 or 4") == 1


def test_draft_ranks_are_checked():
    config, group = ModelConfig(64, 32, 2, 12, 6, 8, 48), Group(1, 4, "")
    assert check_draft_ranks([0, 1], group, config).n_kv_head == 3
    assert check_draft_ranks([0], group, config) is None
    for ranks, message in (([1], "rank 0"), ([0, 4], "0 to 3"), ([], "rank 0"), ([0, 1, 1], "ascending"),
                           ([0, 1, 2, 3], "4 ranks cannot share")):
        with pytest.raises(UserError, match=message):
            check_draft_ranks(ranks, group, config)
    with pytest.raises(UserError, match="start with torchrun"):
        check_draft_ranks([0], None, config)
    with pytest.raises(UserError, match="add --draft"):
        check_draft_ranks([0], group, None)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a process that has just ended
        return ""


@pytest.mark.slow
def test_a_killed_rank_ends_the_others():
    command = [*TORCHRUN, "2", "generate.py", "--device", "cpu", "--max-new-tokens", "4000"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline, ranks = time.monotonic() + 60, []
        while len(ranks) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
            ranks = [int(status.parent.name) for status in Path("/proc").glob("[0-9]*/status")
                     if f"PPid:\t{launcher.pid}\n" in read(status)]
        assert len(ranks) == 2
        time.sleep(5)  # into the prefill
        os.kill(ranks[-1], signal.SIGKILL)
        killed = time.monotonic()
        launcher.wait(timeout=70)
        assert launcher.returncode != 0 and time.monotonic() - killed < 60
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def test_a_share_of_a_config():
    local = shard_config(CONFIG, Group(1, 2, ""))
    assert local == replace(CONFIG, n_head=4, n_kv_head=2, ffn_dim=24, num_shards=2)
    assert local.vocab_rows == 33 and shard_config(CONFIG, None) is CONFIG
    with pytest.raises(UserError, match="4 ranks cannot share 50 MLP rows evenly; use --nproc-per-node 1 or 2$"):
        shard_config(replace(CONFIG, ffn_dim=50), Group(0, 4, ""))
    with pytest.raises(UserError, match="4 ranks cannot share 6 heads evenly; use --nproc-per-node 1$"):
        shard_config(replace(CONFIG, n_head=6, n_kv_head=4, ffn_dim=9), Group(0, 4, ""))


def test_half_an_environment_is_named(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment("cpu") == (None, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match=r"WORLD_SIZE \(2\) is set, but not MASTER_PORT; start with torchrun"):
        from_environment("cpu")


@pytest.mark.slow
def test_a_mistake_that_rank_0_finds_is_told_once():
    done = torchrun(2, "generate.py", "--prompt", "", "--device", "cpu")
    assert done.returncode != 0 and "the prompt is empty" in done.stderr
    assert "cli/main.py" not in done.stderr  # torchrun has a traceback of its own


@pytest.mark.quick
def test_a_rank_without_others_is_no_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["--foo"]) == 2
    assert capsys.readouterr().err.startswith("error: --foo is not a known flag")
