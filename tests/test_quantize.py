"""The fp8 copy: what it shares, how near its layers are - in size, with biases, with outliers, each with its own norm -
and where it is refused.
"""

import pytest
import torch
from conftest import VOCAB, make_state, random_prompt, run_rounds

import triforce
from triforce.errors import UserError
from triforce.fp8 import FP8, ScaledLinear, copy_bytes, fp8_copy
from triforce.model import ModelConfig, Transformer


def test_weights_are_near_and_the_rest_is_shared():
    config = ModelConfig(64, 32, 2, 4, 2, 16, 48, qkv_bias=True, qk_norm=True)
    target = Transformer.random(config, std=0.3)
    copy = fp8_copy(target)
    assert copy.embedding is target.embedding and copy.output is target.output and copy.norm is target.norm
    assert copy_bytes(config) == sum(x.nbytes for x in copy.parameters() if x.dtype == FP8)
    for mine, theirs in zip(copy.layers, target.layers, strict=True):
        assert mine.attention.q_norm is theirs.attention.q_norm and mine.attention.k_norm is theirs.attention.k_norm
        assert mine.attention_norm is theirs.attention_norm and mine.attention.qkv.bias is theirs.attention.qkv.bias
        for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"):
            quantized, linear = mine.get_submodule(name), theirs.get_submodule(name)
            assert isinstance(quantized, ScaledLinear)
            assert (quantized.widened(torch.float32) - linear.weight).norm() / linear.weight.norm() < 0.04


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_drafted_in_fp8_is_accepted(dtype):
    """Also with a layer that adds nothing, as models have that were made deeper: its matrices are zeros."""
    config = ModelConfig(VOCAB, 64, 3, 4, 2, 16, 128, max_position_embeddings=4096)
    target = Transformer.random(config, std=0.1, dtype=dtype)
    for linear in (target.layers[1].attention.out, target.layers[1].mlp.down):
        linear.weight.zero_()
    copy = fp8_copy(target)
    assert all(x.float().isfinite().all() for x in copy.parameters())
    rates = []
    for drafting in (None, copy):
        state = make_state(target, None, [random_prompt(200)], budget=512, drafting=drafting, gamma=4,
                           sampling={"temperature": 0.8})
        run_rounds(state, 80)
        rates.append(state.hierarchy.acceptance_rates()[0]["full"])
    assert rates[0] > 0.95 and rates[1] > 0.85


def test_refused_without_the_hardware():
    with pytest.raises(UserError, match="draft_dtype 'fp8' needs a CUDA GPU"):
        triforce.load("tiny", device="cpu", draft_dtype="fp8")
    with pytest.raises(UserError, match="retrieval=False leaves out"):
        triforce.load("tiny", device="cpu", draft_dtype="fp8", retrieval=False)
    with pytest.raises(UserError, match="must be 'fp8'"):
        triforce.load("tiny", device="cpu", draft_dtype="int4")


def off(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_a_layer_with_a_scale_for_each_row(bias, size):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias)
    x = size * torch.randn(2, 5, 64) * torch.tensor([1.0, 0.01, 3.0, 0.3, 10.0])[:, None]
    with torch.no_grad():
        found, expected = ScaledLinear.of(linear)(x), linear(x)
        for row in range(5):
            assert off(found[:, row], expected[:, row]) < 0.05


def test_layers_behind_norms_keep_their_outliers():
    """An RMSNorm's output may have an element of many times its root mean square, times that norm's own weight."""
    torch.manual_seed(0)
    config = ModelConfig(64, 64, 2, 4, 2, 16, 96, qkv_bias=True, mlp_bias=True, qk_norm=True)
    target = Transformer.random(config, std=0.3)
    for layer in target.layers:
        layer.attention_norm.weight.fill_(0.02)
        layer.mlp_norm.weight.fill_(3.0)
    x = torch.randn(1, 6, 64)
    x[..., 5] = 20.0
    with torch.no_grad():
        for mine, theirs in zip(fp8_copy(target).layers, target.layers, strict=True):
            assert off(mine.mlp(mine.mlp_norm(x)), theirs.mlp(theirs.mlp_norm(x))) < 0.1
            found = mine.attention.project(mine.attention_norm(x))
            assert off(found, theirs.attention.project(theirs.attention_norm(x))) < 0.1
