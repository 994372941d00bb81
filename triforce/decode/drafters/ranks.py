"""A draft model on some of the ranks that share a target. One broadcast a proposal tells the others what it drafted."""

import torch
from torch import Tensor

from ...parallel import Group
from ..plan import DraftPlan
from ..tape import Tape
from .base import Drafter
from .model import ModelDrafter


class SharedDrafter(Drafter):
    """What a rank knows of the draft model that runs here, or elsewhere.

    Args:
        drafter: this rank's, or its share of it; None: it runs elsewhere.
        source: the rank whose proposals hold for all.
    """

    def __init__(self, drafter: ModelDrafter | None, tape: Tape, group: Group, source: int):
        self.own = own = Drafter() if drafter is None else drafter
        self.runs_here, self.tape, self.group, self.source = drafter is not None, tape, group, source
        self.nbytes, self.weight_bytes, self.num_layers = own.nbytes, max(own.weight_bytes, 1), own.num_layers
        self.num_drafted = tape.buffer()
        # What is settled is the business of this rank's own drafter, and of nobody where there is none.
        self.prefill, self.open, self.rewind = own.prefill, own.open, own.rewind
        self.catch_up, self.leave_out, self.commit = own.catch_up, own.leave_out, own.commit
        self.depart = own.depart

    def propose(self, start: Tensor, plan: DraftPlan, probs: Tensor | None) -> Tensor:
        if self.runs_here:
            self.own.propose(start, plan, probs)
        count = plan.gamma
        self.num_drafted.fill_(count)
        place = start[:, None] + 1 + torch.arange(count, device=start.device)
        self.tape.tokens.scatter_(1, place, self.group.broadcast(self.tape.tokens.gather(1, place), self.source))
        if self.tape.runners_up.shape[2]:
            row = torch.arange(len(start), device=start.device)[:, None]
            self.tape.runners_up[row, place] = self.group.broadcast(self.tape.runners_up[row, place], self.source)
        if probs is not None:
            probs[:, :count] = self.group.broadcast(probs[:, :count].contiguous(), self.source)
        return self.num_drafted
