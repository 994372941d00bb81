"""Which levels draft, and how many tokens, chosen round by round from measured step times and observed acceptance.

Knows nothing of tensors or models: times and counts go in, a `Plan` comes out. It never changes what is said, only how
fast: the choice depends on tokens that were kept and on the first rejection of a round, never on discarded ones, and
acceptance is exact whatever was drafted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """How the next round drafts. gamma 0: not at all."""

    gamma: int = 0  # most tokens proposed to the full level
    source: str | None = None  # what drafts at the bottom: "model", "ngram", or None: the retrieval level by itself
    retrieval: bool = False  # a retrieval level checks the source first
    gamma_inner: int = 0  # tokens that the source proposes to the retrieval level
    rounds: int = 0  # of the retrieval level


@dataclass
class Costs:
    """Milliseconds of each step: measured on this machine, with this context."""

    verify: dict[int, float]  # by rows, over the full cache
    retrieval: dict[int, float] = field(default_factory=dict)  # by rows, over the retrieval view
    sources: dict[str, tuple[float, float]] = field(default_factory=dict)  # the first token of a proposal, each further

    def drafting(self, source: str | None, count: int) -> float:
        if source is None or count == 0:
            return 0.0
        first, further = self.sources[source]
        return first + (count - 1) * further


def at(table: dict[int, float], rows: float) -> float:
    """Linear between the measured numbers of rows, constant beyond them."""
    known = sorted(table)
    if rows <= known[0]:
        return table[known[0]]
    for low, high in zip(known, known[1:], strict=False):
        if rows <= high:
            return table[low] + (table[high] - table[low]) * (rows - low) / (high - low)
    return table[known[-1]]


def emitted(rate: float, drafted: float) -> float:
    """Expected tokens of a round that checks so many drafted ones, each kept with this chance if those before it were:
    1 + rate + ... + rate ** drafted (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return (1 - rate ** (drafted + 1)) / (1 - rate)


class Rate:
    """An acceptance rate that forgets: the last hundred tests or so count, on top of a prior worth twenty.

    What lies idle is forgotten as well, token by token, so that a level that did badly once gets another chance.
    """

    MEMORY, IDLE_MEMORY, PRIOR_WEIGHT = 0.99, 0.998, 20.0

    def __init__(self, prior: float):
        self.prior, self.hits, self.tests, self.age = prior, 0.0, 0.0, 0

    def update(self, hits: int, tests: int) -> None:
        self._forget(self.MEMORY**tests)
        self.hits, self.tests, self.age = self.hits + hits, self.tests + tests, 0

    def idle(self, num_tokens: int) -> None:
        self._forget(self.IDLE_MEMORY**num_tokens)
        self.age += num_tokens

    def _forget(self, factor: float) -> None:
        self.hits, self.tests = factor * self.hits, factor * self.tests

    @property
    def value(self) -> float:
        rate = (self.hits + self.PRIOR_WEIGHT * self.prior) / (self.tests + self.PRIOR_WEIGHT)
        return min(rate, 0.98)


class Controller:
    """Chooses the plan of least expected time per token.

    Args:
        costs: see `Costs`; `costs.retrieval` is empty if there is no such level.
        max_gamma, max_inner: the most tokens that the full level, and the retrieval level, can check.
    """

    PRIORS = {"retrieval": 0.88, "model": 0.55, "ngram": 0.25}
    STAY = 0.98  # another plan must be this much better than the present one
    PROBE_AFTER = 128  # tokens; what has not been tried for so long may have become better

    def __init__(self, costs: Costs, max_gamma: int, max_inner: int):
        self.costs = costs
        levels = (["retrieval"] if costs.retrieval else []) + list(costs.sources)
        self.rates = {name: Rate(self.PRIORS[name]) for name in levels}
        self.plans = list(self._candidates(max_gamma, max_inner))
        self.plan = Plan()

    def _candidates(self, max_gamma: int, max_inner: int) -> Iterable[Plan]:
        yield Plan()
        for gamma in range(1, max_gamma + 1):
            for source in self.costs.sources:
                yield Plan(gamma, source)
            if self.costs.retrieval:
                yield Plan(gamma, None, True, 0, gamma)
                for source in self.costs.sources:
                    for gamma_inner in range(1, max_inner + 1):
                        for rounds in range(-(-gamma // (gamma_inner + 1)), gamma + 1):
                            yield Plan(gamma, source, True, gamma_inner, rounds)

    def time_per_token(self, plan: Plan, rates: dict[str, float] | None = None) -> float:
        """Expected milliseconds. rates: None: as observed."""
        costs, rates = self.costs, self.observed() if rates is None else rates
        if plan.gamma == 0:
            return at(costs.verify, 1)
        if not plan.retrieval:
            time = costs.drafting(plan.source, plan.gamma) + at(costs.verify, 1 + plan.gamma)
            return time / emitted(rates[plan.source], plan.gamma)
        inner = emitted(rates[plan.source], plan.gamma_inner) if plan.source else 1.0
        drafted = min(plan.rounds * inner, plan.gamma)
        time = costs.drafting(plan.source, plan.gamma_inner) + at(costs.retrieval, 1 + plan.gamma_inner)
        return (plan.rounds * time + at(costs.verify, 1 + drafted)) / emitted(rates["retrieval"], drafted)

    def observed(self) -> dict[str, float]:
        return {name: rate.value for name, rate in self.rates.items()}

    def choose(self) -> Plan:
        rates = self.observed()
        time, best = self._fastest(self.plans, rates)
        if time > self.STAY * self.time_per_token(self.plan, rates):
            best = self.plan
        for name, rate in self.rates.items():  # try what lies idle, if it could win at all
            if rate.age >= self.PROBE_AFTER and name != "ngram" and name not in _levels(best):
                trying = [plan for plan in self.plans if name in _levels(plan)]
                time, hopeful = self._fastest(trying, rates | {name: 0.95})
                if time < 0.9 * self.time_per_token(best, rates):
                    return hopeful
        self.plan = best
        return best

    def _fastest(self, plans: list[Plan], rates: dict[str, float]) -> tuple[float, Plan]:
        times = [self.time_per_token(plan, rates) for plan in plans]
        return min(zip(times, plans, strict=True), key=lambda pair: pair[0])

    def update(self, num_tokens: int, **observed: tuple[int, int]) -> None:
        """After a round: tokens kept, and by level (hits, tests)."""
        for name, rate in self.rates.items():
            hits, tests = observed.get(name, (0, 0))
            if tests:
                rate.update(hits, tests)
            else:
                rate.idle(num_tokens)


def _levels(plan: Plan) -> set[str]:
    return {name for name in (plan.source, "retrieval" if plan.retrieval else None) if name}
