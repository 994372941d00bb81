"""What only a CPU needs: layers whose rows have the same bits wherever in a block they lie, and oneDNN's packed layout.

Bits: PyTorch's loops on a CPU take whole vectors, and share long tensors out to threads. What is left over is rounded
in another way, so that a row's bits would depend on its place. The layers here compute rows evenly, an activation as
long as it reads half of each row, as a gate does. Products of 4, 8, 12, ... rows sum up alike: `row_unit` tries it.

Packed: oneDNN multiplies few rows by a large matrix 2 to 4 times faster once that is in its own blocked layout. So
large weights are packed, and the prompt's part of a prefix is kept a second time, packed. On two cores, 4 heads of 64,
8 layers: 8 rows over 32,768 tokens 57.6 -> 38.0 ms, 4 rows 44.3 -> 21.9; 1 and 2 rows gain nothing.

Shapes: B batch, M rows of a block, K KV heads, R rows of queries, S keys, D head_dim, F ffn_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import attention
from .config import CPU_ROWS

SHARE = 16384  # elements: no loop shares so few out to several threads; one of GELU begins at 20,000
PACK_FROM = 2**17  # elements of a weight; below, the fixed cost of a oneDNN call is more than it saves
MIN_TOKENS = 4096  # of a prefix that is packed; below, an attention takes no time
MIN_ROWS = 3  # of queries over a packed prefix
MANY_ROWS = 400  # from which on PyTorch's attention is faster: 512 take 68 ms there, and 93 over what is packed
ANY_ROWS = 64  # a product of at most this number of rows may have any number of them
PACKED_FOR = 8  # rows; products with fewer or more work too
KEYS = 200  # of the attention that is tried
COUNTS = (4, 8, 12, 16, 32)  # rows that are tried beside all of a block


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a packed layout here."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def pack(matrix: Tensor, rows: int) -> Tensor:
    """[N, D], for products with about `rows` rows; other numbers work too."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix, rows)


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D] times the transpose of what was packed: [..., N]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class Linear(nn.Linear):
    """Rows come in few numbers: oneDNN makes code for each number and keeps it, 0.2 MB of it."""

    packed: Tensor | None = None
    packed_bytes = 0  # of weights that nobody shares

    def pack(self, rows: int, is_shared: bool = False) -> None:
        """For blocks of about `rows` rows."""
        self.packed = pack(self.weight.detach(), rows)
        self.packed_bytes = 0 if is_shared else self.weight.nbytes
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        x, shape = x.flatten(0, -2), x.shape
        rows = len(x)
        if rows > ANY_ROWS:
            unit = ANY_ROWS if rows > 4 * ANY_ROWS else ANY_ROWS // 4
            x = F.pad(x, (0, 0, 0, -rows % unit))
        y = super().forward(x) if self.packed is None else multiply(x, self.packed, self.bias)
        return y[:rows].unflatten(0, shape[:-1])


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[B, M, F] -> the same, a few whole rows at a time."""
    rows = max(SHARE // x.shape[-1], 1)
    if x.shape[0] * x.shape[1] <= rows:
        return function(x)
    return torch.cat([function(part) for part in x.flatten(0, 1).split(rows)]).view(x.shape)


class SiLU(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        return by_rows(F.silu, x)


class GELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return by_rows(partial(F.gelu, approximate=self.approximate), x)


def adapt(model: nn.Module) -> None:
    """The layers of a model that lies on a CPU become those of this module."""
    own = {nn.Linear: Linear, nn.SiLU: SiLU, nn.GELU: GELU}
    for module in model.modules():
        module.__class__ = own.get(type(module), type(module))


def pack_weights(model: nn.Module, rows: int) -> None:
    """Packs every large linear layer, where that is possible. A weight that nobody shares is freed."""
    if not packs(model.device, model.dtype):
        return
    for module in model.modules():
        if isinstance(module, Linear) and module.weight.numel() >= PACK_FROM:
            module.pack(rows, module.weight is model.embedding.weight)


class PackedPrefix:
    """K and V of one layer and one row of the batch, [K, S, D] float32 each, in oneDNN's layout."""

    def __init__(self, k: Tensor, v: Tensor):
        self.length = k.shape[1]
        self.keys = [pack(head.contiguous(), PACKED_FOR) for head in k]  # [S, D] each
        self.values = [pack(head.t().contiguous(), PACKED_FOR) for head in v]  # [D, S] each
        self.nbytes = k.nbytes + v.nbytes  # about: what a packed tensor takes is not told

    def dense(self, q: Tensor) -> attention.State:
        """`attention.dense` of q [1, K, R, D] over all of it."""
        outs, lses, num_rows = [], [], q.shape[2]
        q = F.pad(q[0] * q.shape[-1] ** -0.5, (0, 0, 0, max(4 - num_rows, 0)))  # 4 are faster than 3
        for rows, keys, values in zip(q, self.keys, self.values, strict=True):
            scores = multiply(rows, keys)  # [R, S]
            top = scores.amax(-1, keepdim=True)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
            outs.append(multiply(scores, values).div_(total))
            lses.append((top + total.log_()).squeeze(-1))
        return torch.stack(outs)[None, :, :num_rows], torch.stack(lses)[None, :, :num_rows]


