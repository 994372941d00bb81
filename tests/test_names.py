"""Shares of a model without processes: ranks compute one after the other, and what they exchange is put together here.

`tests/test_parallel.py` has them as processes.
"""

import pytest
import torch
from families import build, config_json, save
from widen import shard

from triforce.hf.checkpoint import load_model
from triforce.hf.names import cut
from triforce.model import ModelConfig, Transformer
from triforce.parallel import Group

CONFIG = ModelConfig(65, 32, 2, 8, 4, 8, 48, qkv_bias=True, out_bias=True, mlp_bias=True,
                     qk_norm=True, rotary_factor=0.5)


class Alone(Group):
    """A rank whose sums are only its own part; what it gathers is given to it."""

    parts: torch.Tensor

    def all_reduce(self, x):
        return x

    def all_gather(self, x):
        return self.parts


@pytest.fixture
def shares():
    whole = Transformer.random(CONFIG, std=0.3)
    groups = [Alone(rank, 4, "") for rank in range(4)]
    return whole, groups, [shard(whole, group) for group in groups]


@torch.no_grad()
def test_parts_add_up(shares):
    whole, groups, parts = shares
    tokens = torch.arange(65)[None]
    x = whole.embedding(tokens)
    torch.testing.assert_close(sum(part.embedding(tokens) for part in parts), x)
    for part in parts:
        assert part.embedding.weight.shape[0] == part.output.weight.shape[0] == 17  # 65 over 4, rounded up
    for i in range(CONFIG.n_layer):
        torch.testing.assert_close(sum(part.layers[i].mlp(x) for part in parts), whole.layers[i].mlp(x))
        heads = torch.randn(1, 8, 65, 8)
        outputs = [part.layers[i].attention.output([(heads[:, 2 * rank : 2 * rank + 2], None)], x.dtype)
                   for rank, part in enumerate(parts)]
        expected = whole.layers[i].attention.output([(heads, None)], x.dtype)
        torch.testing.assert_close(sum(outputs), expected)
        projected = whole.layers[i].attention.project(x).split([8, 4, 4], 1)
        for rank, part in enumerate(parts):
            mine = part.layers[i].attention.project(x).split([2, 1, 1], 1)
            for kind, (found, all_heads) in enumerate(zip(mine, projected, strict=True)):
                count = 2 if kind == 0 else 1
                torch.testing.assert_close(found, all_heads[:, rank * count : (rank + 1) * count])


@torch.no_grad()
def test_logits_stand_in_the_vocabularys_order(shares):
    whole, groups, parts = shares
    x = torch.randn(2, 3, 32)
    gathered = torch.stack([torch.nn.functional.linear(x, part.output.weight) for part in parts])
    for part, group in zip(parts, groups, strict=True):
        object.__setattr__(group, "parts", gathered)
        part.output.vocab_size = 65
        torch.testing.assert_close(part.output(x), whole.output(x))


@pytest.mark.parametrize("family", ["Qwen3, biases", "Phi-4-mini", "GLM-4-9B"])
def test_a_rank_reads_its_share_of_a_checkpoint(family, tmp_path):
    """Also of tensors that hold several layers' rows, and of heads whose dimensions are put in order."""
    config = {**config_json(family), "num_key_value_heads": 2}
    folder = save(build(family, num_key_value_heads=2), config, tmp_path)
    whole = load_model(folder)
    for rank in range(2):
        group = Alone(rank, 2, "")
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
