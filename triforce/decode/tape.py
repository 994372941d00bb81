"""The tape: the tokens of each row by position, which all levels of a hierarchy write on.

A level's `length` counts the tokens whose keys and values it has. The token at index `length` is known and not yet
computed: the pending one.

Shapes: B batch, V vocabulary.
"""

import torch
from torch import Tensor

from ..runtime.graphs import put
from ..tree import TokenTree
from . import gumbel, sampling
from .nodes import Nodes
from .sampling import SAMPLE, SamplingParams

DRAFT, RETRIEVAL, FULL = 0, 1, 2  # levels: they key the noise
# Where a token of the inner level came from: drawn behind all drafted ones; drafted and kept; drawn in the place of a
# drafted one that was not kept; a leaf beside it.
BONUS, ACCEPTED, MISSED, LEAF = 0, 1, 2, 3


class Tape:
    """What the levels of one batch of conversations share.

    Args:
        vocab_size: ids that the tokenizer can name; logits beyond are padding.
        coupled: levels share their draws; else distributions are passed from level to level.
        runners_up: how many are noted for each token.
        nodes: where the full level checks trees: what the retrieval level grows.

    Attributes:
        tokens: [B, capacity].
        origin: [B, capacity], BONUS, ACCEPTED, MISSED or LEAF, for tokens that the inner level emitted.
        runners_up: [B, capacity, k], what a drafter that draws would have drawn next instead; the leaves of trees.
    """

    def __init__(self, batch: int, capacity: int, vocab_size: int, device, coupled: bool = False, runners_up: int = 0,
                 nodes: Nodes | None = None):
        self.vocab_size, self.coupled, self.nodes = vocab_size, coupled, nodes
        self.tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        self.origin = self.tokens.new_zeros(batch, capacity)  # in memory of its own, see `View`
        self.runners_up = self.tokens.new_zeros(batch, capacity, runners_up)
        self.params = SamplingParams(batch, device, vocab_size)

    def at(self, x: Tensor, index: Tensor) -> Tensor:
        """The entries at index [B, n] of each row of one of its tensors [B, capacity, ...]."""
        return x.gather(1, index[(...,) + (None,) * (x.ndim - 2)].expand(*index.shape, *x.shape[2:]))

    def probs(self, logits: Tensor) -> Tensor:
        """The distributions that tokens are drawn from, of logits [B, n, V or more]: [B, n, V]."""
        return sampling.probabilities(logits[..., : self.vocab_size], self.params)

    def uniform(self, position: Tensor, level: int, purpose: int) -> Tensor:
        return sampling.uniform(self.params.seed, position, level, purpose)

    def draw(self, probs: Tensor, position: Tensor, level: int) -> Tensor:
        """Tokens for probs [B, n, V] and position [B, n]: [B, n]."""
        if self.coupled:
            return gumbel.draw(probs, self.params.seed, position)
        return sampling.sample(probs, self.uniform(position, level, SAMPLE))

    def rank(self, logits: Tensor, position: Tensor) -> Tensor:
        """With coupled sampling, what a level that drafts draws by logits [B, n, V], and its runners-up:
        [B, n, 1 + k]."""
        probs, count = self.probs(logits), 1 + self.runners_up.shape[2]
        if self.params.uses.greedy and count > 1:
            # The winner alone would arrive. So the others come long after it, nearly always the likeliest first: noise
            # is between 1e-13 and 18.
            behind = 1e-14 * logits[..., : self.vocab_size].to(probs.dtype).softmax(-1) ** 4
            probs = torch.where(self.params.temperature[:, None, None] == 0, probs + behind, probs)
        return gumbel.ranking(probs, self.params.seed, position, count)

    def read(self, start: Tensor, tree: TokenTree) -> Tensor:
        """The tokens of a block whose first is at index start [B]: [B, M]."""
        if not tree.num_leaves:
            return self.at(self.tokens, start[:, None] + torch.arange(tree.spine, device=start.device))
        spine, runners_up = self.read_spine(start, tree.spine)
        return tree.arrange(spine, runners_up[:, 1:])

    def read_spine(self, start: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """The tokens from index start [B] on, [B, rows], and the runners-up of each, [B, rows, k]."""
        here = start[:, None] + torch.arange(rows, device=start.device)
        return self.at(self.tokens, here), self.at(self.runners_up, here)

    def note(self, position: Tensor, ranked: Tensor) -> Tensor:
        """Writes the runners-up down: position [B, n], ranked [B, n, 1 + k], see `rank`. Returns the first, [B, n]."""
        if ranked.shape[2] > 1:
            put(self.runners_up, position, ranked[..., 1:])
        return ranked[..., 0]

    def buffer(self, *shape: int, dtype=torch.int64) -> Tensor:
        """A zero buffer with a row for each of the batch."""
        return torch.zeros(len(self.tokens), *shape, dtype=dtype, device=self.tokens.device)
