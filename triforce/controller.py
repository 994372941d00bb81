"""Which levels draft, and how many tokens, chosen round by round from observed times and observed acceptance.

Knows nothing of tensors or models: times and counts go in, a `Plan` comes out. It never changes what is said, only how
fast: the choice depends on tokens that were kept and on the first rejection of a round, never on discarded ones, and
acceptance is exact whatever was drafted.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .costs import Costs
from .plan import LENGTHS, PADDED, Padding, Plan
from .tree import best_tree

LEAVES, INNER_LEAVES = "leaves", "inner_leaves"  # of the full level, branches among them; of the retrieval level
SPINES, BRANCHES = (4, 8, 12, 16, 24, 32, 48, 63), (1, 2, 4, 8, 12, 16)  # lengths, of trees to choose from


def emitted(rate, drafted, leaf=0.0):
    """Expected tokens of a round that checks so many drafted ones, each kept with this chance if those before it were:
    1 + rate + ... + rate ** drafted (Leviathan et al., arXiv 2211.17192, eq. 1); and with the chance `leaf` one more
    where one was not kept."""
    return (1 - rate ** (drafted + 1)) / (1 - rate) + leaf * (1 - rate**drafted)


@functools.lru_cache(maxsize=256)
def at_least(rate: float, max_inner: int, max_gamma: int, leaf: float = 0.0) -> np.ndarray:
    """The chance that a level emits j tokens or more in so many rounds, if each time `inner` tokens are drafted for it
    and kept at this rate, and `leaf` is the chance of one more where one is not: entry (inner - 1, rounds, j) of
    [max_inner, max_gamma + 1, max_gamma + 1]."""
    inner, kept = np.arange(1, max_inner + 1)[:, None], np.arange(max_inner + 1)
    stops = np.where(kept < inner, (1 - rate) * rate**kept, 0.0)  # at a token that is not kept, after so many
    more = np.pad(stops, ((0, 0), (1, 0)))[:, :-1]
    chance = (1 - leaf) * stops + leaf * more + (kept == inner) * rate**kept  # of so many and one of its own
    exactly = np.zeros((max_gamma + 1, max_inner, max_gamma + 1))  # by rounds; the last entry: max_gamma or more
    exactly[0, :, 0] = 1
    for before, after in zip(exactly, exactly[1:], strict=False):
        for k in range(min(max_inner + 1, max_gamma)):
            after[:, k + 1 :] += chance[:, k, None] * before[:, : max_gamma - k]
        after[:, -1] = 1 - after[:, :-1].sum(1)
    return exactly[..., ::-1].cumsum(-1)[..., ::-1].transpose(1, 0, 2)


class Rate:
    """An acceptance rate over about the last hundred tests. At first a guess counts as four tests: of a draft that is
    never right, 256 tokens then take 3 or 4% more than without drafts, and with a guess of ten 5 to 7.

    It is given the benefit of the doubt, half of a standard deviation: by an estimate that chance made too low a level
    would be left alone, and nothing would set it right. What lies idle is forgotten, so that what did badly once gets
    another chance: half of it in IDLE_HALF tokens, and in twice as many after each try of which nothing was kept.
    """

    MEMORY, WEIGHT, DOUBT, IDLE_HALF, PATIENCE = 0.99, 4.0, 0.5, 128, 4

    def __init__(self, guess: float):
        self.guess, self.hits, self.tests = guess, self.WEIGHT * guess, self.WEIGHT
        self.patience, self._is_idle = 1, False

    def update(self, hits: int, tests: int) -> None:
        kept = self.MEMORY**tests
        self.hits, self.tests = kept * self.hits + hits, kept * self.tests + tests
        if hits:
            self.patience = 1
        elif self._is_idle:
            self.patience = min(2 * self.patience, self.PATIENCE)
        self._is_idle = False

    def idle(self, num_tokens: float) -> None:
        kept = 0.5 ** (num_tokens / (self.IDLE_HALF * self.patience))
        back = (1 - kept) * self.WEIGHT
        self.hits, self.tests, self._is_idle = kept * self.hits + back * self.guess, kept * self.tests + back, True

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

    GUESSES, GUESS = {"retrieval": 0.9}, 0.5  # of all others; the chances of "ngram" are told from round to round
    # Steps of all layers that are run as they are written, or recorded, before a verify, and a retrieval level, is as
    # fast as it will be. A short text may end before it has paid.
    PREPARATIONS = {"verify": 2, "plain": 2, "retrieval": 10}
    STAY = 0.97  # another plan must be this much better than the present one
    CERTAIN = 0.97  # and once more as much to begin with speculation: the time without is known, the others estimated
    SHORT = 4  # tokens, and half as many rounds of the level between: the most for what no round has shown yet
    # Of a verify: more than that may be drafted if it should take no longer, although each step that no round has shown
    # may take so many milliseconds more than is guessed.
    CHEAP, UNSURE = 0.2, 2.0

    def __init__(self, costs: Costs, max_gamma: int, max_inner: int, padding: Padding = PADDED,
                 leaves: tuple[bool, bool] = (False, False), trees: tuple[int, int] | None = None,
                 rates: dict[str, Rate] | None = None):
        self.costs, self._sizes, self._trees = costs, (max_inner, max_gamma), trees
        levels = [*costs.sources, *["retrieval"] * costs.has_view]
        names = [name for name in levels if name != "ngram"] + [LEAVES] * (leaves[0] or trees is not None)
        names += [INNER_LEAVES] * leaves[1]
        self.rates = {name: (rates or {}).get(name) or Rate(self.GUESSES.get(name, self.GUESS)) for name in names}
        self.plans = plans = list(candidates(costs, max_gamma, max_inner, padding))
        self.plan = plans[0]  # no speculation
        self.tokens = 1.0  # that a round of it is expected to emit
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
            if drafter != "retrieval" or source is None:
                tokens[which] = emitted(rates.get(drafter, 0.0), self._gamma[which], leaf)
                continue
            # Token j + 1 is emitted if j or more are drafted, and all of them kept; or by a leaf, if all but the last.
            rate, drafted = rates[drafter], at_least(round(rates[source], 2), *self._sizes, self._leaf(INNER_LEAVES))
            kept = drafted * rate ** np.arange(drafted.shape[2])
            kept[..., 1:] *= 1 + leaf * (1 - rate) / rate
            tokens[which] = kept.cumsum(2)[self._inner[which] - 1, self._rounds[which], self._gamma[which]]
        return tokens

    def _leaf(self, name: str) -> float:
        """The chance of a leaf where the drafted token is not kept; 0 where the level has none."""
        return round(self.rates[name].value, 1) if name in self.rates else 0.0

    def choose(self, remaining: float = math.inf, **known: float) -> Plan:
        """The next round's plan.

        Args:
            remaining: tokens of a row that may come yet, in this text and in later ones.
            known: acceptance rates that the caller keeps: that of "ngram", which counts if that is a source.
        """
        costs, rates = self.costs, {name: rate.value for name, rate in self.rates.items()} | known
        believed, tokens = costs.believed, self._tokens(rates)
        drafting, checking = self._drafting @ believed, self._checking @ believed
        preparing = self._recorded @ np.maximum(1 - costs.seen / costs.WELL, 0.0) / max(remaining, 1.0)
        times, new = (drafting + checking) / tokens + preparing, self._drafting @ (costs.seen == 0)  # not shown yet
        is_dear = (new > 0) & (drafting + self.UNSURE * new > self.CHEAP * checking)
        times[is_dear & (self._is_long | ~costs.seen.any())] = np.inf  # without any evidence, all that drafts
        times[0] *= self.CERTAIN
        best, now = int(times.argmin()), self._number[self._chain(self.plan)]
        if times[best] > self.STAY * times[now]:
            best = now
        self.plan, self.tokens = self.plans[best], float(tokens[best])
        if self._trees:
            self._branch(rates, tokens, times, preparing)
        return self.plan

    def _chain(self, plan: Plan) -> Plan:
        """The plan without branches."""
        return replace(plan, branches=0) if plan.branches else plan

    def _branch(self, rates: dict[str, float], tokens: np.ndarray, times: np.ndarray, preparing: np.ndarray) -> None:
        """Sets the best tree, beside the best chain of each length, if one takes less than the chain that is set.

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
                shape, more = best_tree(rates["retrieval"], rates[LEAVES], gamma, length, self._sizes[1], *self._trees)
                time = (times[i] - preparing[i] + each * (shape.length - 1) / tokens[i]) / more + preparing[i]
                if shape.parents and time < least:
                    least, self.tokens = time, float(more * tokens[i])
                    self.plan = replace(self.plans[i], branches=shape.length, shape=shape)

    def timed(self, plan: Plan, drafting: float, checking: float) -> None:
        """How long a round of a plan took, in milliseconds: all before its verify, and that. The first round with a
        drafter is not looked at: memory is touched for the first time."""
        drafter = plan.source, plan.retrieval, plan.branches > 1
        if plan.gamma and drafter not in self._warm:
            self._warm.add(drafter)
            return
        if plan.gamma:
            self.costs.observe(self.costs.drafting(plan), drafting)
        self.costs.observe(self.costs.checking(plan), checking, checks=True)

    def update(self, num_tokens: float, **observed: tuple[int, int]) -> None:
        """After a round: tokens kept in the mean of the rows, and by level (hits, tests) of all rows.

        What lies idle ages with the text, not with the number of rows: or else many rows would try it all the time.
        """
        self.costs.pass_by(num_tokens)
        for name, rate in self.rates.items():
            hits, tests = observed.get(name, (0, 0))
            if tests:
                rate.update(hits, tests)
            else:
                rate.idle(num_tokens)


def candidates(costs: Costs, max_gamma: int, max_inner: int, padding: Padding) -> Iterator[Plan]:
    """Plans to choose from: the first drafts nothing."""
    def lengths(least: int, most: int) -> list[int]:
        return sorted({length for length in LENGTHS if least <= length < most} | {most} if most else set())

    yield Plan(padded=padding.plain)
    steps = {"padded": padding.drafts, "padded_inner": padding.inner}
    for gamma in lengths(1, max_gamma):
        for source in costs.sources:
            yield Plan(gamma, source, padded=padding.drafts)
        if costs.has_view:
            yield Plan(gamma, None, True, 0, gamma, **steps)
        for source in costs.sources if costs.has_view else ():
            for inner in lengths(1, max_inner):
                for rounds in lengths(-(-gamma // (inner + 1)), gamma):
                    yield Plan(gamma, source, True, inner, rounds, **steps)
