"""oneDNN's packed layout, the fastest on a CPU: for weights, and for a long prefix. Knows nothing of models or caches.

PyTorch's fused attention on a CPU is bound by memory for one row of queries and by arithmetic for more: 8 rows take
twice the time of one. oneDNN multiplies few rows by a large matrix much faster once that matrix is in its own blocked
layout, which is how the library's linear layers work too. So the prompt's part of the prefix is kept a second time,
packed, for blocks of several rows. Measured on two cores over 16,384 tokens, 4 heads of 64, 8 layers: 3 rows 15.6 ->
15.1 ms, 4 rows 23.0 -> 14.2, 6 rows 24.2 -> 17.2, 8 rows 27.7 -> 22.3; over 32,768: 34.0 -> 24.4, 44.3 -> 21.9,
54.8 -> 25.0 and 57.6 -> 38.0; 1 and 2 rows gain nothing.
"""

import torch
from torch import Tensor

from .attention import State

MIN_TOKENS = 4096  # of a prefix; below, an attention takes no time
MIN_ROWS = 3  # of queries
MANY_ROWS = 400  # from which on PyTorch's attention is faster: 512 take 68 ms there, and 93 over what is packed
ANY_ROWS = 64  # of a product: so many, or fewer, come in any number
PACKED_FOR = 8  # rows; products with fewer or more work too


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is such a layout here."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def in_few_shapes(function, x: Tensor) -> Tensor:
    """function(x) for x [..., D], row by row, with its rows filled up to one of few numbers. oneDNN makes code for each
    number of rows and keeps it, 0.2 MB of it: prompts have any number."""
    x, shape = x.flatten(0, -2), x.shape
    rows = len(x)
    if rows > ANY_ROWS:
        unit = ANY_ROWS if rows > 4 * ANY_ROWS else ANY_ROWS // 4
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % unit))
    return function(x)[:rows].unflatten(0, shape[:-1])


def pack(matrix: Tensor, rows: int) -> Tensor:
    """[N, D], for products with about `rows` rows; other numbers work too."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix, rows)


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D] times the transpose of what was packed: [..., N]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedPrefix:
    """K and V of one layer and one row of the batch, [K, S, D] float32 each."""

    def __init__(self, k: Tensor, v: Tensor):
        self.length = k.shape[1]
        self.keys = [pack(head.contiguous(), PACKED_FOR) for head in k]  # [S, D] each
        self.values = [pack(head.t().contiguous(), PACKED_FOR) for head in v]  # [D, S] each
        self.nbytes = k.nbytes + v.nbytes  # about: what a packed tensor takes is not told

    def partial(self, q: Tensor) -> State:
        """`attention.dense` of q [1, K, R, D] over all of it."""
        outs, lses, num_rows = [], [], q.shape[2]
        q = torch.nn.functional.pad(q[0] * q.shape[-1] ** -0.5, (0, 0, 0, max(4 - num_rows, 0)))  # 4 are faster than 3
        for rows, keys, values in zip(q, self.keys, self.values, strict=True):
            scores = multiply(rows, keys)  # [R, S]
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            outs.append(multiply(scores, values).div_(total))
            lses.append((top + total.log_()).squeeze(-1))
        return torch.stack(outs)[None, :, :num_rows], torch.stack(lses)[None, :, :num_rows]
