"""Which row of a block follows which: the pending token and what was drafted after it.

A chain with leaves beside it:

    rows      0         1 to S - 1      S to S + k (S - 1) - 1               up to a multiple of 4
    tokens    pending   drafted ones    k runners-up of each, one by one     the pending one again, unused

A leaf stands for the drafted token at whose side it is: it has that token's position, and follows the same tokens. So
where the level that checks draws a runner-up instead of the drafted token, the row of that leaf says what comes next.

A tree of any shape has a fixed number of rows: a spine, too, and beside it branches, as its `Shape` says. That may
change from round to round (see `nodes.py`).

Shapes: B batch, S rows of the spine, k leaves a drafted token, M rows, P rows of the longest path.
"""

import heapq
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FOLLOWERS = 4  # of a row of a tree of any shape, at most
CHANCES = (0.9, 0.08, 0.015, 0.005)  # for which trees are made: of the draft's first choice, of the next best, ...


class Layout(NamedTuple):
    """Where the rows of a block stand in the tail, and what each sees of it. Slots count from the pending token's."""

    depths: "Tensor"  # [M]: how far behind the pending token each row's token stands
    slots: "Tensor"  # [M]: where its keys and values are written
    before: "Tensor"  # [M]: each row sees all slots before this one
    # [M, P]: the slots of a row's token and of those that it follows, from the newest to the oldest, as far as the
    # tail goes back. None: `before` says it all.
    path: "Tensor | None" = None
    apart: bool = False  # a row attends to its path apart from what lies before; else in one call with it


class TokenTree(NamedTuple):
    """The shape of a block. Without leaves and size it is a chain."""

    spine: int  # rows of the longest path
    leaves: int = 0  # at the side of each drafted token
    size: int = 0  # rows of a tree of any shape; 0: it is a chain with leaves

    @property
    def num_leaves(self) -> int:
        return self.leaves * (self.spine - 1)

    @property
    def rows(self) -> int:
        if self.size:
            return self.size
        rows = self.spine + self.num_leaves
        return -(-rows // 4) * 4 if self.num_leaves else rows  # a CPU's products have the same bits in each of 4 rows

    @property
    def branches(self) -> bool:
        """Whether a row may follow another one than the row before it."""
        return self.num_leaves > 0 or self.size > 0

    def cut(self, rows: int) -> "TokenTree":
        """With this number of rows on its spine. A tree of any shape has all its rows, or is a chain."""
        return self if rows == self.spine else TokenTree(rows, self.leaves)

    def depths(self, device) -> "Tensor":
        """How far behind the pending token each row's token stands: [M]. Of a chain with leaves."""
        import torch

        depths = torch.arange(self.spine, device=device)
        if not self.num_leaves:
            return depths
        unused = depths.new_zeros(self.rows - self.spine - self.num_leaves)
        return torch.cat([depths, depths[1:].repeat_interleave(self.leaves), unused])

    def layout(self, device) -> Layout:
        """Of a chain with leaves. A row of a tree sees itself apart: only the spine lies where positions say."""
        import torch

        depths, slots = self.depths(device), torch.arange(self.rows, device=device)
        if not self.num_leaves:
            return Layout(depths, slots, depths + 1)
        return Layout(depths, slots, depths, slots[:, None], apart=True)

    def arrange(self, spine: "Tensor", runners_up: "Tensor") -> "Tensor":
        """The tokens of all rows: spine [B, S] and runners_up [B, S - 1, k or more] -> [B, M]."""
        import torch

        if not self.num_leaves:
            return spine
        unused = spine[:, :1].expand(-1, self.rows - self.spine - self.num_leaves)
        return torch.cat([spine, runners_up[..., : self.leaves].flatten(1), unused], 1)


class Shape(NamedTuple):
    """A tree: the spine, then the rows of its branches, each after the row that it follows."""

    spine: int  # drafted rows of the spine: rows 1, 2, ... follow each other, and row 1 the pending token, row 0
    parents: tuple[int, ...] = ()  # of the rows of branches: the row that each follows
    # Of the same: it is the draft's next best choice there (1), the one after that (2), ...; on a branch, also the
    # first (0).
    ranks: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return 1 + self.spine + len(self.parents)


def likeliest(chances: tuple[float, ...], spine: int, length: int, *, rows: int, depth: int,
              width: int) -> tuple[Shape, float]:
    """The tree of which the most tokens are kept, and how many that is, the one of the level that checks included.

    A path is kept with the product of the chances of its rows, and the best tree has the rows of the likeliest paths.
    What Sequoia's dynamic programme (arXiv 2402.12374) finds for such chances is found row by row here, since no path
    is likelier than its beginning.

    Args:
        chances: how likely what follows a kept row is kept, too: the draft's first choice, the next best one, ...
        spine: drafted rows of the spine.
        length: rows of a branch, from where it leaves the spine, at most: its first is known, and each further one
            takes a step of drafting.
        rows: of all, at most, with the pending token's. depth: how far behind that a row may stand.
        width: rows that a step can draft after, at most.
    """
    kept = [chances[0]**row for row in range(spine + 1)]  # the chance of each row's path
    depths = list(range(spine + 1))
    distances, followers = [0] * len(depths), [0] * len(depths)  # from the spine; how many rows follow each
    parents, ranks = [], []
    drafting = [0] * (length + 1)  # rows of each distance that a step drafts after
    waiting = [(-kept[row] * chances[1], row, 1) for row in range(spine)]  # (chance, what it follows, rank)
    heapq.heapify(waiting)
    while waiting and len(kept) < rows:
        chance, parent, rank = heapq.heappop(waiting)
        at, new = distances[parent] + 1, distances[parent] > 0 and followers[parent] == 0
        if at > length or depths[parent] == depth or new and drafting[at - 1] == width or chance == 0:
            continue
        drafting[at - 1] += new
        row = len(kept)
        parents.append(parent)
        ranks.append(rank)
        kept.append(-chance)
        depths.append(depths[parent] + 1)
        distances.append(at)
        followers.append(0)
        followers[parent] += 1
        heapq.heappush(waiting, (chance * chances[0], row, 0))
        if rank + 1 < len(chances):
            heapq.heappush(waiting, (-kept[parent] * chances[rank + 1], parent, rank + 1))
    return Shape(spine, tuple(parents), tuple(ranks)), sum(kept)


@lru_cache(maxsize=64)
def shape_for(spine: int, length: int, rows: int, depth: int, width: int) -> tuple[Shape, float]:
    """The tree for `CHANCES`, and how many times as many tokens are kept of it as of its spine alone. See `likeliest`.
    """
    shape, tokens = likeliest(CHANCES, spine, length, rows=rows, depth=depth, width=width)
    return shape, tokens / sum(CHANCES[0]**row for row in range(spine + 1))
