"""The fp8 copy: what it shares, how near its layers are, and where it is refused."""

import pytest
import torch
from conftest import VOCAB, make_state, random_prompt, run_rounds

import triforce
from triforce.errors import UserError
from triforce.model import ModelConfig, Transformer
from triforce.quantize import FP8, Float8Linear, fp8_bytes, fp8_copy


def test_weights_are_near_and_the_rest_is_shared():
    config = ModelConfig(64, 32, 2, 4, 2, 16, 48, qkv_bias=True)
    target = Transformer.random(config, std=0.3)
    copy = fp8_copy(target)
    assert copy.embedding is target.embedding and copy.output is target.output and copy.norm is target.norm
    assert fp8_bytes(config) == sum(x.nbytes for x in copy.buffers() if x.dtype == FP8)
    for mine, theirs in zip(copy.layers, target.layers, strict=True):
        assert mine.attention_norm is theirs.attention_norm and mine.attention.qkv.bias is theirs.attention.qkv.bias
        for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"):
            quantized, linear = mine.get_submodule(name), theirs.get_submodule(name)
            assert isinstance(quantized, Float8Linear)
            restored = quantized.weight.float() * quantized.scale
            assert (restored - linear.weight).norm() / linear.weight.norm() < 0.04
            assert (quantized.scale_x is None) == (name in ("attention.out", "mlp.down"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_drafted_in_fp8_is_accepted(dtype):
    """Also with a layer that adds nothing, as models have that were made deeper: its matrices are zeros."""
    config = ModelConfig(VOCAB, 64, 3, 4, 2, 16, 128, max_position_embeddings=4096)
    target = Transformer.random(config, std=0.1, dtype=dtype)
    for linear in (target.layers[1].attention.out, target.layers[1].mlp.down):
        linear.weight.zero_()
    copy = fp8_copy(target)
    assert all(x.float().isfinite().all() for x in copy.buffers())
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
