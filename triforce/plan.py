"""How one round drafts: a value that the pilot chooses and that is passed down the hierarchy."""

from dataclasses import dataclass
from typing import NamedTuple


class Padding(NamedTuple):
    """Which steps of the target have a fixed number of rows, whatever is drafted.

    The bits of greedy output are promised for padded steps. Others follow the same law and may be faster.
    """

    plain: bool = True  # those that check nothing
    drafts: bool = True  # those that check drafted tokens


@dataclass(frozen=True)
class Plan:
    """How a round drafts. The default drafts nothing."""

    gamma: int = 0  # most tokens proposed to the level that follows the plan
    source: str | None = None  # the drafter at the bottom; None: the retrieval level by itself
    retrieval: bool = False  # a retrieval level checks what the source drafts, and proposes what it emits
    gamma_inner: int = 0  # tokens that the source proposes to the retrieval level
    rounds: int = 0  # of the retrieval level
    padded: bool = True  # a step has all its rows; False: only those of the pending token and of what may be drafted

    @property
    def drafter(self) -> str | None:
        """The name of the drafter that proposes to the level that follows this plan."""
        if self.gamma == 0:
            return None
        return "retrieval" if self.retrieval else self.source

    @property
    def inner(self) -> "Plan":
        """What a round of the retrieval level follows."""
        return Plan(self.gamma_inner if self.source else 0, self.source, padded=self.padded)


PADDED = Padding()
AUTOREGRESSION = Plan()  # in the padded step that speculation is compared with, to the bit
ONE_ROW = Plan(padded=False)  # the fastest autoregression
