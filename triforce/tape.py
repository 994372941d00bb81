"""The tape: the tokens of each row by position, which all levels of a hierarchy write on.

A level's `length` counts the tokens whose keys and values it has. The token at index `length` is known and not yet
computed: the pending one.

Shapes: B batch, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import coupled, sampling
from .model import Transformer
from .sampling import SAMPLE, SamplingParams

DRAFT, RETRIEVAL, FULL = 0, 1, 2  # levels: they key the noise
BONUS, ACCEPTED, MISSED = 0, 1, 2  # where a token of the inner level came from: not drafted, drafted, drafted in vain


@dataclass
class Tape:
    """What the levels of one batch of conversations share."""

    tokens: Tensor  # [B, capacity]
    origin: Tensor  # [B, capacity]: BONUS, ACCEPTED or MISSED, for tokens that the inner level emitted
    params: SamplingParams
    vocab_size: int  # ids that the tokenizer can name; logits beyond are padding
    coupled: bool = False  # levels share their draws; else laws are passed from level to level

    @classmethod
    def allocate(cls, batch: int, capacity: int, vocab_size: int, device, coupled: bool = False) -> "Tape":
        tokens = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
        return cls(tokens, torch.zeros_like(tokens), SamplingParams(batch, device, vocab_size), vocab_size, coupled)

    def law(self, logits: Tensor) -> Tensor:
        return sampling.probabilities(logits[..., : self.vocab_size], self.params)

    def uniform(self, position: Tensor, level: int, purpose: int) -> Tensor:
        return sampling.uniform(self.params.seed, position, level, purpose)

    def draw(self, law: Tensor, position: Tensor, level: int) -> Tensor:
        """Tokens for law [B, n, V] and position [B, n]: [B, n]."""
        if self.coupled:
            return coupled.draw(law, self.params.seed, position)
        return sampling.sample(law, self.uniform(position, level, SAMPLE))

    def read(self, start: Tensor, count: int) -> Tensor:
        """`count` tokens from index start [B] on: [B, count]."""
        return self.tokens.gather(1, start[:, None] + torch.arange(count, device=start.device))

    def buffer(self, *shape: int, like: Transformer | None = None, dtype=torch.int64) -> Tensor:
        """A zero buffer with a row for each of the batch: int64, or wide enough for probabilities of `like`."""
        dtype = dtype if like is None else torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(len(self.tokens), *shape, dtype=dtype, device=self.tokens.device)