@torch.inference_mode()
def row_unit(target: nn.Module, batch: int, rows: int, compiled: bool) -> int:
    """Padded steps have the least multiple of it that is enough, and at most `rows`, for each sequence of a batch.

    On a GPU rows cost next to nothing: all padded steps have all rows. On a CPU it is tried whether the first rows of a
    block get the same bits in blocks of fewer, by multiples of CPU_ROWS.

    Args:
        compiled: functions of a step are compiled, for all rows.
    """
    if target.device.type != "cpu" or target.group is not None or compiled or rows <= CPU_ROWS:
        return rows
    x = torch.randn(batch, rows, target.config.dim, generator=torch.Generator().manual_seed(0)).to(target.dtype)
    is_even = all(torch.equal(function(x[:, :count].clone()), whole[:, :count]) for function in _functions(target)
                  for whole in [function(x)] for count in COUNTS if count < rows)
    return CPU_ROWS if is_even else rows


def _functions(target: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """What a step is made of: functions of hidden states [B, M, dim], each [B, M, ...]. In layers of each kind, and in
    all ways to attend."""
    config = target.config
    layers = list({str([type(part) for part in layer.modules()]): layer for layer in target.layers}.values())
    k, v = torch.randn(2, 1, config.n_kv_head, KEYS, config.head_dim,
                       generator=torch.Generator().manual_seed(1)).to(target.dtype)
    of_all = [partial(attention.dense, k=k, v=v)]  # over a prefix that the batch shares
    if packs(target.device, target.dtype):
        of_all.append(PackedPrefix(k[0], v[0]).dense)

    def attend(x: Tensor) -> Tensor:
        q = attention.fold(layers[0].attention.project(x)[:, : config.n_head], config.n_kv_head)  # [B, K, G * M, D]
        kv = [one.expand(len(q), -1, -1, -1) for one in (k, v)]
        bias = torch.zeros(len(q), 1, q.shape[2], KEYS)
        # Of a tail, of what is ragged in a batch, and of a prefix.
        states = [attention.masked(q, *kv, bias, True), attention.masked(q, *kv, bias), attention.dense(q, *kv)]
        return layers[0].attention.output(states + [attention.of_batch(one, q) for one in of_all], target.dtype)

    return [lambda x: target.output(target.norm(x)), attend,
            *(lambda x, layer=layer: x + layer.mlp(layer.mlp_norm(x)) for layer in layers),
            *(lambda x, layer=layer: layer.attention.project(x).transpose(1, 2) for layer in layers)]
