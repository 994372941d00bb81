"""A draft model on some of the ranks that share a target. The others learn what it drafted: one broadcast a proposal.

Knows of a drafter what `speculation.Drafter` says, and of a group how to broadcast.
"""

import torch
from torch import Tensor

from .parallel import Group
from .speculation import ModelDrafter, Tape


class SharedDrafter:
    """What a rank knows of the drafter that runs here, or elsewhere.

    Args:
        drafter: this rank's, or its share of it; None: it runs elsewhere.
        source: the rank whose proposals hold for all.
        gamma: how many tokens to propose; may change between proposals.
    """

    settled_count = True

    def __init__(self, drafter: ModelDrafter | None, tape: Tape, group: Group, source: int, *, gamma: int):
        self.drafter, self.tape, self.group, self.source, self.gamma = drafter, tape, group, source, gamma
        self.length = tape.buffer() if drafter is None else drafter.length
        self.memory = None if drafter is None else drafter.memory
        self.num_drafted = tape.buffer()

    def prefill(self, row: int, length: int, known: int = 0) -> None:
        if self.drafter is not None:
            self.drafter.prefill(row, length, known)

    def rewind(self, row: int, length: int) -> None:
        if self.drafter is not None:
            self.drafter.rewind(row, length)

    def open(self, max_len: int) -> None:
        if self.drafter is not None:
            self.drafter.open(max_len)

    def flush(self, row: int, length: int) -> None:
        if self.drafter is not None:
            self.drafter.flush(row, length)

    def propose(self, start: Tensor, n: int, probs: Tensor) -> Tensor:
        """See `Drafter.propose`."""
        count = min(self.gamma, n)
        if self.drafter is not None:
            self.drafter.gamma = count
            self.drafter.propose(start, n, probs)
        self.num_drafted.fill_(count)
        place = start[:, None] + 1 + torch.arange(count, device=start.device)
        self.tape.tokens.scatter_(1, place, self.group.broadcast(self.tape.tokens.gather(1, place), self.source))
        probs[:, :count] = self.group.broadcast(probs[:, :count].contiguous(), self.source)
        return self.num_drafted

    def commit(self, length: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.commit(length)
