"""Which row of a block follows which: the pending token and a chain of drafted ones, the spine, and leaves beside it.

    rows      0         1 to S - 1      S to S + k (S - 1) - 1               up to a multiple of 4
    tokens    pending   drafted ones    k runners-up of each, one by one     the pending one again, unused

A leaf stands for the drafted token at whose side it is: it has that token's position, and follows the same tokens. So
where the level that checks draws a runner-up instead of the drafted token, the row of that leaf says what comes next.

Shapes: B batch, S rows of the spine, k leaves a drafted token, M rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenTree(NamedTuple):
    """The shape of a block. Without leaves it is a chain."""

    spine: int
    leaves: int = 0  # at the side of each drafted token

    @property
    def num_leaves(self) -> int:
        return self.leaves * (self.spine - 1)

    @property
    def rows(self) -> int:
        rows = self.spine + self.num_leaves
        return -(-rows // 4) * 4 if self.num_leaves else rows  # a CPU's products have the same bits in each of 4 rows

    def depths(self, device) -> Tensor:
        """How far behind the pending token each row's token stands: [M]."""
        depths = torch.arange(self.spine, device=device)
        if not self.num_leaves:
            return depths
        unused = depths.new_zeros(self.rows - self.spine - self.num_leaves)
        return torch.cat([depths, depths[1:].repeat_interleave(self.leaves), unused])

    def arrange(self, spine: Tensor, runners_up: Tensor) -> Tensor:
        """The tokens of all rows: spine [B, S] and runners_up [B, S - 1, k or more] -> [B, M]."""
        if not self.num_leaves:
            return spine
        unused = spine[:, :1].expand(-1, self.rows - self.spine - self.num_leaves)
        return torch.cat([spine, runners_up[..., : self.leaves].flatten(1), unused], 1)

    def leaves_of(self, rows: Tensor) -> Tensor:
        """Of [B, M], one number a row, those of the leaves: [B, S - 1, k]."""
        return rows[:, self.spine : self.spine + self.num_leaves].unflatten(1, (self.spine - 1, self.leaves))
