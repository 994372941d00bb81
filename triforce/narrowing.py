"""Rows of a batch end one after the other: how many of them what all rows share is still attended to for.

Over a long shared prefix, a GPU reads keys once for all rows, and computes for TILE queries of a KV head at a time. Up
to one tile of queries, all rows take the time of one. Beyond that each tile takes its time, whether or not its rows
have ended. A step with fewer tiles has to be recorded.
"""

from .attention import TILE
from .costs import PREPARING
from .model import ModelConfig

RATE = 5e11  # multiplications and additions in a millisecond, 2 a pair: what an H200 reaches in attention


def places(going: int, queries: int) -> int:
    """Of how many rows a step has as many tiles as it needs for those that go on, where a row has so many queries of a
    KV head."""
    return max(-(-going * queries // TILE) * TILE // queries, going)


def milliseconds(config: ModelConfig, length: int, rows: int, queries: int) -> float:
    """What a step computes over a shared prefix of `length` tokens, in all layers, for so many rows."""
    pairs = -(-rows * queries // TILE) * TILE * length * config.n_kv_head * config.n_layer
    return 4 * config.head_dim * pairs / RATE


def pays(config: ModelConfig, length: int, before: int, after: int, queries: int, rounds: float,
         is_recorded: bool) -> bool:
    """Whether a step of fewer rows is worth recording.

    Args:
        before, after: rows of the present step, and of that one.
        rounds: that are expected to follow.
        is_recorded: it was recorded for an earlier batch.
    """
    saved = milliseconds(config, length, before, queries) - milliseconds(config, length, after, queries)
    preparing = 0.0 if is_recorded else 2 * PREPARING * config.n_layer  # it is run once, and then recorded
    return saved > 0 and saved * rounds > preparing
