"""Drafting by looking up: what followed the last few tokens when they last stood in the prompt or the output.

Needs no model and no training (prompt lookup; LLMA, arXiv 2304.04487). A proposal is deterministic: it has no law to
sample from, and acceptance treats it as a law with all its mass on one token. Knows nothing of models or caches.

Shapes: B batch, N positions of the tape, n tokens proposed.
"""

import torch
from torch import Tensor

from .speculation import Proposal, Tape


class NgramDrafter:
    """Proposes the continuation of the longest match of the newest tokens, of the latest one if several are as long.

    The search compares the whole tape with the newest tokens, a pass over N integers (1 MB at 128K): less than any
    index costs to keep, and it runs on the device without a host sync.

    Args:
        max_drafted: n of the level that checks it. gamma: how many tokens to propose, at most max_drafted.
        longest: tokens that are compared. shortest: a match of fewer proposes nothing.
    """

    probs = None

    def __init__(self, tape: Tape, *, max_drafted: int, gamma: int, longest: int = 4, shortest: int = 2, compiler):
        self.tape, self.max_drafted, self.gamma = tape, max_drafted, gamma
        self.longest, self.shortest = longest, shortest
        self.tokens, self.num_drafted = tape.buffer(max_drafted), tape.buffer()
        self.step = compiler(self._step, "ngram")

    def prefill(self, row: int, length: int) -> None:
        """The tape is all there is."""

    def commit(self, length: Tensor) -> None:
        """Nothing is remembered between proposals."""

    def propose(self, start: Tensor) -> Proposal:
        self.step(start)
        return Proposal(self.tokens, None, self.num_drafted)

    def _step(self, start: Tensor) -> None:
        tokens = self.tape.tokens  # [B, N]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        run = torch.ones_like(tokens, dtype=torch.bool)
        matched = torch.zeros_like(tokens)  # length of the match that ends at each position
        for back in range(self.longest):
            newest = tokens.gather(1, (start - back).clamp(min=0)[:, None])
            run = run & (tokens.roll(back, 1) == newest) & (position >= back) & (start >= back)[:, None]
            matched += run
        matched = torch.where(position < start[:, None], matched, 0)  # not the newest tokens themselves
        best = (matched * tokens.shape[1] + position).argmax(1)  # [B]: the longest, of those the latest
        long_enough = matched.gather(1, best[:, None]).squeeze(1) >= self.shortest
        follow = best[:, None] + 1 + torch.arange(self.max_drafted, device=tokens.device)
        self.tokens.copy_(tokens.gather(1, torch.minimum(follow, start[:, None])))
        known = (start - best).clamp(max=self.gamma)  # what follows the match ends at the newest token
        self.num_drafted.copy_(torch.where(long_enough, known, 0))
