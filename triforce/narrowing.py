"""Rows of a batch end one after the other: how many of them a GPU's steps still compute.

What a row has for itself is read up to a length that the device knows, and of a row that has ended that is one key. But
the keys of those that go on are split as those of all rows were, so about half of the time of the others is not saved.
What all rows share is read once for all, and computed for TILE queries of a KV head at a time: one tile takes the time
of one row, and each tile beyond it takes its time whether or not its rows have ended. All else takes a step of one or
two rows a little less than one of many.

So steps of fewer rows are faster, and have to be recorded. They have a power of 2 of rows: so there are few of them.
Where that takes the device no time, they are recorded before rows end.
"""

from .attention import TILE, pays_to_plan
from .costs import PREPARING
from .model import ModelConfig

RATE = 5e11  # multiplications and additions in a millisecond, 2 a pair: what an H200 reaches in attention
BANDWIDTH = 4e9  # bytes that it reads in a millisecond
PLAN = 60.0  # milliseconds that cuDNN's kernel takes to be planned for another number of rows
# Milliseconds that each of the first FEW rows takes in a layer, besides attention to what is long; those beyond it take
# next to nothing. And what it takes in a layer that the rows do not lie side by side.
ROW, FEW, APART = 0.009, 4, 0.006
WRITTEN = 0.055  # milliseconds by which a layer as it is written takes longer than a compiled one


def widths(going: int, batch: int) -> list[int]:
    """Numbers of rows that a step may have which computes those that go on, but fewer than all of a batch."""
    least = 1 << (going - 1).bit_length()
    return [least << i for i in range(batch.bit_length()) if least << i < batch]


def shared_ms(config: ModelConfig, length: int, queries: int) -> float:
    """What a step computes over `length` tokens that its rows share, in all layers. queries: of a KV head, of all of
    its rows."""
    pairs = -(-queries // TILE) * TILE * length * config.n_kv_head * config.n_layer
    return 4 * config.head_dim * pairs / RATE


def own_ms(config: ModelConfig, tokens: float, itemsize: int) -> float:
    """What a step reads of so many tokens that rows have for themselves, in all layers."""
    return 2 * tokens * config.n_kv_head * config.head_dim * config.n_layer * itemsize / BANDWIDTH


def saved_ms(config: ModelConfig, before: int, after: int, block: int, *, shared: int, own: float,
             itemsize: int) -> float:
    """How much less a step of fewer rows takes.

    Args:
        before, after: its rows. block: tokens of each.
        shared: tokens that rows share. own: that each of them has for itself, on average.
    """
    queries = block * config.query_group
    return (shared_ms(config, shared, before * queries) - shared_ms(config, shared, after * queries)
            + own_ms(config, (before - after) * own, itemsize) / 2
            + ((min(before, FEW) - min(after, FEW)) * ROW - APART) * config.n_layer)


def is_planned(config: ModelConfig, length: int, rows: int, block: int) -> bool:
    """Whether cuDNN's kernel serves a step of so many rows, of so many tokens each, over what they share."""
    return length > 0 and pays_to_plan(config.n_kv_head, rows * block * config.query_group, length, False)


def pays(saved: float, rounds: float, n_layer: int, is_planned: bool) -> bool:
    """Whether a step that takes so many milliseconds less is worth recording. rounds: that are expected to follow."""
    return saved * rounds > 2 * PREPARING * n_layer + PLAN * is_planned  # it is run once, and then recorded
