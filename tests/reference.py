"""The slow twin of every cache: all keys and values in one growing tensor, attention by plain float arithmetic.

Knows nothing of prefixes, tails, views or blocks; it is what those must agree with.
"""

import torch
from torch import Tensor

from triforce.attention import rotate
from triforce.model import RotaryEmbedding, Transformer, eager


class DenseKV:
    """A `kv` for `Transformer.forward`: appends what it is given, rotated at its absolute position, attends causally.

    Args:
        start: absolute position of the first token.
    """

    def __init__(self, rope: RotaryEmbedding, start: int = 0):
        self.rope, self.start = rope, start
        self.n_head, self.n_kv_head = rope.config.n_head, rope.config.n_kv_head
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    compiled = staticmethod(eager)

    def layer(self, layer: int) -> "DenseLayer":
        return DenseLayer(self, layer)

    def attend(self, layer: int, heads: Tensor) -> Tensor:
        """Unrotated queries, keys and values [B, H + 2K, M, D] -> [B, H, M, D]."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        past = self.keys[layer].shape[2] if layer in self.keys else 0
        new, group = q.shape[2], q.shape[1] // k.shape[1]
        positions = torch.arange(past, past + new, device=q.device)
        cos, sin = self.rope(positions + self.start)  # [M, D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past:
            k, v = torch.cat([self.keys[layer], k], 2), torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))  # [B, H, S, D]
        scores = q.to(dtype) @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5  # [B, H, M, S]
        hidden = torch.arange(past + new, device=q.device) > positions[:, None]
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).to(q.dtype)

    def truncate(self, length: int) -> None:
        """Forgets everything from the given number of tokens on."""
        for cache in (self.keys, self.values):
            for layer in cache:
                cache[layer] = cache[layer][:, :, :length]


class DenseLayer:
    def __init__(self, kv: DenseKV, layer: int):
        self.kv, self.i = kv, layer

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        return heads, [(self.kv.attend(self.i, heads), None)]

    def read(self, q: Tensor) -> list:
        return []


@torch.no_grad()
def dense_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """tokens [B, S] -> logits [B, S, V]."""
    return model.output(model(tokens, DenseKV(model.rope)))


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
