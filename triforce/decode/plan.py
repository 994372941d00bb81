"""How one round drafts: a value that the pilot chooses and that is passed down the hierarchy."""

from dataclasses import dataclass
from typing import NamedTuple

# The numbers of tokens, and of rounds of the retrieval level, in a controller's plans, beside the most that fit.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
BRANCH = 8  # rows of the branches of a tree, at most


class Padding(NamedTuple):
    """Which steps of the target have more rows than they need, for the sake of bits: all, or on a CPU a multiple of
    four (see cpu.py).

    The bits of greedy output are promised for padded steps of the full level. Others follow the same distribution and
    may be faster.
    """

    plain: bool = True  # of the full level, those that check nothing
    drafts: bool = True  # of the full level, those that check drafted tokens
    inner: bool = True  # of the retrieval level


@dataclass(frozen=True)
class DraftPlan:
    """How a round drafts. The default drafts nothing."""

    gamma: int = 0  # most tokens proposed to the level that follows the plan
    source: str | None = None  # the drafter at the bottom; None: the retrieval level by itself
    retrieval: bool = False  # a retrieval level checks what the source drafts, and proposes what it emits
    gamma_inner: int = 0  # tokens that the source proposes to the retrieval level
    rounds: int = 0  # of the retrieval level
    padded: bool = True  # see `Padding`; False: a step has the rows of the pending token and of what may be drafted
    padded_inner: bool = True  # the same of the retrieval level's steps
    branches: int = 0  # rows of a branch that the retrieval level grows beside the chain, at most; 0: there are none

    @property
    def drafter(self) -> str | None:
        """The name of the drafter that proposes to the level that follows this plan."""
        if self.gamma == 0:
            return None
        return "retrieval" if self.retrieval else self.source

    @property
    def inner(self) -> "DraftPlan":
        """What a round of the retrieval level follows."""
        return DraftPlan(self.gamma_inner if self.source else 0, self.source, padded=self.padded_inner)


PADDED = Padding()
AUTOREGRESSION = DraftPlan()  # in the padded step that speculation is compared with, to the bit
ONE_ROW = DraftPlan(padded=False)  # the fastest autoregression
