"""Drafting by looking up: what followed the last few tokens when they last stood in the prompt or the output.

Needs no model and no training (prompt lookup; LLMA, arXiv 2304.04487). A proposal is deterministic: acceptance treats
it as a distribution with all its mass on one token.

Shapes: B batch, N positions of the tape, n tokens proposed.
"""

import bisect
import copy
from collections import ChainMap
from collections.abc import MutableMapping
from functools import partial

import torch
from torch import Tensor

from ...runtime.graphs import Compiler
from ..controller import Rate
from ..plan import DraftPlan
from ..tape import Tape
from .base import Drafter


class NgramDrafter(Drafter):
    """Proposes what followed the longest match of the newest tokens. The latest counts if several are as long.

    The search compares the whole tape with the newest tokens, on the device: 1 MB at 128K costs less than an index.

    Args:
        max_drafted: the most tokens of a proposal to a level that wants no distributions.
    """

    LONGEST = 4  # tokens that are compared
    emits_probs = False

    def __init__(self, tape: Tape, *, max_drafted: int, compiler: Compiler):
        self.tape, self.max_drafted = tape, max_drafted
        self.base, self.num_drafted = tape.buffer(), tape.buffer()
        self.step = compiler.step(partial(compiler(NgramDrafter._look_up), self))

    def propose(self, start: Tensor, plan: DraftPlan, probs: Tensor | None) -> Tensor:
        self.base.copy_(start)
        # Tokens for all rows of the level that checks, so that one compiled step serves every gamma.
        self.step(self.max_drafted if probs is None else probs.shape[1] - 1, probs)
        return torch.clamp(self.num_drafted, max=plan.gamma, out=self.num_drafted)

    def _look_up(self, n: int, probs: Tensor | None) -> None:
        tokens, start = self.tape.tokens, self.base  # [B, N], [B]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        run = torch.ones_like(tokens, dtype=torch.bool)
        matched = torch.zeros_like(tokens)  # length of the match that ends at each position
        for back in range(self.LONGEST):
            newest = tokens.gather(1, (start - back).clamp(min=0)[:, None])
            run = run & (tokens.roll(back, 1) == newest) & (position >= back) & (start >= back)[:, None]
            matched += run
        matched = torch.where(position < start[:, None], matched, 0)  # not the newest tokens themselves
        best = (matched * tokens.shape[1] + position).argmax(1)  # [B]: the longest, of those the latest
        follow = best[:, None] + 1 + torch.arange(n, device=tokens.device)
        drafted = tokens.gather(1, torch.minimum(follow, start[:, None]))  # padded with a valid token
        known = (start - best).clamp(max=n)  # what follows the match ends at the newest token
        self.num_drafted.copy_(torch.where(matched.any(1), known, 0))
        if probs is not None:  # the checker expects distributions: all their mass lies on the token
            probs[:, :n] = torch.zeros_like(probs[:, :n]).scatter(2, drafted[..., None], 1.0)
        tokens.scatter_(1, start[:, None] + 1 + torch.arange(n, device=tokens.device), drafted)


class NgramMeter:
    """How likely looking up is right: on the host, from kept tokens, whether or not it was used.

    Quotes come in runs, so there is a rate for each length of the run of tokens that it has just got right.
    """

    LENGTHS = 3, 1  # newest tokens that are looked up, and how many where these are new
    RUNS = (0, 1, 4)  # a rate from each of these on
    PRIORS = (0.1, 0.4, 0.8)
    JUDGED, WEIGHT = 2048, 16.0  # the last tokens of the prompt already judge it, and count as so many tests

    def __init__(self, tokens: list[int]):
        self.follows: MutableMapping[tuple, int] = {}
        self.run, self.rates = 0, [Rate(prior) for prior in self.PRIORS]
        self.tokens = known = list(tokens[: max(len(tokens) - self.JUDGED, *self.LENGTHS)])
        for size in self.LENGTHS:
            self.follows.update(zip(zip(*(known[i:] for i in range(size)), strict=False), known[size:], strict=False))
        self.update(tokens[len(known) :])
        for rate in self.rates:  # an answer may repeat more than its prompt does, or less
            rate.begin(self.WEIGHT)

    def emitted(self, most: int) -> list[float]:
        """Expected tokens of a round that checks 0, 1, ... `most` of those that are looked up."""
        tokens, chance = [1.0], 1.0
        for run in range(self.run, self.run + most):
            chance *= self._rate(run).mean  # without benefit of the doubt: it is judged whether it drafts or not
            tokens.append(tokens[-1] + chance)
        return tokens

    def _rate(self, run: int) -> Rate:
        """That the next one is right, after `run` right ones."""
        return self.rates[bisect.bisect_right(self.RUNS, run) - 1]

    def fork(self, tokens: list[int]) -> "NgramMeter":
        """A meter of this text and what follows it, without a copy of what is known of this text."""
        fork = copy.copy(self)
        fork.follows, fork.tokens = ChainMap({}, self.follows), self.tokens[-max(self.LENGTHS) :]
        fork.rates = copy.deepcopy(self.rates)
        fork.update(tokens)
        return fork

    def judge(self, is_right: bool) -> None:
        """Looking up the next token is right, or not."""
        self._rate(self.run).update(is_right, 1)
        self.run = self.run + 1 if is_right else 0

    def update(self, tokens: list[int]) -> None:
        """Takes in kept tokens."""
        for token in tokens:
            keys = [tuple(self.tokens[-length:]) for length in self.LENGTHS]
            self.judge(next((self.follows[key] for key in keys if key in self.follows), None) == token)
            self.follows.update(dict.fromkeys(keys, token))
            self.tokens.append(token)
