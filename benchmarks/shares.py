"""The first ranks of a larger machine: each does the work of one of N ranks, and those that there are no GPUs for are
left out.

Shows what a rank's share of the weights, the K/V and the draft costs before there are as many GPUs. Sums go over the
ranks that run, so an all-reduce among N, and the wait for the slowest of N, are not in it. A widened model (widen.py)
has all that the small one says in its first heads, rows and words, and zeros beside them: where the ranks that run hold
those, text and acceptance are the whole model's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from widen import PADDING_LOGIT

from triforce.errors import UserError
from triforce.model import ModelConfig
from triforce.parallel import Group, subgroup


@dataclass(frozen=True, eq=False)
class FirstRanks(Group):
    """A rank of `size`, of which the first `present` run."""

    present: int = 1

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...] -> [size * N, ...]. Of a rank that is left out: logits so low that no word is drawn from them,
        or, of what the ranks compare, what rank 0 has."""
        parts = super().all_gather(x)
        other = torch.full_like(x, 2 * PADDING_LOGIT) if x.is_floating_point() else parts[: len(x)]
        return torch.cat([parts, *[other] * (self.size - self.present)])


def first_ranks(group: Group | None, size: int) -> FirstRanks:
    """This rank among `size`.

    Raises:
        UserError: there is no group, or `size` does not exceed the ranks that run.
    """
    if group is None or size <= group.size:
        running = 1 if group is None else group.size
        raise UserError(f"--share-of {size} stands for more ranks than run, and {running} do; start tensor_parallel.py "
                        f"or batch.py with torchrun, 2 ranks or more and fewer than {size}, or drop it")
    return FirstRanks(group.rank, size, group.name, group.buffer, group.size)


def first_draft_ranks(group: FirstRanks, ranks: list[int]) -> FirstRanks | None:
    """The group of those of a draft's ranks that run; None where this is none of them. Every rank calls it."""
    running = [rank for rank in ranks if rank < group.present]
    part = subgroup(group, running)
    return None if part is None else FirstRanks(part.rank, len(ranks), part.name, None, len(running))


def holds_whole(small: ModelConfig, share: ModelConfig, present: int) -> bool:
    """Whether the ranks that run hold all that a widened model has of the small one. share: what one of them holds."""
    return all(present * part >= need for part, need in (
        (share.n_kv_head, small.n_kv_head), (share.ffn_dim, small.ffn_dim), (share.vocab_rows, small.vocab_size)))
