"""What each step of a hierarchy takes, in milliseconds: guessed by layers and bytes, then learned from rounds.

No step is run only to be timed.
"""

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .plan import Padding, Plan

if TYPE_CHECKING:
    from .hierarchy import Hierarchy
    from .speculator import Speculator

ROW = 0.08  # on a CPU each further row of a step adds about so much of the first; on a GPU next to nothing
LAYER_ON_CPU, LAYER_ON_GPU = 0.3, 0.1  # milliseconds of a layer, whatever it reads: it is made of many operations
# Milliseconds that a layer takes the host where a step is run for the first time, or recorded: on an H100's host 1.7.
PREPARING = 1.7
SIZES = (1, 2, 3, 4, 6, 8, 16, 32)  # rows whose steps have times of their own, where steps have so many


@dataclass
class Costs:
    """Milliseconds of each step."""

    verify: dict[int, float]  # by rows, over the full cache
    retrieval: dict[int, float] = field(default_factory=dict)  # by rows, over the retrieval view
    sources: dict[str, tuple[float, float]] = field(default_factory=dict)  # the first token of a proposal, each further
    plain: float | None = None  # of a step that checks nothing, where that is not one of `verify`
    growth: float | None = None  # of a step that grows the branches of a tree, if there are such
    row_unit: int = 1  # a verify has a multiple of so many rows, or as many as the largest of `verify`
    preparing: float = 0.0  # of running a step of all layers for the first time, and of recording it

    def parts(self) -> dict[tuple, float]:
        """By name: (what, which)."""
        parts = {("verify", rows): cost for rows, cost in sorted(self.verify.items())}
        if self.plain is not None:
            parts["plain", 0] = self.plain
        parts |= {("retrieval", rows): cost for rows, cost in sorted(self.retrieval.items())}
        if self.growth is not None:
            parts["growth", 0] = self.growth
        for name, (first, further) in self.sources.items():
            parts |= {(name, "first"): first, (name, "further"): further}
        return parts

    def having(self, parts: dict[tuple, float]) -> "Costs":
        """Costs of the same steps, other ones."""
        rows = {name: {which: cost for (what, which), cost in parts.items() if what == name}
                for name in ("verify", "retrieval")}
        names = [what for what, which in parts if which == "first"]
        return Costs(rows["verify"], rows["retrieval"],
                     {name: (parts[name, "first"], parts[name, "further"]) for name in names}, parts.get(("plain", 0)),
                     parts.get(("growth", 0)), self.row_unit, self.preparing)

    def drafting(self, plan: Plan) -> dict[tuple, float]:
        """How often a round of the plan pays for each part before its verify."""
        return growing(plan.branches) | self._chain(plan)

    def _chain(self, plan: Plan) -> dict[tuple, float]:
        if plan.gamma == 0:
            return {}
        if not plan.retrieval:
            return self._source(plan.source, plan.gamma, 1)
        weights = {part: plan.rounds * share for part, share in
                   _between("retrieval", self.retrieval, 1 + plan.gamma_inner).items()}
        return weights | (self._source(plan.source, plan.gamma_inner, plan.rounds) if plan.source else {})

    def checking(self, plan: Plan) -> dict[tuple, float]:
        """The same of its verify."""
        if plan.gamma == 0 and self.plain is not None:
            return {("plain", 0): 1.0}
        return _between("verify", self.verify, -(-(1 + plan.gamma) // self.row_unit) * self.row_unit)

    def milliseconds(self, plan: Plan) -> tuple[float, float]:
        """Of a round of the plan: drafting, and checking."""
        parts = self.parts()
        return tuple(sum(parts[part] * count for part, count in weights.items())
                     for weights in (self.drafting(plan), self.checking(plan)))

    def _source(self, name: str, count: int, rounds: int) -> dict[tuple, float]:
        weights = {(name, "first"): float(rounds), (name, "further"): float(rounds * (count - 1))}
        return {part: weight for part, weight in weights.items() if weight}


def growing(branches: int) -> dict[tuple, float]:
    """How often a round pays for a step that grows branches of so many rows, whose first is known."""
    return {("growth", 0): branches - 1.0} if branches > 1 else {}


def _between(what: str, nodes: dict[int, float], rows: int) -> dict[tuple, float]:
    """A step of so many rows as a mean of the nearest sizes that have a time."""
    sizes = sorted(nodes)
    rows = min(max(rows, sizes[0]), sizes[-1])
    at = int(np.searchsorted(sizes, rows))
    if sizes[at] == rows:
        return {(what, rows): 1.0}
    low, high = sizes[at - 1], sizes[at]
    share = (rows - low) / (high - low)
    return {(what, low): 1 - share, (what, high): share}


class Learned:
    """Costs that rounds set right.

    A round shows two sums, of its drafting and of its verify. Each sum corrects the parts that it is made of by one
    factor: fully the first time, then by a share. What has never been seen moves along with what is like it, as long
    as that is new, too.

    Args:
        costs: what is known or guessed.
        seen: how often rounds have shown each part. None: all are known well.
    """

    WELL = 4  # times seen: then a part is known well
    SHARE = 0.25  # of a correction, in the long run
    RECENT = 3  # sums of the same parts: their median counts, since one may be a hiccup of the machine
    STALE, HOPE = 256, 0.9  # what was not seen for so many tokens may have become faster by so much
    FORGOTTEN = 16  # tokens: a check that was not seen for so long is believed at once, whatever it took before

    def __init__(self, costs: Costs, seen: list[int] | None = None):
        self._costs, parts = costs, costs.parts()
        self.names = list(parts)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.values = np.array([max(cost, 1e-6) for cost in parts.values()])
        self.seen = np.full(len(parts), self.WELL) if seen is None else np.minimum(seen, self.WELL)
        self.age = np.zeros(len(parts))
        rows = {(what, which): which for what, which in parts if what in ("verify", "plain")}  # of "plain": 0
        self._checks = np.array([self.number[name] for name in sorted(rows, key=rows.get, reverse=True)])
        self._recent: dict[tuple, deque] = defaultdict(lambda: deque(maxlen=self.RECENT))

    def weights(self, parts: dict[tuple, float]) -> np.ndarray:
        """As an array over all parts."""
        row = np.zeros(len(self.names))
        for part, weight in parts.items():
            row[self.number[part]] = weight
        return row

    def observe(self, weights: np.ndarray, milliseconds: float, checks: bool = False) -> None:
        """So often each part was paid for, and all of it took so long. checks: it is a verify, or the step of a round
        that drafts nothing. (The first drafts after a pause take longer than others: a draft catches up.)"""
        used = np.flatnonzero(weights)
        if not len(used):
            return
        recent = self._recent[tuple(used.tolist())]
        forgotten = checks and self.age[used].min() >= self.FORGOTTEN
        if forgotten:
            recent.clear()
        recent.append((weights, milliseconds))
        factor = statistics.median(max(took, 1e-6) / float(row @ self.values) for row, took in recent)
        share = 1.0 if forgotten else np.maximum(1 / (self.seen[used] + 1.0), self.SHARE)
        if not self.seen[used].all():
            self.values[self._like(used)] *= factor
        self.values[used] *= factor**share
        self.seen[used] += 1
        self.age[used] = 0

    def _like(self, used: np.ndarray) -> np.ndarray:
        """Parts that have never been seen and are like those, if those are new: all, as long as nothing was seen."""
        unseen, others = self.seen == 0, np.ones(len(self.names), dtype=bool)
        others[used] = False
        if unseen.all():
            return others
        kinds = {self.names[i][0] for i in used}
        new = {kind for kind in kinds if all(unseen[i] for i, name in enumerate(self.names) if name[0] == kind)}
        return others & np.array([name[0] in new for name in self.names])

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
        stale = self.age > self.STALE
        self.values = np.where(stale, self.values * self.HOPE, self.values)
        self.age[stale] = 0

    def now(self) -> Costs:
        """What is believed at present."""
        return self._costs.having(dict(zip(self.names, self.values.tolist(), strict=True)))


class Shelf:
    """Learned costs, and acceptance rates, of the States that an engine has had. What one of them learned, the next one
    like it begins with."""

    STRIDE = 4096  # tokens

    def __init__(self):
        self._costs: dict[tuple, tuple[Costs, list[int]]] = {}
        self._rates: dict[tuple, dict[str, float]] = {}

    def find(self, name: tuple, like: Costs) -> tuple[Costs, list[int]] | None:
        """Costs, and how often each part was seen, if they are those of the same steps."""
        costs, seen = self._costs.get(name, (None, None))
        return None if costs is None or costs.parts().keys() != like.parts().keys() else (costs, seen)

    def put(self, name: tuple, learned: Learned) -> None:
        self._costs[name] = learned.now(), learned.seen.tolist()

    def find_rates(self, name: tuple) -> dict[str, float]:
        """Acceptance rates by level, as earlier texts had them."""
        return self._rates.get(name, {})

    def put_rates(self, name: tuple, rates: dict[str, float]) -> None:
        self._rates[name] = rates

    def name(self, padding: Padding, lengths: list[int], hierarchy: "Hierarchy") -> tuple:
        """Of what was learned under such circumstances."""
        longest, shortest = (-(-length // self.STRIDE) for length in (max(lengths), min(lengths)))
        prefix, view = hierarchy.cache.prefix, hierarchy.view
        return (*padding, longest, shortest, len(lengths), prefix.base > 0, prefix.streams is not None,
                0 if view is None else view.budget)


def sizes(level: "Speculator", padded: bool) -> list[int]:
    """Of a level's steps: the rows that have times of their own."""
    unit = level.row_unit if padded else 1
    return sorted({rows for rows in SIZES if rows < level.rows and rows % unit == 0} | {level.rows})


def guess(hierarchy: "Hierarchy", padding: Padding, lengths: list[int]) -> Costs:
    """By a step's layers, and the bytes that it reads. A round soon shows what it takes."""
    outer, inner, cache = hierarchy.outer, hierarchy.inner, hierarchy.cache
    on_cpu = outer.length.device.type == "cpu"
    rate, layer = (2e7, LAYER_ON_CPU) if on_cpu else (4e9, LAYER_ON_GPU)  # bytes a millisecond
    host_rate = rate if on_cpu else 5e7
    config, itemsize, offload = outer.model.config, outer.model.dtype.itemsize, cache.prefix.streams
    base, batch = cache.prefix.base, len(lengths)
    token = config.kv_elements_per_token * itemsize
    shared, own = base * token, (sum(lengths) - base * batch) * token
    on_host = 0 if offload is None else (shared or own) * len(offload.layers) / config.n_layer
    layers = layer * config.n_layer
    reading = layers + (outer.model.weight_bytes + shared + own - on_host) / rate + on_host / host_rate
    # All rows attend to a shared prefix, which is read once for them. Beyond some number of rows that is arithmetic.
    products = 4 * config.n_head * config.head_dim * config.n_layer * base * batch  # of one token a row

    def verify(rows: int) -> float:
        rows = max(rows, outer.tree.size)
        if on_cpu:
            return reading * (1 + ROW * (rows - 1)) + shared / rate * ROW * rows * (batch - 1)
        return max(reading, products * rows / 5e11)

    def by_rows(level, padded: bool, cost) -> dict[int, float]:
        return {rows: cost(rows) for rows in sizes(level, padded)}

    plain = verify(1) if padding.drafts and not padding.plain else None
    costs = Costs(by_rows(outer, padding.drafts, verify), plain=plain, row_unit=outer.row_unit if padding.drafts else 1,
                  preparing=0.0 if hierarchy.compiler.recorder is None else PREPARING * config.n_layer)
    if inner is not None:
        first = layers + (inner.model.weight_bytes + min(hierarchy.view.nbytes, shared + own)) / rate
        costs.retrieval = by_rows(inner, padding.inner, lambda rows: first * (1 + ROW * (rows - 1) * on_cpu))
        if outer.tree.size:
            costs.growth = first * (1 + ROW * (outer.tape.nodes.width - 1) * on_cpu)
    for name, source in hierarchy.sources.items():
        first = layer * source.num_layers + (source.nbytes + source.weight_bytes) / rate + 0.001
        costs.sources[name] = first, first if source.weight_bytes else 0.0
    return costs
