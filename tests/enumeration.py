"""Exact enumeration of everything that a hierarchy can say, by running the production code once per branch.

Production code meets randomness in three places: `sampling.uniform` makes a number from a key, `sampling.sample` and
`acceptance.is_accepted` consume it. Here `uniform` returns the key itself, and the two consumers look up the interval
of [0, 1) that the key's number is still known to lie in, split it where the outcome changes, take one piece (the
others go on the stack), and then call the original function with the middle of that piece. A key that is used again,
because a position was drafted, discarded and drafted again, thus meets the same number as in production.

Branches run side by side as rows of one batch.
"""

import copy
import itertools
from contextlib import contextmanager
from unittest import mock

import torch

from triforce import acceptance, sampling, speculator

KEY_BASE = 1000.0


class Branch:
    def __init__(self, script=()):
        self.script, self.taken, self.intervals, self.weight = list(script), 0, {}, 1.0
        self.siblings: list[list[int]] = []
        self.emitted: list[int] = []

    def resolve(self, key: float, cuts: list[float], split: bool) -> float:
        """A number for `key` in one of the pieces that `cuts` divide its interval into."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        if not split:  # any value will do: the tokens it decides are not looked at
            return low + (high - low) * ((key * 0.754877666) % 1.0)
        edges = [low]
        for cut in sorted(cuts):  # a token of probability 0 cuts nothing off
            if edges[-1] + 1e-13 < cut < high - 1e-13:
                edges.append(cut)
        edges.append(high)
        piece = 0
        if len(edges) > 2:
            if self.taken < len(self.script):
                piece = self.script[self.taken]
            else:
                self.siblings += [self.script + [other] for other in range(1, len(edges) - 1)]
                self.script.append(0)
            self.taken += 1
        self.weight *= (edges[piece + 1] - edges[piece]) / (high - low)
        self.intervals[key] = edges[piece], edges[piece + 1]
        return (edges[piece] + edges[piece + 1]) / 2


class Enumerator:
    def __init__(self, horizon: int):
        self.horizon = horizon  # tokens after the prompt that are looked at
        self.branches: list[Branch | None] = []
        self.ends: list[int] = []  # per row: first position that is not looked at
        self.num_drafted = None

    def number(self, row: int, key: float, cuts: list[float]) -> float:
        branch = self.branches[row]
        if branch is None:
            return 0.5
        position = int(key - KEY_BASE) // 8
        return branch.resolve(key, cuts, len(branch.emitted) < self.horizon and position < self.ends[row])

    def uniform(self, seed, position, level, purpose):
        return KEY_BASE + position.double() * 8 + 2 * level + purpose

    def sample(self, probs, u):
        cumulative = probs.reshape(len(self.branches), -1).double().cumsum(-1)
        cumulative = (cumulative / cumulative[:, -1:]).tolist()
        numbers = [self.number(row, key, cumulative[row]) for row, key in enumerate(u.reshape(-1).tolist())]
        return self.original_sample(probs, torch.tensor(numbers, dtype=u.dtype).reshape(u.shape))

    def is_accepted(self, draft_prob, target_prob, u):
        count, numbers = self.num_drafted.tolist(), u.tolist()
        drafts, targets = draft_prob.double().tolist(), target_prob.double().tolist()
        for row, keys in enumerate(numbers):
            rejected = False
            for i, key in enumerate(keys):
                if rejected or i >= count[row]:  # what follows the first rejection decides nothing
                    keys[i] = 0.5
                    continue
                d, t = drafts[row][i], targets[row][i]
                keys[i] = self.number(row, key, [t / d] if d > 0 else [])
                rejected = not keys[i] * d < t
        return self.original_is_accepted(draft_prob, target_prob, torch.tensor(numbers, dtype=u.dtype))

    def verify_chain(self, tokens, draft_probs, num_drafted, target_probs, accept_u, sample_u):
        self.num_drafted = num_drafted
        return self.original_verify(tokens, draft_probs, num_drafted, target_probs, accept_u, sample_u)

    @contextmanager
    def patched(self):
        self.original_sample, self.original_is_accepted = sampling.sample, acceptance.is_accepted
        self.original_verify = speculator.verify_chain
        with mock.patch.object(sampling, "uniform", self.uniform), mock.patch.object(sampling, "sample", self.sample), \
                mock.patch.object(acceptance, "is_accepted", self.is_accepted), \
                mock.patch.object(speculator, "verify_chain", self.verify_chain):
            yield


def joint_laws(state, shared, prompts, horizon=3, max_branches=200_000):
    """The law of the next `horizon` tokens after each prompt, {tokens: probability}, and how many branches it took.

    Args:
        state: prefilled and begun; row r holds prompts[r % len(prompts)].
        shared: modules that are not to be copied with the state.
    """
    enumerator = Enumerator(horizon)
    stacks = [[[]] for _ in prompts]
    laws = [{} for _ in prompts]
    count, rounds = 0, 0
    with enumerator.patched():
        while any(stacks):
            run = copy.deepcopy(state, {id(module): module for module in shared})
            enumerator.branches, enumerator.ends = [], []
            for row in range(run.batch):
                stack = stacks[row % len(prompts)]
                enumerator.branches.append(Branch(stack.pop()) if stack else None)
                enumerator.ends.append(len(prompts[row % len(prompts)]) + horizon)
                if enumerator.branches[-1] is None:
                    run.close_row(row)
            while any(b is not None and len(b.emitted) < horizon for b in enumerator.branches):
                rounds += 1
                for row, tokens in enumerate(run.round()):
                    branch = enumerator.branches[row]
                    if branch is not None and len(branch.emitted) < horizon:
                        branch.emitted += tokens
                        if len(branch.emitted) >= horizon:
                            run.close_row(row)
            for row, branch in enumerate(enumerator.branches):
                if branch is not None:
                    count += 1
                    key = tuple(branch.emitted[:horizon])
                    law = laws[row % len(prompts)]
                    law[key] = law.get(key, 0.0) + branch.weight
                    stacks[row % len(prompts)] += branch.siblings
            assert count < max_branches
    return laws, count


def target_law(next_law, prompt, vocab_size, horizon=3):
    """The same from the target alone: next_law(tokens) -> [V] probabilities of the next token."""
    law = {}
    for tokens in itertools.product(range(vocab_size), repeat=horizon):
        probability = 1.0
        for i, token in enumerate(tokens):
            if probability > 0:
                probability *= float(next_law([*prompt, *tokens[:i]])[token])
        if probability > 0:
            law[tokens] = probability
    return law


def total_variation(a: dict, b: dict) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})

