"""fp8 layers compute nearly what they were made of: in size, with biases, with outliers, each with its own norm."""

import pytest
import torch

from triforce.model import ModelConfig, Transformer
from triforce.quantize import Float8Linear, fp8_copy


def off(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_a_layer_with_a_scale_for_each_row(bias, size):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias)
    x = size * torch.randn(2, 5, 64) * torch.tensor([1.0, 0.01, 3.0, 0.3, 10.0])[:, None]
    with torch.no_grad():
        found, expected = Float8Linear(linear, None)(x), linear(x)
        for row in range(5):
            assert off(found[:, row], expected[:, row]) < 0.05


def test_layers_behind_norms_keep_their_outliers():
    """An RMSNorm's output may have an element of many times its root mean square, times that norm's own weight."""
    torch.manual_seed(0)
    config = ModelConfig(64, 64, 2, 4, 2, 16, 96, qkv_bias=True, mlp_bias=True)
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
