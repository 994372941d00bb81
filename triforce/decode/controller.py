"""Which levels draft, and how many tokens, chosen round by round from observed times and observed acceptance.

Knows nothing of tensors or models: times and counts go in, a `DraftPlan` comes out. A choice changes the speed and
never the distribution. It depends on tokens that were kept and on the first rejection of a round, never on discarded
tokens, and acceptance is exact whatever was drafted. No step is run only to be timed.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..tree import best_tree
from .plan import LENGTHS, PADDED, DraftPlan, Padding

LEAVES, INNER_LEAVES = "leaves", "inner_leaves"  # of the full level, branches among them; of the retrieval level
SPINES, BRANCHES = (4, 8, 12, 16, 24, 32, 48, 63), (1, 2, 4, 8, 12, 16)  # lengths, of trees to choose from


def emitted(rate, drafted, leaf=0.0):
    """Expected tokens of a round that checks this number of drafted ones, each kept at this rate if those before it
    were: 1 + rate + ... + rate ** drafted (Leviathan et al., arXiv 2211.17192, eq. 1); and with the chance `leaf` one
    more after a rejection."""
    return (1 - rate ** (drafted + 1)) / (1 - rate) + leaf * (1 - rate**drafted)


class Rate:
    """An acceptance rate over about the last hundred tests. At first a guess counts as four tests. With a draft that is
    never right, 256 tokens then take 3 or 4% longer than without drafts. If the guess counted as ten tests, they would
    take 5 to 7% longer.

    It gets the benefit of the doubt, half of a standard deviation: chance may make an estimate too low, the level would
    be left alone, and nothing would correct the estimate. An idle level is forgotten, half of it in IDLE_HALF tokens,
    so that a level that did badly gets another chance.
    """

    MEMORY, WEIGHT, DOUBT, IDLE_HALF = 0.99, 4.0, 0.5, 128

    def __init__(self, guess: float):
        self.guess, self.hits, self.tests = guess, self.WEIGHT * guess, self.WEIGHT

    def update(self, hits: int, tests: int) -> None:
        kept = self.MEMORY**tests
        self.hits, self.tests = kept * self.hits + hits, kept * self.tests + tests

    def idle(self, num_tokens: float) -> None:
        kept = 0.5 ** (num_tokens / self.IDLE_HALF)
        back = (1 - kept) * self.WEIGHT
        self.hits, self.tests = kept * self.hits + back * self.guess, kept * self.tests + back

    def begin(self) -> None:
        """Another text begins: what earlier ones showed counts no more than a guess."""
        self.hits, self.tests = self.WEIGHT * self.mean, self.WEIGHT

    @property
    def mean(self) -> float:
        return self.hits / self.tests

    @property
    def value(self) -> float:
        mean = self.mean
        return min(mean + self.DOUBT * (mean * (1 - mean) / self.tests) ** 0.5, 0.98)


class Costs:
    """Milliseconds of each part that rounds are made of, and how often rounds have shown it.

    A round shows two sums, of its drafting and of its verify. Each sum corrects its parts by one factor: fully the
    first time, then by a share.

    Args:
        verify, retrieval: of a step over the full cache, and over the view, by rows. Another number of rows takes as
            long as the next larger one.
        sources: the first token of a proposal, and each further one, by drafter.
        plain: of a step that checks nothing, where that is not one of `verify`.
        growth: of a step that grows the branches of a tree, if there are such.
        preparing: of running a step of all layers for the first time, and of recording it.
        seen: how often each part was shown. By default all are known well.
    """

    WELL = 4  # times seen: then a part is known well
    SHARE = 0.25  # of a correction, in the long run
    RECENT = 3  # sums of the same parts: their median counts, since one may be a hiccup of the machine
    STALE, HOPE = 64, 0.95  # a part that was not seen for STALE tokens may have become faster by HOPE
    FORGOTTEN = 16  # tokens without such a check: its next time is believed at once, whatever it took before

    def __init__(self, verify: dict[int, float], retrieval: dict[int, float] | None = None,
                 sources: dict[str, tuple[float, float]] | None = None, *, plain: float | None = None,
                 growth: float | None = None, preparing: float = 0.0, seen: int = WELL):
        parts = {("verify", rows): cost for rows, cost in sorted(verify.items())}
        parts |= {("retrieval", rows): cost for rows, cost in sorted((retrieval or {}).items())}
        parts |= {("plain", 1): plain} if plain is not None else {}
        parts |= {("growth", 1): growth} if growth is not None else {}
        for name, both in (sources or {}).items():
            parts |= {(name, "first"): both[0], (name, "further"): both[1]}
        self.sources, self.preparing, self.has_view = list(sources or {}), preparing, bool(retrieval)
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

    def step(self, what: str, rows: int) -> tuple:
        """The part that a step of a number of rows is."""
        sizes = self._sizes[what]
        return what, next((size for size in sizes if size >= rows), sizes[-1])

    def drafting(self, plan: DraftPlan) -> np.ndarray:
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

    def checking(self, plan: DraftPlan) -> np.ndarray:
        """How often its verify pays for each part."""
        is_plain = plan.gamma == 0 and not plan.padded and ("plain", 1) in self.number
        return self._row({("plain", 1) if is_plain else self.step("verify", 1 + plan.gamma): 1})

    def _row(self, counts: dict[tuple, float]) -> np.ndarray:
        row = np.zeros(len(self.number))
        for part, count in counts.items():
            row[self.number[part]] = count
        return row

    def observe(self, parts: np.ndarray, milliseconds: float, checks: bool = False) -> None:
        """Takes in a sum: how often each part was paid for, and the time of all. checks: it is a step over the full
        cache. (The first drafts after a pause take longer than others: a draft catches up.)"""
        used = np.flatnonzero(parts)
        recent = self._recent.setdefault(tuple(used.tolist()), deque(maxlen=self.RECENT))
        if checks and self.age[used].min() >= self.FORGOTTEN:
            recent.clear()
        recent.append((parts, milliseconds))
        factor = statistics.median(max(took, 1e-6) / float(row @ self.values) for row, took in recent)
        if not self.seen.any():  # the other parts are known in proportion to these alone
            self.values *= factor
        else:
            known = np.maximum(1 / (self.seen[used] + 1.0), self.SHARE)
            self.values[used] *= factor ** (1.0 if checks and self.age[used].min() >= self.FORGOTTEN else known)
        self.seen[used] += 1
        self.age[used] = 0

    @property
    def believed(self) -> np.ndarray:
        """`values`, but a check takes at most as long as one of more rows that was seen: a longer time is that of a
        busy machine."""
        values, own = self.values.copy(), self.values[self._checks]
        values[self._checks] = np.minimum(own, np.minimum.accumulate(np.where(self.seen[self._checks], own, np.inf)))
        return values

    def pass_by(self, num_tokens: float) -> None:
        """`num_tokens` tokens of a row were emitted. An idle part gets another chance from time to time."""
        self.age += num_tokens
        before, now = (self.age - num_tokens) // self.STALE, self.age // self.STALE
        self.values = np.where(now > before, self.HOPE * self.believed, self.values)


class Controller:
    """Chooses the plan of least expected time per token.

    Args:
        costs: of steps; they learn from rounds.
        max_gamma, max_inner: the most tokens that the full level, and the retrieval level, can check.
        padding: of the steps that plans take.
        leaves: whether the two levels check leaves.
        trees: rows of a tree, and rows that a step drafts after, if the full level checks trees of any shape.
        rates: of earlier texts, by name.
    """

    GUESSES, GUESS = {"retrieval": 0.9}, 0.5  # of all others; the caller gives the chances of "ngram" in each round
    # Steps of all layers that run unrecorded, or are being recorded, before a verify or a retrieval level reaches its
    # full speed. A short text may end before they pay.
    PREPARATIONS = {"verify": 2, "plain": 2, "retrieval": 10}
    STAY = 0.97  # another plan must be this much better than the present one
    CERTAIN = 0.97  # and by this again to begin speculation: the time without it is known, the others are estimates
    SHORT = 4  # most tokens, or twice the most rounds of the retrieval level, of plans with an unseen part

    def __init__(self, costs: Costs, max_gamma: int, max_inner: int, padding: Padding = PADDED,
                 leaves: tuple[bool, bool] = (False, False), trees: tuple[int, int] | None = None,
                 rates: dict[str, Rate] | None = None):
        self.costs, self._depth, self._trees = costs, max_gamma, trees
        levels = [*costs.sources, *["retrieval"] * costs.has_view]
        names = [name for name in levels if name != "ngram"] + [LEAVES] * (leaves[0] or trees is not None)
        names += [INNER_LEAVES] * leaves[1]
        self.rates = {name: (rates or {}).get(name) or Rate(self.GUESSES.get(name, self.GUESS)) for name in names}
        self.plans = plans = list(candidates(costs, max_gamma, max_inner, padding))
        self.plan = plans[0]  # no speculation
        self.tokens = 1.0  # expected of a round of it
        self._warm: set[tuple] = set()  # what has drafted
        self._number = {plan: i for i, plan in enumerate(plans)}
        self._gamma, self._rounds, self._inner = np.array([(one.gamma, one.rounds, one.gamma_inner) for one in plans]).T
        self._is_long = (self._gamma > self.SHORT) | (2 * self._rounds > self.SHORT)
        self._drafting = np.stack([costs.drafting(plan) for plan in plans])
        self._checking = np.stack([costs.checking(plan) for plan in plans])
        recorded = np.array([self.PREPARATIONS.get(what, 0) for what, _ in costs.number])
        self._recorded = ((self._drafting + self._checking) > 0) * recorded * costs.preparing
        levels = [(plan.drafter, plan.source) for plan in plans]  # that draft; and, by these, the numbers of plans
        self._by_levels = {pair: np.array([i for i, its in enumerate(levels) if its == pair]) for pair in set(levels)}

    def times_per_token(self, rates: dict[str, float]) -> np.ndarray:
        """Expected milliseconds of each of `plans`, if the levels' acceptance rates are these."""
        return (self._drafting + self._checking) @ self.costs.believed / self._tokens(rates)

    def _tokens(self, rates: dict[str, float]) -> np.ndarray:
        """How many tokens a round of each plan is expected to emit."""
        tokens, leaf = np.ones(len(self.plans)), 0.0 if self._trees else self._leaf(LEAVES)
        for (drafter, source), which in self._by_levels.items():
            drafted = self._gamma[which]
            if drafter == "retrieval" and source is not None:  # as many as its rounds are expected to bring
                each = emitted(rates[source], self._inner[which], self._leaf(INNER_LEAVES))
                drafted = np.minimum(drafted, self._rounds[which] * each)
            tokens[which] = emitted(rates.get(drafter, 0.0), drafted, leaf)
        return tokens

    def _leaf(self, name: str) -> float:
        """The chance of a leaf where the drafted token is not kept; 0 where the level has none."""
        return round(self.rates[name].value, 1) if name in self.rates else 0.0

    def choose(self, remaining: float = math.inf, **known: float) -> DraftPlan:
        """The next round's plan.

        Args:
            remaining: tokens of a row that may come yet, in this text and in later ones.
            known: acceptance rates that the caller keeps: that of "ngram", which counts if that is a source.
        """
        costs, rates = self.costs, {name: rate.value for name, rate in self.rates.items()} | known
        preparing = self._recorded @ np.maximum(1 - costs.seen / costs.WELL, 0.0) / max(remaining, 1.0)
        tokens, times = self._tokens(rates), self.times_per_token(rates) + preparing
        # Plans with a part that no round has shown: the long ones, and without any evidence all.
        times[(self._drafting @ (costs.seen == 0) > 0) & (self._is_long | ~costs.seen.any())] = np.inf
        times[0] *= self.CERTAIN
        best, now = int(times.argmin()), self._number[replace(self.plan, branches=0)]
        if times[best] > self.STAY * times[now]:
            best = now
        self.plan, self.tokens = self.plans[best], float(tokens[best])
        if self._trees:
            self._branch(rates, tokens, times, preparing)
        return self.plan

    def _branch(self, rates: dict[str, float], tokens: np.ndarray, times: np.ndarray, preparing: np.ndarray) -> None:
        """Sets the best tree around the best chain of each length, if it takes less time than the chain that is set.

        Args:
            tokens, times: of `plans`; times per token, with the share of each that is `preparing`.
        """
        is_known, each = self.costs.seen[self.costs.number["growth", 1]] > 0, self.costs["growth", 1]
        least = self.STAY * times[self._number[self.plan]]
        for gamma in SPINES:
            which = [i for i, plan in enumerate(self.plans) if plan.retrieval and plan.gamma == gamma]
            i = min(which, key=times.__getitem__, default=0)
            for length in BRANCHES if which and times[i] < np.inf else ():
                if length > self.SHORT and not is_known:
                    break
                shape, more = best_tree(rates["retrieval"], rates[LEAVES], gamma, length, self._depth, *self._trees)
                time = (times[i] - preparing[i] + each * (shape.length - 1) / tokens[i]) / more + preparing[i]
                if shape.parents and time < least:
                    least, self.tokens = time, float(more * tokens[i])
                    self.plan = replace(self.plans[i], branches=shape.length, shape=shape)

    def timed(self, plan: DraftPlan, drafting: float, checking: float) -> None:
        """Takes in the milliseconds of a round of a plan: all before its verify, and its verify. The first round with a
        drafter does not count: it touches memory for the first time."""
        drafter = plan.source, plan.retrieval, plan.branches > 1
        if plan.gamma and drafter not in self._warm:
            self._warm.add(drafter)
            return
        if plan.gamma:
            self.costs.observe(self.costs.drafting(plan), drafting)
        self.costs.observe(self.costs.checking(plan), checking, checks=True)

    def update(self, num_tokens: float, **observed: tuple[int, int]) -> None:
        """After a round: tokens kept in the mean of the rows, and by level (hits, tests) of all rows.

        An idle level ages with the text, not with the number of rows: otherwise many rows would try it all the time.
        """
        self.costs.pass_by(num_tokens)
        for name, rate in self.rates.items():
            hits, tests = observed.get(name, (0, 0))
            if tests:
                rate.update(hits, tests)
            else:
                rate.idle(num_tokens)


def candidates(costs: Costs, max_gamma: int, max_inner: int, padding: Padding) -> Iterator[DraftPlan]:
    """Plans to choose from: the first drafts nothing."""
    def lengths(least: int, most: int) -> list[int]:
        return sorted({length for length in LENGTHS if least <= length < most} | {most} if most else set())

    yield DraftPlan(padded=padding.plain)
    steps = {"padded": padding.drafts, "padded_inner": padding.inner}
    for gamma in lengths(1, max_gamma):
        for source in costs.sources:
            yield DraftPlan(gamma, source, padded=padding.drafts)
        if costs.has_view:
            yield DraftPlan(gamma, None, True, 0, gamma, **steps)
        for source in costs.sources if costs.has_view else ():
            for inner in lengths(1, max_inner):
                for rounds in lengths(-(-gamma // (inner + 1)), gamma):
                    yield DraftPlan(gamma, source, True, inner, rounds, **steps)
