"""Exact enumeration of everything that a hierarchy can say, by running the production code once per branch.

Production code meets randomness in three places: `sampling.uniform` makes a number from a key, `sampling.sample` and
`acceptance.is_accepted` consume it. Here `uniform` returns the key itself, and the two consumers look up the interval
of [0, 1) that the key's number is still known to lie in, split it where the outcome changes, take one piece (the
others go on the stack), and then call the original function with the middle of that piece. A key that is used again,
because a position was drafted, discarded and drafted again, thus meets the same number as in production.

Branches run side by side as rows of one batch, unless rows depend on each other: then a branch is a batch.
"""

import copy
import itertools
from contextlib import contextmanager
from unittest import mock

import torch

from triforce.decode import acceptance, sampling, verifier

KEY_BASE = 1000.0


class Branch:
    def __init__(self, script=()):
        self.script, self.taken, self.intervals, self.weight = list(script), 0, {}, 1.0
        self.siblings: list[list[int]] = []

    def resolve(self, key: tuple[int, float], cuts: list[float], split: bool) -> float:
        """A number for `key`, of a row, in one of the pieces that `cuts` divide its interval into."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        if not split:  # any value will do: the tokens it decides are not looked at
            return low + (high - low) * ((key[1] * 0.754877666) % 1.0)
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
        self.branches: list[Branch | None] = []  # per row
        self.emitted: list[list[int]] = []  # per row
        self.ends: list[int] = []  # per row: first position that is not looked at
        self.num_drafted = None
        self.state = None  # that runs them

    def rows_of(self, count: int) -> list[int]:
        """Which rows a call for so many is of: all, or those that a step computes because others have ended."""
        return list(range(len(self.branches))) if count == len(self.branches) else self.state.hierarchy.outer._of

    def number(self, row: int, key: float, cuts: list[float]) -> float:
        branch = self.branches[row]
        if branch is None:
            return 0.5
        position = int(key - KEY_BASE) // 8
        looked_at = len(self.emitted[row]) < self.horizon and position < self.ends[row]
        return branch.resolve((row, key), cuts, looked_at)

    def uniform(self, seed, position, level, purpose):
        return KEY_BASE + position.double() * 8 + 2 * level + purpose

    def sample(self, probs, u):
        rows, cumulative = self.rows_of(u.numel()), probs.reshape(u.numel(), -1).double().cumsum(-1)
        cumulative = (cumulative / cumulative[:, -1:]).tolist()
        numbers = [self.number(*each) for each in zip(rows, u.reshape(-1).tolist(), cumulative, strict=True)]
        return self.original_sample(probs, torch.tensor(numbers, dtype=u.dtype).reshape(u.shape))

    def is_accepted(self, draft_prob, target_prob, u):
        count, numbers = self.num_drafted.tolist(), u.tolist()
        drafts, targets = draft_prob.double().tolist(), target_prob.double().tolist()
        for n, (row, keys) in enumerate(zip(self.rows_of(len(numbers)), numbers, strict=True)):
            rejected = False
            for i, key in enumerate(keys):
                if rejected or i >= count[n]:  # what follows the first rejection decides nothing
                    keys[i] = 0.5
                    continue
                d, t = drafts[n][i], targets[n][i]
                keys[i] = self.number(row, key, [t / d] if d > 0 else [])
                rejected = not keys[i] * d < t
        return self.original_is_accepted(draft_prob, target_prob, torch.tensor(numbers, dtype=u.dtype))

    def verify_chain(self, tokens, draft_probs, num_drafted, target_probs, accept_u, sample_u):
        self.num_drafted = num_drafted
        return self.original_verify(tokens, draft_probs, num_drafted, target_probs, accept_u, sample_u)

    @contextmanager
    def patched(self):
        self.original_sample, self.original_is_accepted = sampling.sample, acceptance.is_accepted
        self.original_verify = verifier.verify_chain
        with mock.patch.object(sampling, "uniform", self.uniform), mock.patch.object(sampling, "sample", self.sample), \
                mock.patch.object(acceptance, "is_accepted", self.is_accepted), \
                mock.patch.object(verifier, "verify_chain", self.verify_chain):
            yield


def joint_laws(state, shared, prompts, horizon=3, max_branches=200_000, together=False):
    """The law of the next `horizon` tokens after each prompt, {tokens: probability}, and how many branches it took.

    Args:
        state: prefilled and begun; row r holds prompts[r % len(prompts)].
        shared: modules that are not to be copied with the state.
        together: rows depend on each other: the law of the tokens of all rows is returned, as the only one.
    """
    enumerator = Enumerator(horizon)
    kinds = 1 if together else len(prompts)  # of branches
    stacks = [[[]] for _ in range(kinds)]
    laws = [{} for _ in range(kinds)]
    count = 0
    with enumerator.patched():
        while any(stacks):
            run = enumerator.state = copy.deepcopy(state, {id(module): module for module in shared})
            enumerator.branches, enumerator.emitted, enumerator.ends = [], [[] for _ in range(run.batch)], []
            for row in range(run.batch):
                stack = stacks[row % kinds]
                if together and row > 0:
                    enumerator.branches.append(enumerator.branches[0])
                else:
                    enumerator.branches.append(Branch(stack.pop()) if stack else None)
                enumerator.ends.append(len(prompts[row % len(prompts)]) + horizon)
                if enumerator.branches[-1] is None:
                    run.close_row(row)
            running = [row for row, branch in enumerate(enumerator.branches) if branch is not None]
            while any(len(enumerator.emitted[row]) < horizon for row in running):
                for row, tokens in enumerate(run.round()):
                    if row in running and len(enumerator.emitted[row]) < horizon:
                        enumerator.emitted[row] += tokens
                        if len(enumerator.emitted[row]) >= horizon:
                            run.close_row(row)
            for row in running[:1] if together else running:
                count += 1
                rows = running if together else [row]
                key = tuple(token for row in rows for token in enumerator.emitted[row][:horizon])
                branch, law = enumerator.branches[row], laws[row % kinds]
                law[key] = law.get(key, 0.0) + branch.weight
                stacks[row % kinds] += branch.siblings
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

