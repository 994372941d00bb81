"""A copy of the target in fp8, for the retrieval level alone: it only drafts, so what is said stays exact.

Knows nothing of levels or caches. Embedding, output layer, norms and attention stay as they are, and are shared with
the target.
"""

import torch

from .errors import UserError
from .float8 import LAYERS, ScaledLinear, multiplies
from .model import ModelConfig, Transformer


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
        for name in LAYERS:
            owner, _, attribute = name.partition(".")
            setattr(mine.get_submodule(owner), attribute, ScaledLinear.of(theirs.get_submodule(name)))
    return (copy if target.group is None else copy.join(target.group)).eval()


def fp8_bytes(config) -> int:
    """Memory of `fp8_copy` beyond the target's own: a byte a weight of the blocks' linear layers."""
    attention = config.dim * config.head_dim * 2 * (config.n_head + config.n_kv_head)
    return config.n_layer * (attention + 3 * config.dim * config.ffn_dim)
