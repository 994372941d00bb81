"""Which levels draft, and how many tokens, chosen round by round from observed times and observed acceptance.

Knows nothing of tensors or models: times and counts go in, a `Plan` comes out. It never changes what is said, only how
fast: the choice depends on tokens that were kept and on the first rejection of a round, never on discarded ones, and
acceptance is exact whatever was drafted.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .costs import Costs, Learned, growing
from .plan import PADDED, Padding, Plan
from .tree import FOLLOWERS, Chances, likeliest

LEAVES, INNER_LEAVES = "leaves", "inner_leaves"  # of the full level, and of the retrieval level
FOLLOWER = [f"follower {rank}" for rank in range(FOLLOWERS)]  # of a row of a tree, by rank
SPINES, BRANCHES = (4, 8, 12, 16, 24, 32, 48, 63), (1, 2, 4, 8, 12, 16)  # lengths, of trees to choose from


def emitted(rate, drafted, leaf=0.0):
    """Expected tokens of a round that checks so many drafted ones, each kept with this chance if those before it were:
    1 + rate + ... + rate ** drafted (Leviathan et al., arXiv 2211.17192, eq. 1); and with the chance `leaf` one more
    where one was not kept."""
    return (1 - rate ** (drafted + 1)) / (1 - rate) + leaf * (1 - rate**drafted)


@functools.lru_cache(maxsize=128)  # it takes longer than all else in a choice, and the device waits for those
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
    """An acceptance rate over about the last hundred tests. At first a prior counts as four tests: of a draft that is
    never right, 256 tokens then take 3 or 4% more than without drafts, and with a prior of ten 5 to 7
    (`benchmarks/controller.py`).

    It is given the benefit of the doubt, half of a standard deviation: by an estimate that chance made too low a level
    would be left alone, and nothing would set it right. What lies idle returns to its prior, token by token, so that
    what did badly once gets another chance.
    """

    MEMORY, IDLE_MEMORY, PRIOR_WEIGHT, DOUBT = 0.99, 0.998, 4.0, 0.5
    # Tokens of a row: what has not been tried for so long may have become better. Where nothing of it is kept, the next
    # try comes after twice as many, PATIENCE at most.
    PROBE_AFTER, PATIENCE = 64, 256

    def __init__(self, prior: float):
        self.prior, self.hits, self.tests, self.age = prior, self.PRIOR_WEIGHT * prior, self.PRIOR_WEIGHT, 0
        self.was_tested, self.wait, self._is_probed = False, self.PROBE_AFTER, False

    def update(self, hits: int, tests: int) -> None:
        kept = self.MEMORY**tests
        self.hits, self.tests, self.age = kept * self.hits + hits, kept * self.tests + tests, 0
        self.was_tested = True
        if hits:
            self.wait = self.PROBE_AFTER
        elif self._is_probed:
            self.wait = min(2 * self.wait, self.PATIENCE)
        self._is_probed = False

    def probe(self) -> None:
        """It is about to be tried: once, though the next plan may be chosen before that round is seen."""
        self.age, self._is_probed = 0, True

    @property
    def is_due(self) -> bool:
        """It lies idle, and is to be tried."""
        return self.age >= self.wait

    def idle(self, num_tokens: float) -> None:
        kept = self.IDLE_MEMORY**num_tokens
        back = (1 - kept) * self.PRIOR_WEIGHT
        self.hits, self.tests = kept * self.hits + back * self.prior, kept * self.tests + back
        self.age += num_tokens

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
        costs: see `Costs`; `costs.retrieval` is empty if there is no such level. seen: see `Learned`.
        max_gamma, max_inner: the most tokens that the full level, and the retrieval level, can check.
        padding: of the steps that plans take.
        trees: rows of a tree, and rows that a step drafts after, if the full level checks trees of any shape.
        rounds_with: how many rounds there were with each of PREPARATIONS. The caller adds to it after each round.
        priors: acceptance rates by level, as earlier texts had them. They count no more than those that are guessed.
    """

    # What is recorded in the first rounds that draft, and in the first with a retrieval level: so many steps of all
    # layers. After PREPARED_AFTER such rounds all of it is. A short text may end before it has paid.
    PREPARATIONS, PREPARED_AFTER = {"drafts": 2, "retrieval": 10}, 4
    PRIORS, PRIOR = {"retrieval": 0.9}, 0.5  # of all others; the chances of "ngram" are told from round to round
    FOLLOWERS = Chances(0.9, (0.07, 0.015, 0.005))  # priors of the rows of a tree
    TREE_FOR = 2000.0  # milliseconds of rounds that a tree is kept for: to find the best takes some 50, for 512 rows
    STAY = 0.97  # another plan must be this much better than the present one
    CERTAIN = 0.97  # and once more as much to begin with speculation: the time without is known, the others estimated
    PLAIN_HOPE = 0.6  # of what a round without speculation takes at most: where that would win, it is tried
    SHORT = 4  # tokens, and half as many rounds of the level between: the most for what no round has shown yet
    # Of a verify: more than that may be drafted if it should take no longer, although each step that no round has shown
    # may take so many milliseconds more than is guessed.
    CHEAP, UNSURE = 0.2, 2.0

    def __init__(self, costs: Costs, max_gamma: int, max_inner: int, padding: Padding = PADDED,
                 seen: list[int] | None = None, leaves: tuple[bool, bool] = (False, False),
                 trees: tuple[int, int] | None = None, rounds_with: Counter[str] | None = None,
                 priors: dict[str, float] | None = None):
        self.learned, self.padding = Learned(costs, seen), padding
        self.rounds_with, self._step_prepared = Counter() if rounds_with is None else rounds_with, costs.preparing
        self._sources, self._has_view = list(costs.sources), bool(costs.retrieval)
        levels = ["retrieval"] * self._has_view + self._sources
        priors = self.PRIORS | (priors or {})
        self.rates = {name: Rate(priors.get(name, self.PRIOR)) for name in levels if name != "ngram"}
        self._names = levels
        # The chance that a leaf is drawn where the drafted token is not, where the levels have such.
        self.leaves = {name: Rate(0.5) for name, has in zip((LEAVES, INNER_LEAVES), leaves, strict=True) if has}
        self._trees, self._tree, self._tree_age, self._tree_known = trees, None, 0.0, -1
        self.tree_tokens = 0.0  # that a verify of the present tree is expected to emit
        self.followers = dict(zip(FOLLOWER[1:], map(Rate, self.FOLLOWERS.others), strict=True)) if trees else {}
        self.plans = list(self._candidates(max_gamma, max_inner))
        self._now = 0  # no speculation
        self._warm: set[tuple] = set()  # what has drafted
        self._tabulate(costs, max_gamma, max_inner)

    def _candidates(self, max_gamma: int, max_inner: int) -> Iterable[Plan]:
        yield Plan(padded=self.padding.plain)
        padded, inner = self.padding.drafts, self.padding.inner
        for gamma in range(1, max_gamma + 1):
            for source in self._sources:
                yield Plan(gamma, source, padded=padded)
            if self._has_view:
                yield Plan(gamma, None, True, 0, gamma, padded, inner)
                for source in self._sources:
                    for gamma_inner in range(1, max_inner + 1):
                        for rounds in range(-(-gamma // (gamma_inner + 1)), gamma + 1):
                            yield Plan(gamma, source, True, gamma_inner, rounds, padded, inner)

    def lasting_rates(self) -> dict[str, float]:
        """What the next text is to begin with. A rate that this one has not tested goes halfway back to the guess:
        short texts end before they would try once more what did badly in one."""
        return {name: rate.mean if rate.was_tested else (rate.prior + self.PRIORS.get(name, self.PRIOR)) / 2
                for name, rate in self.rates.items()}

    def times_per_token(self, rates: dict[str, float]) -> np.ndarray:
        """Expected milliseconds of each of `plans`, if the levels' acceptance rates are these."""
        return self._round / self._tokens(rates)

    def _tokens(self, rates: dict[str, float]) -> np.ndarray:
        """How many tokens a round of each plan is expected to emit."""
        chance = np.array([*(rates[name] for name in self._names), 0.0])
        outer = self._leaf(LEAVES)
        tokens = emitted(chance[self._checker], self._gamma, outer)  # if all of gamma is drafted
        for name, (which, *entry) in self._hierarchies.items():  # the level in between may draft fewer
            known = self._reached(name, rates)
            # Token j + 1 is emitted if j or more are drafted, and all of them kept; or by a leaf, if all but the last.
            kept, rate = known * rates["retrieval"] ** np.arange(known.shape[2]), rates["retrieval"]
            kept[..., 1:] *= 1 + outer * (1 - rate) / rate
            tokens[which] = kept.cumsum(2)[tuple(entry)]
        return tokens

    def _tabulate(self, costs: Costs, max_gamma: int, max_inner: int) -> None:
        """What stays as it is over time, as arrays: there are thousands of plans for large blocks."""
        plans = self.plans
        number = {name: i for i, name in enumerate(self._names)} | {None: len(self._names)}
        self._gamma = np.array([plan.gamma for plan in plans])
        self._drafting = np.stack([self.learned.weights(costs.drafting(plan)) for plan in plans])
        checks = {plan.gamma: self.learned.weights(costs.checking(plan)) for plan in plans}
        self._checking = np.stack([checks[plan.gamma] for plan in plans])
        self._long = (self._gamma > self.SHORT) | (2 * np.array([plan.rounds for plan in plans]) > self.SHORT)
        source = np.array([number[plan.source] for plan in plans])
        self._checker = np.array([number["retrieval" if plan.retrieval else plan.source] for plan in plans])
        self._uses = {name: (source == i) | (self._checker == i) for name, i in number.items() if name}
        self._sizes = max_inner, max_gamma
        self._hierarchies = {}  # by source: its plans with a level in between, and for each its entry of `at_least`
        for name in costs.sources if costs.retrieval else ():
            which = [i for i, plan in enumerate(plans) if plan.retrieval and plan.source == name]
            entries = [(plans[i].gamma_inner - 1, plans[i].rounds, plans[i].gamma) for i in which]
            self._hierarchies[name] = np.array(which), *np.array(entries).T
        self._has_level = hierarchies = np.array([plan.retrieval for plan in plans])
        spines = {min(gamma, max_gamma) for gamma in SPINES} if self._trees else ()
        self._spines = {gamma: np.flatnonzero(hierarchies & (self._gamma == gamma)) for gamma in sorted(spines)}
        self._number = {plan: i for i, plan in enumerate(plans)}
        self._add_up()

    def _add_up(self) -> None:
        """Milliseconds of a round of each plan."""
        self._costs = self.learned.believed
        drafting, checking = (weights @ self._costs for weights in (self._drafting, self._checking))
        self._round = drafting + checking
        new = self._drafting @ (self.learned.seen == 0)  # steps that no round has shown
        self._dear = (new > 0) & (drafting + self.UNSURE * new > self.CHEAP * checking)

    def timed(self, plan: Plan, drafting: float, checking: float) -> None:
        """How long a round of a plan took, in milliseconds: all before its verify, and that.

        The first round with a drafter is not looked at: memory is touched for the first time. Nor is one without drafts
        that took another step than plans without drafts take.
        """
        drafter = plan.source, plan.retrieval, plan.branches > 1
        if plan.gamma == 0 and plan != self.plans[0]:
            return
        if plan.gamma and drafter not in self._warm:
            self._warm.add(drafter)
            return
        i = self._chain_of(plan)
        if plan.gamma:
            drafts = self._drafting[i] + self._growing(plan.branches) if plan.branches else self._drafting[i]
            self.learned.observe(drafts, drafting)
        self.learned.observe(self._checking[i], checking, checks=True)
        self._add_up()

    def choose(self, remaining: float = math.inf, **known: float) -> Plan:
        """The next round's plan.

        Args:
            remaining: tokens of a row that may come yet, in this text and in later ones.
            known: acceptance rates that the caller keeps: that of "ngram", which counts if that is a source.
        """
        rates = {name: rate.value for name, rate in self.rates.items()} | known
        preparing = self._preparing() / max(remaining, 1.0)
        too_long = self._dear & (self._long | ~self.learned.seen.any())  # without any evidence, all that drafts
        times = np.where(too_long, np.inf, self.times_per_token(rates) + preparing)
        times[0] *= self.CERTAIN
        best = int(times.argmin())
        if times[best] > self.STAY * times[self._now]:
            best = self._now
        self._now = best
        self._renew_tree(times, rates, preparing)
        if self._doubts_plain(times, remaining):
            return self.plans[0]
        used = best if self._tree is None else self._chain_of(self._tree)
        for name, rate in self.rates.items():  # try what lies idle, if it could win at all
            if rate.is_due and not self._uses[name][used]:
                hopes = np.where(self._uses[name], self.times_per_token(rates | {name: 0.95}) + preparing, np.inf)
                worth = hopes < 0.9 * times[best]
                if worth.any():  # by the shortest round that could
                    tried = int(np.where(worth, self._round, np.inf).argmin())
                    for other, tested in self.rates.items():
                        if self._uses[other][tried]:
                            tested.probe()
                    return self.plans[tried]
        return self.plan

    def _doubts_plain(self, times: np.ndarray, remaining: float) -> bool:
        """Whether a round without speculation is to show anew what it takes. While others are chosen it is not seen, so
        a time that is too long by chance, as on a busy machine, would be believed to the end. A GPU measures well. Its
        time is doubted only where a step of more rows takes less, which cannot be, and where recording the step may
        pay.
        times, remaining: see `choose`."""
        if self.plan.gamma == 0:
            return False
        step, learned = self._checking[0] > 0, self.learned
        impossible = self._costs[step].sum() < self.CERTAIN * learned.values[step].sum()
        if self._step_prepared and not impossible:
            return False
        well = learned.seen[step].min() >= learned.WELL and not impossible
        gain = times[self._now] - self.PLAIN_HOPE * times[0]  # of a token, at most
        return (learned.age[step].min() >= (Rate.PROBE_AFTER if well else Rate.PROBE_AFTER / 4)
                and gain * max(remaining, 1.0) > self._step_prepared)

    def _preparing(self) -> np.ndarray:
        """Milliseconds that are yet to be spent on the steps of each plan, before it is as fast as it will be."""
        to_come = {name: count * max(1 - self.rounds_with[name] / self.PREPARED_AFTER, 0.0)
                   for name, count in self.PREPARATIONS.items()}
        return self._step_prepared * (to_come["drafts"] * (self._gamma > 0) + to_come["retrieval"] * self._has_level)

    def _renew_tree(self, times: np.ndarray, rates: dict[str, float], preparing: np.ndarray) -> None:
        """Looks for a tree from time to time, and when a cost has become known. All arguments: see `_best_tree`."""
        if not self._trees:
            return
        self._tree_age += self._round[self._now]
        known = int((self.learned.seen > 0).sum())
        if self._tree_age >= self.TREE_FOR or known != self._tree_known:
            self._tree, self.tree_tokens = self._best_tree(times, rates, preparing, times[self._now])
            self._tree_age, self._tree_known = 0.0, known

    def _chain_of(self, plan: Plan) -> int:
        """The number of the plan without branches."""
        return self._number[replace(plan, branches=0) if plan.branches else plan]

    def _growing(self, branches: int) -> np.ndarray:
        """How often a round with such branches pays for each part more than without."""
        return self.learned.weights(growing(branches))

    def _best_tree(self, times: np.ndarray, rates: dict[str, float], preparing: np.ndarray,
                   chain: float) -> tuple[Plan | None, float]:
        """The plan with branches of least expected time per token, if that is below a chain's: beside the best chain of
        each length; and the tokens that it is expected to emit.

        Args:
            times, preparing: of `plans`, per token; the second is part of the first. chain: the present one's.
            rates: of all levels.
        """
        first, others = round(rates["retrieval"], 3), [follower.value for follower in self.followers.values()]
        share = min(1.0, (1 - first) / sum(others))  # each has the benefit of the doubt, and one draw decides them all
        chances = Chances(first, tuple(round(share * other, 3) for other in others))
        known = self.learned.seen[self.learned.number["growth", 0]] > 0
        found, least, expected = None, self.STAY * chain, 0.0
        for gamma, which in self._spines.items():
            i = int(which[times[which].argmin()])
            if not np.isfinite(times[i]):  # too long for what no round has shown yet
                continue
            drafted = self._drafted(self.plans[i], rates)
            for length in BRANCHES if known else [one for one in BRANCHES if one <= self.SHORT]:
                shape, tokens = likeliest(chances, gamma, length, rows=self._trees[0], depth=self._sizes[1],
                                          width=self._trees[1], drafted=drafted)
                round_time = self._round[i] + self._growing(shape.length) @ self._costs
                time = round_time / tokens + preparing[i]
                if time < least and shape.parents:
                    found, least = replace(self.plans[i], branches=shape.length, shape=shape), time
                    expected = tokens
                if shape.length < length:  # with longer branches it is the same tree
                    break
        return found, expected

    def _leaf(self, name: str) -> float:
        """The chance of a leaf where the drafted token is not kept; 0 where the level has none."""
        return round(self.leaves[name].value, 1) if name in self.leaves else 0.0

    def _reached(self, source: str, rates: dict[str, float]) -> np.ndarray:
        """`at_least` of the retrieval level, where this source drafts for it."""
        return at_least(round(rates[source], 2), *self._sizes, self._leaf(INNER_LEAVES))

    def _drafted(self, plan: Plan, rates: dict[str, float]) -> tuple[float, ...]:
        """The chances that the retrieval level drafts 0, 1, ..., gamma tokens, or more."""
        if plan.source is None:
            return (1.0,) * (plan.gamma + 1)
        chances = self._reached(plan.source, rates)[plan.gamma_inner - 1, plan.rounds, : plan.gamma + 1]
        return tuple(chances.round(3).tolist())

    @property
    def plan(self) -> Plan:
        """What was chosen last, other than to try something."""
        return self.plans[self._now] if self._tree is None else self._tree

    def update(self, num_tokens: float, **observed: tuple[int, int]) -> None:
        """After a round: tokens kept in the mean of the rows, and by level (hits, tests) of all rows.

        What lies idle ages with the text, not with the number of rows: or else many rows would try it all the time.
        """
        self.learned.pass_by(num_tokens)
        for name, rate in (self.rates | self.leaves | self.followers).items():
            hits, tests = observed.get(name, (0, 0))
            if tests:
                rate.update(hits, tests)
            else:
                rate.idle(num_tokens)
