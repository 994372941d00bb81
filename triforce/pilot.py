"""Chooses each round's plan, and says when to choose a view anew.

It learns from kept tokens, first rejections, and times that do not depend on discarded tokens. So its decisions cannot
bias the output.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from .config import Settings
from .controller import FOLLOWER, INNER_LEAVES, LEAVES, Controller
from .costs import Shelf, guess
from .drafting.ngram import NgramMeter
from .kv.views import COMMON
from .plan import PADDED, Padding, Plan
from .speculator import RowRound
from .tape import ACCEPTED, LEAF, MISSED
from .tree import Shape, likeliest

BRANCHES = 8  # where the length of branches is not chosen

if TYPE_CHECKING:
    from .hierarchy import Hierarchy, Round
    from .parallel import Group


class Pilot:
    """See the module.

    Args:
        shelf: of costs that were learned before.
        group: the ranks that must choose alike, or None.
        rebuild_interval: tokens between two choices of a row's view. common_interval: of the one that rows share.
        meter: gives that of what all rows share. None: it is made here.
    """

    # On a CPU a choice takes 3% of a short round. Where nothing was drafted for a while, the next one comes after a
    # quarter as many rounds more, at most so many.
    SELDOM = 8

    def __init__(self, hierarchy: "Hierarchy", settings: Settings, *, shelf: Shelf, group: "Group | None",
                 rebuild_interval: int, common_interval: int, meter: Callable[[], NgramMeter] | None = None):
        self.hierarchy, self.shelf, self.group = hierarchy, shelf, group
        self.auto = settings.auto and bool(hierarchy.drafters)
        self._trees = (settings.tree.rows, settings.tree_width) if settings.tree_size else None
        self.default = default_plan(settings, hierarchy)  # what rounds follow where nothing is chosen
        self.padding = PADDED
        self.controller: Controller | None = None
        self.meters: list[NgramMeter | None] = []  # of each row that is not finished, where n-grams are to choose
        self.rebuild_interval, self.common_interval = rebuild_interval, common_interval
        self.rebuilds: dict[int, RebuildPolicy] = {}  # by row, and of COMMON where rows share one; none without views
        self._shared_meter = meter
        self._begins = self.auto  # no round has been chosen yet
        # By what the recorded steps are made of, since they outlive a text. See `Controller`.
        self._all_rounds_with: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
        self._rounds_with: Counter[str] = Counter()  # those of the present text
        self._remaining = 0.0  # tokens of a row that this text may have yet
        self._earlier, self._emitted = 0.0, 0.0  # tokens of a row in the texts before it, and in it
        self._name: tuple = ()  # of the costs on the shelf
        self._fixed: Plan | None = None
        self._planned: list[Plan] = []  # of the rounds to come, as far as that is known
        self._on_cpu = hierarchy.outer.length.device.type == "cpu"
        self._calm = 0  # rounds without drafts of late
        self._unseen: list[Round] = []  # that followed what was chosen, and have not been learned from yet

    def open(self, plan: Plan | None, padding: Padding, lengths: list[int], max_new_tokens: int,
             texts: Callable[[int], list[list[int]]]) -> None:
        """Decoding begins.

        Args:
            plan: what all rounds follow; None: chosen, or what the settings say.
            padding: of the steps of plans that are not given.
            lengths: settled tokens of each row. max_new_tokens: of a row, at most.
            texts: gives each row's tokens from a position on, the pending one among them.
        """
        self._fixed, self.padding, self._remaining = plan, padding, max_new_tokens
        self._earlier, self._emitted = self._earlier + self._emitted, 0.0
        self._planned, self._unseen, self._calm = [], [], 0
        self.controller, self.meters = None, []
        self._rounds_with = self._all_rounds_with[self.hierarchy.compiler.settings]
        has_views = self.hierarchy.view is not None
        self.rebuilds = {row: RebuildPolicy(self.rebuild_interval) for row in range(len(lengths)) if has_views}
        if has_views and self.hierarchy.cache.prefix.base:
            self.rebuilds[COMMON] = RebuildPolicy(self.common_interval)
        if plan is None and self.auto:
            self._name = self.shelf.name(padding, lengths, self.hierarchy)
            guessed = guess(self.hierarchy, padding, lengths)
            costs, seen = self.shelf.find(self._name, guessed) or (guessed, [0] * len(guessed.parts()))
            priors = self.shelf.find_rates(self._name)
            if self.group is not None:  # a guess, too: a rank without the draft does not know what it reads
                costs, seen, priors = self.group.agree((costs, seen, priors))
            inner = self.hierarchy.inner
            leaves = self.hierarchy.outer.tree.leaves > 0, inner is not None and inner.tree.leaves > 0
            self.controller = Controller(costs, self.hierarchy.outer.rows - 1, inner.rows - 1 if inner else 0, padding,
                                         seen, leaves, self._trees, self._rounds_with, priors)
            if "ngram" in self.hierarchy.sources:
                self.meters = self._meters(texts)

    def _meters(self, texts: Callable[[int], list[list[int]]]) -> list[NgramMeter | None]:
        """One a row. What all rows share is gone through once."""
        base = self.hierarchy.cache.prefix.base
        if base == 0:
            return [NgramMeter(text) for text in texts(0)]
        shared = NgramMeter(texts(0)[0][:base]) if self._shared_meter is None else self._shared_meter()
        return [shared.fork(text) for text in texts(base)]

    def choose(self) -> Plan:
        """The next round's plan."""
        if self._on_cpu:
            self._learn_and_choose()
        self.ahead()
        self._begins = self._begins and self.controller is None
        return self._planned.pop(0)

    def ahead(self) -> list[Plan]:
        """What the rounds to come follow, as far as it is known: at least the next one's plan."""
        if not self._planned:
            self._planned = self._choose()
        return list(self._planned)

    def _choose(self) -> list[Plan]:
        """Of the next round, and perhaps of the one after it.

        The very first drafts nothing: so the first token waits for nothing that does. Where steps are recorded, and
        drafts are to come, it takes the step that checks them: the next rounds then need not run it as it is written.
        """
        if self._fixed is not None:
            return [self._fixed]
        if self.controller is None:
            gathering = self.hierarchy.gathering
            if gathering is not None and gathering.is_stale and self.default.retrieval:
                return [Plan(padded=self.padding.plain)]  # what an earlier call selected must decide nothing
            return [replace(self.default, padded=self.padding.drafts if self.default.gamma else self.padding.plain,
                            padded_inner=self.padding.inner)]
        if not self._begins:
            return [self._best()]
        if not self.hierarchy.outer.is_recorded:
            return [Plan(padded=self.padding.plain)]
        second = self._best()
        return [Plan(padded=self.padding.plain or second.gamma > 0), second]

    def _best(self) -> Plan:
        """What the controller would have the next round follow. Later texts are expected to have as many tokens as
        earlier ones had: so recording a step may pay although each text is short."""
        rates = [meter.rate for meter in self.meters if meter is not None]
        return self.controller.choose(remaining=self._remaining + self._earlier, ngram=statistics.fmean(rates or [0.0]))

    def think(self) -> None:
        """While the device works. On a CPU nothing goes on beside: there a choice waits for what the round shows."""
        if not self._on_cpu:
            self._learn_and_choose()

    def _learn_and_choose(self) -> None:
        """Takes in what the rounds before showed, and chooses what the next one follows."""
        is_calm = self._on_cpu and self._unseen and self._unseen[-1].plan.gamma == 0
        if is_calm and len(self._unseen) < min(self._calm // 4, self.SELDOM):
            self._planned = [self.controller.plans[0]]
            return
        self._learn()
        self.ahead()

    def _learn(self) -> None:
        for result in self._unseen:
            if result.timing is not None:
                self.controller.timed(result.timing.plan, result.timing.drafting, result.timing.checking)
            seen = Tally(result.plan)
            for row in result.rows:
                seen.add(row)
            self.controller.update(seen.tokens_a_row, **seen.counts)
            self._remaining -= seen.tokens_a_row
            self._emitted += seen.tokens_a_row
            self._rounds_with.update(drafts=result.plan.gamma > 0, retrieval=result.plan.retrieval)
        self._unseen = []

    def keep(self) -> None:
        """The generation has ended: what it showed of costs and acceptance is kept."""
        self._learn()
        if self.controller is not None and (self.group is None or self.group.rank == 0):
            self.shelf.put(self._name, self.controller.learned)
            self.shelf.put_rates(self._name, self.controller.lasting_rates())

    def close_row(self, row: int) -> None:
        """The row is finished."""
        if self.meters:
            self.meters[row] = None

    def observe(self, result: "Round", was_chosen: bool) -> list[int]:
        """Takes a round in. Returns the rows whose views are due to be chosen anew, COMMON perhaps among them.

        Args:
            was_chosen: it followed what `choose` gave.
        """
        if self.controller is not None and was_chosen:
            self._unseen.append(result)
            self._calm = min(self._calm + 1, 4 * self.SELDOM) if result.plan.gamma == 0 else self._calm // 2
        for i, meter in enumerate(self.meters):
            if meter is not None:
                meter.update(result.rows[i].tokens)
        return [row for row, policy in self.rebuilds.items()
                if policy.update(result.rows if row == COMMON else [result.rows[row]])]

    def rebuilt(self, rows: list[int]) -> None:
        """The views of these rows have been chosen."""
        for row in rows:
            self.rebuilds[row].rebuilt()


def default_plan(settings: Settings, hierarchy: "Hierarchy") -> Plan:
    """What rounds follow where the settings say it."""
    source = next(iter(hierarchy.sources), None)
    if not settings.retrieval:
        return Plan(settings.gamma, source) if source else Plan()
    rounds, inner = (settings.gamma, 0) if source is None else (-(-settings.gamma // 2), settings.gamma_inner)
    plan = Plan(settings.gamma, source, True, inner, rounds)
    if not settings.tree_size:
        return plan
    shape, _ = likeliest(Controller.FOLLOWERS, settings.gamma, BRANCHES, rows=settings.tree.rows,
                         depth=settings.block_size - 1, width=settings.tree_width)
    return replace(plan, branches=shape.length, shape=shape) if shape.parents else plan


class Tally:
    """What a round showed of each level's acceptance, over its rows: kept tokens and first rejections only."""

    def __init__(self, plan: Plan):
        self.plan, self.tokens, self.rows, self.counts = plan, 0, 0, {}

    @property
    def tokens_a_row(self) -> float:
        return self.tokens / max(self.rows, 1)

    def observe(self, name: str, hits: int, tests: int) -> None:
        known = self.counts.get(name, (0, 0))
        self.counts[name] = known[0] + hits, known[1] + tests

    def add(self, row: RowRound) -> None:
        """Takes in a row; one that emitted nothing has ended."""
        if not row.tokens:
            return
        self.tokens += len(row.tokens)
        self.rows += 1
        if self.plan.branches:
            self._walk(self.plan.shape, row)
        checked = self.plan.drafter
        if checked is not None and checked != "ngram":  # whose rates are kept by its meter
            # A drafter that proposed nothing has missed: or one that seldom proposes would keep the rate it began with.
            missed = row.num_accepted < max(row.num_drafted, 1)
            self.observe(checked, row.num_accepted, row.num_accepted + missed)
        if row.num_accepted < row.num_drafted and not self.plan.branches:
            self.observe(LEAVES, row.beside, 1)
        if self.plan.retrieval and self.plan.source not in (None, "ngram"):
            hits, misses, leaves = (row.origins[: row.num_accepted].count(kind) for kind in (ACCEPTED, MISSED, LEAF))
            self.observe(self.plan.source, hits, hits + misses + leaves)
            self.observe(INNER_LEAVES, leaves, misses + leaves)


    def _walk(self, shape: Shape, row: RowRound) -> None:
        """Down a tree: at each row that was kept, which of those that follow it beside the first was kept, too."""
        path = list(row.path[: row.num_accepted + row.beside + 1])
        # Cut off by a limit, the last may have had another that was kept.
        ends = [] if row.num_accepted + row.beside == len(row.tokens) else [None]
        followers = shape.followers
        for here, kept in zip(path, path[1:] + ends, strict=False):
            if here < row.num_drafted or here > shape.spine:  # beyond the end of a spine nothing is known
                for follower in followers[here]:
                    if (rank := shape.rank(follower)) > 0:
                        self.observe(FOLLOWER[rank], int(follower == kept), 1)


class RebuildPolicy:
    """When a selection is renewed, of a row or of all that share one: every `interval` tokens of a row, and when
    acceptance falls well below its average."""

    def __init__(self, interval: int):
        self.interval, self.tokens, self.recent, self.average = interval, 0, 1.0, None

    def update(self, rows: list[RowRound]) -> bool:
        """Takes in what a round brought for the rows. Returns whether a selection is due."""
        going = [row for row in rows if row.tokens]  # the others have ended
        if not going:
            return False
        self.tokens += sum(len(row.tokens) for row in going) / len(going)
        if accepted_or_not := sum(row.num_accepted + (row.num_accepted < row.num_drafted) for row in going):
            rate = sum(row.num_accepted for row in going) / accepted_or_not
            self.average = rate if self.average is None else 0.95 * self.average + 0.05 * rate
            self.recent = 0.6 * self.recent + 0.4 * rate
        dropped = self.average is not None and self.recent < 0.7 * self.average
        return self.tokens >= self.interval or dropped and self.tokens >= 8

    def rebuilt(self) -> None:
        self.tokens, self.recent = 0, self.average if self.average is not None else 1.0
