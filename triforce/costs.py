"""What each step of a round takes, in milliseconds: guessed by layers and bytes, then learned from rounds.

No step is run only to be timed.
"""

import statistics
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .plan import LENGTHS, Padding, Plan

if TYPE_CHECKING:
    from .hierarchy import Hierarchy
    from .speculator import Speculator

ROW = 0.08  # on a CPU each further row of a step adds about so much of the first; on a GPU next to nothing
LAYER_ON_CPU, LAYER_ON_GPU = 0.3, 0.1  # milliseconds of a layer, whatever it reads: it is made of many operations
# Milliseconds that a layer takes the host where a step is run for the first time, or recorded: on an H100's host 1.7.
PREPARING = 1.7


class Costs:
    """Milliseconds of each part that rounds are made of, and how often rounds have shown it.

    A round shows two sums, of its drafting and of its verify. Each sum corrects its parts by one factor: fully the
    first time, then by a share.

    Args:
        verify, retrieval: of a step over the full cache, and over the view, by rows. Other numbers of rows take what
            the next larger one takes.
        sources: the first token of a proposal, and each further one, by drafter.
        plain: of a step that checks nothing, where that is not one of `verify`.
        growth: of a step that grows the branches of a tree, if there are such.
        preparing: of running a step of all layers for the first time, and of recording it.
        seen: how often each part was shown. By default all are known well.
    """

    WELL = 4  # times seen: then a part is known well
    SHARE = 0.25  # of a correction, in the long run
    RECENT = 3  # sums of the same parts: their median counts, since one may be a hiccup of the machine
    STALE, HOPE = 64, 0.95  # what was not seen for so many tokens may have become faster by so much
    FORGOTTEN = 16  # tokens: a check that was not seen for so long is believed at once, whatever it took before

    def __init__(self, verify: dict[int, float], retrieval: dict[int, float] | None = None,
                 sources: dict[str, tuple[float, float]] | None = None, *, plain: float | None = None,
                 growth: float | None = None, preparing: float = 0.0, seen: int = WELL):
        parts = {("verify", rows): cost for rows, cost in sorted(verify.items())}
        parts |= {("retrieval", rows): cost for rows, cost in sorted((retrieval or {}).items())}
        parts |= {("plain", 1): plain} if plain is not None else {}
        parts |= {("growth", 1): growth} if growth is not None else {}
        for name, both in (sources or {}).items():
            parts |= {(name, "first"): both[0], (name, "further"): both[1]}
        self.sources, self.preparing = list(sources or {}), preparing
        self.number = {part: i for i, part in enumerate(parts)}
        self.values = np.maximum(list(parts.values()), 1e-6)
        self.seen, self.age = np.full(len(parts), seen), np.zeros(len(parts))
        self._sizes = {what: [rows for name, rows in parts if name == what] for what in ("verify", "retrieval")}
        # From the largest step that checks to the smallest.
        self._checks = [self.number["verify", rows] for rows in reversed(self._sizes["verify"])]
        self._checks += [self.number["plain", 1]] if plain is not None else []
        self._recent: dict[tuple, deque] = {}  # sums, by the parts that they are made of

    def __getitem__(self, part: tuple) -> float:
        return float(self.values[self.number[part]])

    @property
    def has_view(self) -> bool:
        return bool(self._sizes["retrieval"])

    def step(self, what: str, rows: int) -> tuple:
        """The part that a step of so many rows is."""
        sizes = self._sizes[what]
        return what, next((size for size in sizes if size >= rows), sizes[-1])

    def drafting(self, plan: Plan) -> np.ndarray:
        """How often a round of the plan pays for each part before its verify."""
        counts = {}
        if plan.retrieval:
            counts[self.step("retrieval", 1 + plan.gamma_inner)] = plan.rounds
        if plan.gamma and plan.source:
            rounds, each = (plan.rounds, plan.gamma_inner) if plan.retrieval else (1, plan.gamma)
            counts |= {(plan.source, "first"): rounds, (plan.source, "further"): rounds * (each - 1)}
        if plan.branches > 1:  # whose first rows are known
            counts["growth", 1] = plan.branches - 1
        return self._row(counts)

    def checking(self, plan: Plan) -> np.ndarray:
        """The same of its verify."""
        is_plain = plan.gamma == 0 and not plan.padded and ("plain", 1) in self.number
        return self._row({("plain", 1) if is_plain else self.step("verify", 1 + plan.gamma): 1})

    def _row(self, counts: dict[tuple, float]) -> np.ndarray:
        row = np.zeros(len(self.number))
        for part, count in counts.items():
            row[self.number[part]] = count
        return row

    def milliseconds(self, plan: Plan) -> tuple[float, float]:
        """Of a round of the plan: drafting, and checking."""
        return float(self.drafting(plan) @ self.values), float(self.checking(plan) @ self.values)

    def observe(self, parts: np.ndarray, milliseconds: float, checks: bool = False) -> None:
        """So often each part was paid for, and all of it took so long. checks: it is a step over the full cache. (The
        first drafts after a pause take longer than others: a draft catches up.)"""
        used = np.flatnonzero(parts)
        recent = self._recent.setdefault(tuple(used.tolist()), deque(maxlen=self.RECENT))
        forgotten = checks and self.age[used].min() >= self.FORGOTTEN
        if forgotten:
            recent.clear()
        recent.append((parts, milliseconds))
        factor = statistics.median(max(took, 1e-6) / float(row @ self.values) for row, took in recent)
        share = 1.0 if forgotten else np.maximum(1 / (self.seen[used] + 1.0), self.SHARE)
        if not self.seen.any():  # of the rest only what it takes beside this can be guessed
            self.values *= factor
        else:
            self.values[used] *= factor**share
        self.seen[used] += 1
        self.age[used] = 0

    @property
    def believed(self) -> np.ndarray:
        """`values`, but that a check takes no longer than one of more rows that was seen: a time that says so is that
        of a busy machine."""
        values, own = self.values.copy(), self.values[self._checks]
        values[self._checks] = np.minimum(own, np.minimum.accumulate(np.where(self.seen[self._checks], own, np.inf)))
        return values

    def pass_by(self, num_tokens: float) -> None:
        """So many tokens of a row were emitted. What lies idle gets another chance, now and then."""
        self.age += num_tokens
        before, now = (self.age - num_tokens) // self.STALE, self.age // self.STALE
        self.values = np.where(now > before, self.HOPE * self.believed, self.values)


