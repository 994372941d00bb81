"""Several ranks against one, as processes on a CPU; and what ranks share, without processes. Most of it is a promise of
the whole library, not of parallel.py alone; `parallel_worker.py` is what each rank runs."""

from dataclasses import replace

import pytest
import torch
from conftest import python, refused, slow
from families import build, config_json, save
from widen import shard

from triforce.engine.loading import check_draft_ranks
from triforce.errors import UserError
from triforce.hf.checkpoint import load_model
from triforce.hf.names import cut
from triforce.model import ModelConfig
from triforce.parallel import Group, from_environment, shard_config

CONFIG = ModelConfig(65, 32, 2, 8, 4, 8, 48)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.mark.parametrize("count", slow(2, 4, 8))
def test_ranks_compute_what_one_computes(count):
    done = python("tests/parallel_worker.py", count)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f"rank {rank} of {count} done" in done.stdout for rank in range(count))


def test_the_command_line_speaks_once(command):
    flags = ["--max-new-tokens", "12", "--temperature", "0", "--device", "cpu", "--gamma", "4"]
    text = "It was the best of times, it was the worst of times, it was the age of wisdom."
    alone = command("--prompt", text, *flags).out
    shared = python(*TORCHRUN, 2, "generate.py", "--prompt-file", "-", *flags, input=text)
    assert shared.returncode == 0, shared.stderr[-3000:]
    assert shared.stdout == alone != ""
    assert shared.stderr.count("time per token") == 1


def test_draft_ranks_are_checked():
    config, group = ModelConfig(64, 32, 2, 12, 6, 8, 48), Group(1, 4, "")
    assert check_draft_ranks([0, 1], group, config).n_kv_head == 3
    assert check_draft_ranks([0], group, config) is None
    for ranks, message in (([1], "first one 0"), ([0, 4], "below 4"), ([], "first one 0"), ([0, 1, 1], "ascending"),
                           ([0, 1, 2, 3], "4 ranks cannot share")):
        refused(message, check_draft_ranks, ranks, group, config)
    refused("start with torchrun", check_draft_ranks, [0], None, config)
    refused("add --draft", check_draft_ranks, [0], group, None)


def test_a_share_of_a_config():
    local = shard_config(CONFIG, Group(1, 2, ""))
    assert local == replace(CONFIG, n_head=4, n_kv_head=2, ffn_dim=24, num_shards=2)
    assert local.vocab_rows == 33 and shard_config(CONFIG, None) is CONFIG
    with pytest.raises(UserError, match="4 ranks cannot share 6 KV heads .* 1 or 2 or 3 or 6"):
        shard_config(replace(CONFIG, n_head=12, n_kv_head=6), Group(0, 4, ""))
    with pytest.raises(UserError, match="2 ranks cannot share 1 norm over all heads evenly; use --nproc-per-node 1$"):
        shard_config(replace(CONFIG, qk_norm=True, qk_norm_whole=True), Group(0, 2, ""))
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
    refused(r"WORLD_SIZE \(2\) is set, but not MASTER_PORT; start with torchrun", from_environment, "cpu")


@pytest.mark.slow
def test_a_mistake_that_rank_0_finds_is_told_once():
    done = python(*TORCHRUN, 2, "generate.py", "--prompt", "", "--device", "cpu")
    assert done.returncode != 0 and "the prompt is empty" in done.stderr
    assert "cli/main.py" not in done.stderr  # torchrun has a traceback of its own


@pytest.mark.quick
def test_a_rank_without_others_is_no_rank(monkeypatch, command):
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert command("--foo", status=2).err.startswith("error: --foo is not a known flag")


@pytest.mark.parametrize("family", ["Qwen3, biases", "Phi-4-mini", "GLM-4-9B", "Qwen3-30B-A3B", "gpt-oss"])
def test_a_rank_reads_its_share_of_a_checkpoint(family, tmp_path):
    """Also of tensors that hold several layers' rows, and of heads whose dimensions are put in order."""
    config = {**config_json(family), "num_key_value_heads": 2}
    folder = save(build(family, num_key_value_heads=2), config, tmp_path)
    whole = load_model(folder)
    for rank in range(2):
        group = Group(rank, 2, "")
        read, cut_out = load_model(folder, group=group), shard(whole, group)
        assert read.config == cut_out.config and read.config.n_kv_head == 1
        for found, expected in zip(read.parameters(), cut_out.parameters(), strict=True):
            assert torch.equal(found, expected)


def test_what_a_rank_gets_of_a_tensor():
    """A bias that is added before a sum is rank 0's, and the last share of the words may be shorter."""
    bias, words = torch.ones(32), torch.arange(65.0)[:, None].expand(65, 4)
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.down_proj.bias"):
        assert [float(cut(name, bias, (32,), Group(rank, 2, "")).sum()) for rank in range(2)] == [32, 0]
    shares = [cut("lm_head.weight", words, (17, 4), Group(rank, 4, "")) for rank in range(4)]
    assert torch.equal(torch.cat(shares), words) and [len(share) for share in shares] == [17, 17, 17, 14]
    assert [len(cut("lm_head.weight", words[:9], (3, 4), Group(rank, 4, ""))) for rank in range(4)] == [3, 3, 3, 0]
