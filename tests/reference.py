"""What models and distributions must agree with: plain arithmetic."""

import torch
from torch import Tensor

from triforce import naive
from triforce.model import Transformer


@torch.no_grad()
def dense_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """tokens [B, S] -> logits [B, S, V]."""
    return torch.stack([naive.forward(model, row)[0] for row in tokens.tolist()])


def reference_filter(probs: list[float], sampling: dict) -> list[float]:
    """Top-k, top-p and min-p by their definitions, one token at a time."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = order[: sampling["top_k"] or len(order)]
    total, mass, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        if mass < sampling["top_p"] * total:
            nucleus.append(i)
        mass += probs[i]
    nucleus = [i for i in nucleus if probs[i] >= (sampling["min_p"] or 0.0) * max(probs)]
    norm = sum(probs[i] for i in nucleus)
    return [probs[i] / norm if i in nucleus else 0.0 for i in range(len(probs))]
