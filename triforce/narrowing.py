"""Rows of a batch end one after the other: how many of them a GPU's steps still attend for.

What a row has for itself is read up to a length that the device knows, and of a row that has ended that is one key. But
the keys of those that go on are split as those of all rows were, so about half of the time of the others is not saved.
What all rows share is read once for all, and computed for TILE queries of a KV head at a time: one tile takes the time
of one row, and each tile beyond it takes its time whether or not its rows have ended.

So steps for fewer rows are faster, and have to be recorded.
"""

from .attention import TILE
from .costs import PREPARING
from .model import ModelConfig

RATE = 5e11  # multiplications and additions in a millisecond, 2 a pair: what an H200 reaches in attention
BANDWIDTH = 4e9  # bytes that it reads in a millisecond
PLAN = 60.0  # milliseconds that cuDNN's kernel takes to be planned for another number of rows


def _in_tiles(queries: int) -> int:
    """So many queries of a KV head, and what fills their last tile."""
    return -(-queries // TILE) * TILE


def places(going: int, queries: int) -> int:
    """Of how many rows a step has as many tiles as it needs for those that go on, where a row has so many queries of a
    KV head."""
    return max(_in_tiles(going * queries) // queries, going)


def shared_ms(config: ModelConfig, length: int, rows: int, queries: int) -> float:
    """What a step computes over `length` tokens that so many rows share, in all layers."""
    pairs = _in_tiles(rows * queries) * length * config.n_kv_head * config.n_layer
    return 4 * config.head_dim * pairs / RATE


def own_ms(config: ModelConfig, tokens: float, itemsize: int) -> float:
    """What a step reads of so many tokens that rows have for themselves, in all layers."""
    return 2 * tokens * config.n_kv_head * config.head_dim * config.n_layer * itemsize / BANDWIDTH


def pays(saved: float, rounds: float, n_layer: int, shares: bool, is_recorded: bool) -> bool:
    """Whether a step that takes so many milliseconds less is worth recording.

    Args:
        rounds: that are expected to follow.
        shares: it attends to what rows share.
        is_recorded: it was recorded for an earlier batch.
    """
    preparing = 0.0 if is_recorded else 2 * PREPARING * n_layer + PLAN * shares  # it is run once, and then recorded
    return saved > 0 and saved * rounds > preparing
