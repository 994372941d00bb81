"""A copy of the target in fp8, for the retrieval level alone: it only drafts, so what is said stays exact.

Knows nothing of levels or caches. Weights are e4m3 with one scale a matrix, activations with one a row (tensor cores of
compute capability 8.9 and later are fast with one scale a tensor, so the rows' are applied to the product). Embedding,
output layer, norms and attention stay as they are, and are shared with the target.
"""

import torch
from torch import Tensor, nn

from .errors import UserError
from .float8 import LARGEST, multiplies, product, quantize, row_scales
from .model import Linear, ModelConfig, Transformer

OUTLIERS = 32.0  # an RMSNorm's output has a root mean square of 1 before its weight: clamp at 32 of these


class Float8Linear(nn.Module):
    """y = x @ weight.T with both operands in fp8.

    Args:
        norm_weight: of the RMSNorm whose output is x: it bounds x, so that its scale is known beforehand. None: each
            row has a scale of its own, by its largest element. (One for the whole block would let a drafted token
            change the law that it is checked by.)
    """

    def __init__(self, linear: Linear, norm_weight: Tensor | None):
        super().__init__()
        weight = linear.weight.detach()
        scale = (weight.abs().amax().float() / LARGEST).clamp(min=1e-12)
        self.register_buffer("weight", quantize(weight, weight.device, scale)[0])
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        largest_x = None if norm_weight is None else OUTLIERS * norm_weight.detach().abs().amax().float()
        self.register_buffer("scale_x", None if largest_x is None else (largest_x / LARGEST).clamp(min=1e-12))
        self.register_buffer("one", torch.ones_like(scale))

    def forward(self, x: Tensor) -> Tensor:
        scale_x = self.scale_x
        if scale_x is None:
            scale_x = row_scales(x)
        wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        y = product(x, scale_x, self.weight, self.scale, self.one, wide).to(x.dtype)
        return y if self.bias is None else y + self.bias


def check_fp8(config: ModelConfig, device: torch.device) -> None:
    """Raises UserError where fp8 matrix products are not to be had, or the copy would be one of fp8."""
    check_wide(config)
    if device.type != "cuda":
        raise UserError(f"draft_dtype 'fp8' needs a CUDA GPU, and the model is on {device}; leave it out")
    if not multiplies(device):
        capability = torch.cuda.get_device_capability(device)
        raise UserError(f"draft_dtype 'fp8' needs compute capability 8.9 or later, and this GPU has "
                        f"{capability[0]}.{capability[1]}; leave it out")


def check_wide(config: ModelConfig) -> None:
    """Raises UserError where the weights are fp8 already."""
    if config.float8 is not None:
        raise UserError("draft_dtype 'fp8' copies wider weights, and this target's are fp8 already; leave it out")


@torch.no_grad()
def fp8_copy(target: Transformer) -> Transformer:
    """The target with the linear layers of its blocks in fp8; the rest, the output layer too, is shared, not copied."""
    with torch.device("meta"):
        copy = Transformer(target.config)
    copy.rope, copy.embedding, copy.norm, copy.output = target.rope, target.embedding, target.norm, target.output
    for mine, theirs in zip(copy.layers, target.layers, strict=True):
        mine.attention_norm, mine.mlp_norm = theirs.attention_norm, theirs.mlp_norm
        mine.attention.q_norm, mine.attention.k_norm = theirs.attention.q_norm, theirs.attention.k_norm
        mine.attention.qkv = Float8Linear(theirs.attention.qkv, theirs.attention_norm.weight)
        mine.attention.out = Float8Linear(theirs.attention.out, None)
        mine.mlp.gate_up = Float8Linear(theirs.mlp.gate_up, theirs.mlp_norm.weight)
        mine.mlp.down = Float8Linear(theirs.mlp.down, None)
    return (copy if target.group is None else copy.join(target.group)).eval()


def fp8_bytes(config) -> int:
    """Memory of `fp8_copy` beyond the target's own: a byte a weight of the blocks' linear layers."""
    attention = config.dim * config.head_dim * 2 * (config.n_head + config.n_kv_head)
    return config.n_layer * (attention + 3 * config.dim * config.ffn_dim)
