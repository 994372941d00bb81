"""How many rows a padded step has, so that a row's bits do not depend on their number.

On a GPU rows cost next to nothing: all padded steps have all rows. On a CPU each row takes time. There, products of
4, 8, 12, ... rows sum up a row in the same order. That is the way of the libraries that multiply, and no promise of
theirs. So it is tried before it is relied on, with the model's own weights.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from . import attention
from .config import CPU_ROWS
from .model import Block, Transformer
from .packed import PackedPrefix, packs

KEYS = 200  # of the attention that is tried
COUNTS = (4, 8, 12, 16, 32)  # rows that are tried beside all of a block


def row_unit(target: Transformer, batch: int, rows: int, compiled: bool) -> int:
    """Padded steps have the least multiple of it that is enough, and at most `rows`, for each sequence of a batch.

    Args:
        compiled: functions of a step are compiled, for all rows.
    """
    if target.device.type != "cpu" or target.group is not None or compiled or rows <= CPU_ROWS:
        return rows
    return CPU_ROWS if is_even(list(_functions(target, batch, rows)), rows) else rows


@torch.inference_mode()
def is_even(functions: list[tuple], rows: int) -> bool:
    """Whether the first rows of blocks of `rows` get the same bits in blocks of fewer, by multiples of CPU_ROWS."""
    return all(torch.equal(function(x.narrow(dim, 0, count).clone()), whole.narrow(out_dim, 0, count))
               for function, x, dim, out_dim in functions
               for whole in [function(x)] for count in COUNTS if count < rows)


def _functions(target: Transformer, batch: int, rows: int) -> Iterator[tuple]:
    """What a step is made of: functions, each of random numbers x, and in which dimension of x and of its result the
    rows of a block are. In layers of each kind, and in all ways to attend."""
    config = target.config
    layers = list({layer.kind: layer for layer in target.layers}.values())  # one of each kind
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(target.dtype)

    x, heads = random(batch, rows, config.dim), random(batch, config.n_head, rows, config.head_dim)
    keys, values = (random(1, config.n_kv_head, KEYS, config.head_dim) for _ in range(2))
    of_all = [partial(attention.dense, k=keys, v=values)]  # over a prefix that the batch shares
    if packs(target.device, target.dtype):
        of_all.append(PackedPrefix(keys[0], values[0]).partial)

    def attend(heads: Tensor) -> Tensor:
        q = attention.fold(heads, config.n_kv_head)  # [B, K, G * M, D]
        k, v = (one.expand(len(q), -1, -1, -1) for one in (keys, values))
        over = (q, k, v, torch.zeros(len(q), 1, q.shape[2], KEYS))
        # Of a tail, of what is ragged in a batch, and of a prefix.
        states = [attention.masked(*over, True), attention.masked(*over), attention.dense(q, k, v)]
        return layers[0].attention.output(states + [attention.of_batch(one, q) for one in of_all], target.dtype)

    yield lambda x: target.output(target.norm(x)), x, 1, 1
    yield attend, heads, 2, 1
    for layer in layers:
        yield partial(_mlp, layer), x, 1, 1
        yield layer.attention.project, x, 1, 2


def _mlp(layer: Block, x: Tensor) -> Tensor:
    return x + layer.mlp(layer.mlp_norm(x))
