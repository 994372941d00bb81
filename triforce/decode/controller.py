"""Which levels draft, and how many tokens, chosen round by round from observed times and observed acceptance.

Knows nothing of tensors or models: times and counts go in, a `DraftPlan` comes out. A choice changes the speed and
never the distribution. It depends on tokens that were kept and on the first rejection of a round, never on discarded
tokens, and acceptance is exact whatever was drafted. No step is run only to be timed.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .plan import BRANCH, LENGTHS, PADDED, DraftPlan, Padding


def emitted(rate, drafted):
    """Expected tokens of a round that checks this number of drafted ones, each kept at this rate if those before it
    were: 1 + rate + ... + rate ** drafted (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return (1 - rate ** (drafted + 1)) / (1 - rate)


class Rate:
    """The chance that a drafted token is kept, from about the last hundred tests. At first a guess counts as four: with
    a draft that is never right, 256 tokens then take 3 or 4% longer than without drafts, and 5 to 7% if it were ten.

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

    def begin(self, weight: float = WEIGHT) -> None:
        """Another text begins: what earlier ones showed counts no more than a guess, or as so many tests."""
        self.hits, self.tests = weight * self.mean, weight

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
        parts |= {(name, 1): cost for name, cost in (("plain", plain), ("growth", growth)) if cost is not None}
        for name, both in (sources or {}).items():
            parts |= {(name, "first"): both[0], (name, "further"): both[1]}
        self.sources, self.preparing, self.has_view = list(sources or {}), preparing, bool(retrieval)
        self.number = {part: i for i, part in enumerate(parts)}
        self.values = np.maximum(list(parts.values()), 1e-6)
        self.seen, self.age = np.full(len(parts), seen), np.zeros(len(parts))
        # From the largest step that checks to the smallest.
        self._checks = [i for (what, _), i in reversed(self.number.items()) if what == "verify"]
        self._checks += [self.number["plain", 1]] if plain is not None else []
        self._recent: dict[tuple, deque] = {}  # sums, by the parts that they are made of

    def step(self, what: str, rows: int) -> tuple:
        """The part that a step of a number of rows is."""
        sizes = [size for name, size in self.number if name == what]
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
        return np.array([counts.get(part, 0) for part in self.number], float)

    def observe(self, parts: np.ndarray, milliseconds: float, checks: bool = False) -> None:
        """Takes in a sum: how often each part was paid for, and the time of all. checks: it is a step over the full
        cache. (The first drafts after a pause take longer than others: a draft catches up.)"""
        used = np.flatnonzero(parts)
        recent = self._recent.setdefault(tuple(used.tolist()), deque(maxlen=self.RECENT))
        is_forgotten = checks and self.age[used].min() >= self.FORGOTTEN
        if is_forgotten:
            recent.clear()
        recent.append((parts, milliseconds))
        factor = statistics.median(max(took, 1e-6) / float(row @ self.values) for row, took in recent)
        if not self.seen.any():  # the other parts are known in proportion to these alone
            self.values *= factor
        else:
            known = np.maximum(1 / (self.seen[used] + 1.0), self.SHARE)
            self.values[used] *= factor ** (1.0 if is_forgotten else known)
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
        before = self.age // self.STALE
        self.age += num_tokens
        self.values = np.where(self.age // self.STALE > before, self.HOPE * self.believed, self.values)


class Controller:
    """Chooses the plan of least expected time per token.

    Args:
        costs: of steps; they learn from rounds.
        max_gamma, max_inner: the most tokens that the full level, and the retrieval level, can check.
        padding: of the steps that plans take.
        gains: how many times as many tokens a tree keeps as its spine, by the spine's length, if the full level checks
            trees.
        rates: of earlier texts, by name.
    """

    GUESSES, GUESS = {"retrieval": 0.9}, 0.5  # of all others; the caller gives the chances of "ngram" in each round
    # Steps of all layers that run unrecorded, or are being recorded, before a verify or a retrieval level reaches its
    # full speed. A short text may end before they pay.
    PREPARATIONS = {"verify": 2, "plain": 2, "retrieval": 10}
    STAY = 0.97  # another plan must be this much better than the present one
    CERTAIN = 0.97  # and by this again to begin speculation: the time without it is known, the others are estimates
    # A plan with a part that no round has shown has at most SHORT tokens, and half as many rounds of the view, unless
    # the guess of that part is at most the share SMALL of the round.
    SHORT, SMALL = 4, 0.1

    def __init__(self, costs: Costs, max_gamma: int, max_inner: int, padding: Padding = PADDED,
                 gains: Callable[[int], float] | None = None, rates: dict[str, Rate] | None = None):
        self.costs = costs
        levels = [name for name in (*costs.sources, *["retrieval"] * costs.has_view) if name != "ngram"]
        self.rates = {name: (rates or {}).get(name) or Rate(self.GUESSES.get(name, self.GUESS)) for name in levels}
        self.plans = plans = list(candidates(costs, max_gamma, max_inner, padding, gains is not None))
        self.plan = plans[0]  # no speculation
        self._warm: set[tuple] = set()  # what has drafted
        self._names = [None, *levels, "ngram"]  # of levels that draft; a plan's are known by their places
        self._levels = np.array([[self._names.index(name) for name in (one.drafter, one.source)] for one in plans]).T
        self._counts = np.array([(one.gamma, one.rounds, one.gamma_inner) for one in plans]).T
        self._gain = np.array([gains(one.gamma) if one.branches else 1.0 for one in plans])
        self._is_long = (self._counts[0] > self.SHORT) | (2 * self._counts[1] > self.SHORT)
        self._drafting = np.stack([costs.drafting(plan) for plan in plans])
        self._steps = self._drafting + np.stack([costs.checking(plan) for plan in plans])
        recorded = np.array([self.PREPARATIONS.get(what, 0) for what, _ in costs.number])
        self._recorded = (self._steps > 0) * recorded * costs.preparing

    def times_per_token(self, rates: dict[str, float], ngram: Sequence[float] = (1.0,)) -> np.ndarray:
        """Expected milliseconds of each of `plans`, if the levels' acceptance rates are these. ngram: see `choose`."""
        (gamma, rounds, inner), (drafter, source) = self._counts, self._levels
        chances, looked_up = np.array([rates.get(name, 0.0) for name in self._names]), np.array(ngram)

        def tokens(level: np.ndarray, drafted: np.ndarray) -> np.ndarray:
            found = looked_up[np.minimum(drafted, len(looked_up) - 1).astype(int)]
            return np.where(level == self._names.index("ngram"), found, emitted(chances[level], drafted))

        # A retrieval level proposes as many as its rounds are expected to bring.
        drafted = np.where(rounds > 0, np.minimum(gamma, rounds * tokens(source, inner)), gamma)
        return self._steps @ self.costs.believed / (self._gain * tokens(drafter, drafted))

    def choose(self, remaining: float = math.inf, ngram: Sequence[float] = (1.0,)) -> DraftPlan:
        """The next round's plan.

        Args:
            remaining: tokens of a row that may come yet, in this text and in later ones.
            ngram: expected tokens of a round that checks 0, 1, ... tokens that were looked up. More than these count as
                the last. The caller knows: one that is right is a sign that the next one will be.
        """
        costs, rates = self.costs, {name: rate.value for name, rate in self.rates.items()}
        preparing = self._recorded @ np.maximum(1 - costs.seen / costs.WELL, 0.0) / max(remaining, 1.0)
        times = self.times_per_token(rates, ngram) + preparing
        # Plans with a part that no round has shown: the long ones, where it counts, and without any evidence all.
        unseen = self._drafting @ ((costs.seen == 0) * costs.values)
        is_risky = self._is_long & (unseen > self._steps @ (self.SMALL * costs.values))
        times[(unseen > 0) & (is_risky | ~costs.seen.any())] = np.inf
        times[0] *= self.CERTAIN
        best = int(times.argmin())
        if times[best] <= self.STAY * times[self.plans.index(self.plan)]:
            self.plan = self.plans[best]
        return self.plan

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


def candidates(costs: Costs, max_gamma: int, max_inner: int, padding: Padding,
               with_trees: bool) -> Iterator[DraftPlan]:
    """Plans to choose from: the first drafts nothing."""
    def lengths(least: int, most: int) -> list[int]:
        return sorted({length for length in LENGTHS if least <= length < most} | {most} if most else set())

    yield DraftPlan(padded=padding.plain)
    steps = {"padded": padding.drafts, "padded_inner": padding.inner}
    for gamma in lengths(1, max_gamma):
        for source in costs.sources:
            yield DraftPlan(gamma, source, padded=padding.drafts)
        for branches in (0, BRANCH)[:1 + with_trees] if costs.has_view else ():
            yield DraftPlan(gamma, None, True, 0, gamma, branches=branches, **steps)
            for source in costs.sources:
                for inner in lengths(1, max_inner):
                    for rounds in lengths(-(-gamma // (inner + 1)), gamma):
                        yield DraftPlan(gamma, source, True, inner, rounds, branches=branches, **steps)