def guess(hierarchy: "Hierarchy", padding: Padding, lengths: list[int]) -> Costs:
    """By a step's layers, and the bytes that it reads. A round soon shows what it takes."""
    outer, inner, prefix = hierarchy.outer, hierarchy.inner, hierarchy.cache.prefix
    on_cpu, config = outer.length.device.type == "cpu", outer.model.config
    rate, layer = (2e7, LAYER_ON_CPU) if on_cpu else (4e9, LAYER_ON_GPU)  # bytes a millisecond
    held = prefix.base + sum(length - prefix.base for length in lengths)  # what rows share is read once
    kv = held * config.kv_elements_per_token * outer.model.dtype.itemsize
    on_host = 0 if prefix.streams is None else kv * len(prefix.streams.layers) / config.n_layer
    layers = layer * config.n_layer
    full = layers + (outer.model.weight_bytes + kv - on_host) / rate + on_host / (rate if on_cpu else 5e7)

    def by_rows(level: "Speculator", padded: bool, first: float) -> dict[int, float]:
        unit = level.row_unit if padded else 1
        sizes = {min(-(-(1 + gamma) // unit) * unit, level.rows) for gamma in (0, *LENGTHS, level.rows - 1)}
        return {rows: first * (1 + ROW * (max(rows, level.tree.size) - 1) * on_cpu) for rows in sizes}

    costs = {"verify": by_rows(outer, padding.drafts, full)}
    if padding.drafts and not padding.plain:
        costs["plain"] = full
    if inner is not None:
        first = layers + (inner.model.weight_bytes + min(hierarchy.view.nbytes, kv)) / rate
        costs["retrieval"] = by_rows(inner, padding.inner, first)
        if outer.tree.size:
            costs["growth"] = first * (1 + ROW * (outer.tape.nodes.width - 1) * on_cpu)
    costs["sources"] = {}
    for name, source in hierarchy.sources.items():
        first = layer * source.num_layers + (source.nbytes + source.weight_bytes) / rate + 0.001
        costs["sources"][name] = first, first if source.weight_bytes else 0.0
    return Costs(**costs, seen=0, preparing=0.0 if hierarchy.compiler.recorder is None else PREPARING * config.n_layer)
