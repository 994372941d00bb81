"""The fp8 copy: what it shares, how near its layers are, and where it is refused."""

import pytest

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


def test_refused_without_the_hardware():
    with pytest.raises(UserError, match="draft_dtype 'fp8' needs a CUDA GPU"):
        triforce.load("tiny", device="cpu", draft_dtype="fp8")
    with pytest.raises(UserError, match="retrieval=False leaves out"):
        triforce.load("tiny", device="cpu", draft_dtype="fp8", retrieval=False)
    with pytest.raises(UserError, match="must be 'fp8'"):
        triforce.load("tiny", device="cpu", draft_dtype="int4")
