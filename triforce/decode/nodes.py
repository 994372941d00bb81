"""The rows of a tree of any shape, on the device: which one follows which, and their tokens.

The spine is a drafted chain. Its runners-up are the first rows of branches. The branches grow together: a step of the
level that drafts adds a row to each. The level that checks computes all rows in one step, and walks down from the
pending token while what it draws is among the rows that follow. The shape is data, so it may change from round to round
and the compiled or recorded steps stay the same.

Shapes: B batch, M rows, P rows of the longest path, W rows that a step drafts after.
"""

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..tree import FOLLOWERS, Layout, Shape, TokenTree, shape_for


class Nodes:
    """See the module.

    Args:
        tree: with its size. width: W.
    """

    def __init__(self, tree: TokenTree, width: int, batch: int, device):
        self.tree, self.width, self.rows, self.device = tree, width, tree.size, torch.device(device)
        self.shape: Shape | None = None
        self.steps = 0  # that grow this shape
        self.step = torch.zeros(1, dtype=torch.int64, device=device)  # the next of them
        self._tokens = torch.zeros(batch, tree.size + 1, dtype=torch.int64, device=device)  # the last is never read
        self.tokens = self._tokens[:, :-1]  # [B, M]
        longest, first, more = tree.spine, (FOLLOWERS - 1) * (tree.spine - 1), FOLLOWERS * width
        sizes = [*[(tree.size,)] * 3, (tree.size, longest), (3, first), (longest, width), (longest, 3, more)]
        counts = [int(np.prod(size)) for size in sizes]
        self._table = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        parts = [part.view(size) for part, size in zip(self._table.split(counts), sizes, strict=True)]
        # For each row [M]: its distance from the pending token; the number of tokens that the spine must have for the
        # row to count; its distance from the spine. paths [M, P]: see `Layout`.
        self.depths, self.anchors, self.distances, self.paths = parts[:4]
        # Rows that begin branches [3, R]: their numbers, depths and ranks. By step of growing: the rows that it drafts
        # after [P, W], and those that it drafts [P, 3, FOLLOWERS * W]: numbers, which of the former they follow, ranks.
        self._first, self._here, self._next = parts[4:]
        self.growth = Growth(self)
        if not (self.device.type == "meta" or is_compiling()):
            self.set(Shape(longest - 1))

    def shape_for(self, spine: int, length: int) -> tuple[Shape, float]:
        """See `tree.shape_for`."""
        return shape_for(spine, length, self.tree.size, self.tree.spine - 1, self.width)

    def set(self, shape: Shape) -> None:
        """Gives the tree this shape, which fits it (see `shape_for`), without waiting for the device."""
        if shape == self.shape:
            return
        table = torch.from_numpy(np.concatenate([part.ravel() for part in self._tables(shape)]))
        if self.device.type == "cuda":
            table = table.pin_memory()
        self._table.copy_(table, non_blocking=True)
        self.shape = shape

    def _tables(self, shape: Shape) -> list[np.ndarray]:
        size, longest = self.tree.size, self.tree.spine
        depths, anchors, distances = (np.zeros(size, np.int64) for _ in range(3))
        anchors[shape.rows :] = longest  # beyond all that is drafted: not used
        paths = np.arange(size)[:, None] - np.arange(longest)  # right for the spine; unused rows may have any
        depths[: 1 + shape.spine] = anchors[: 1 + shape.spine] = np.arange(1 + shape.spine)
        first, here, following = [], [[] for _ in range(longest)], [[] for _ in range(longest)]
        for row, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True), 1 + shape.spine):
            depths[row], distances[row] = depths[parent] + 1, distances[parent] + 1
            paths[row, 1:] = paths[parent, :-1]
            if distances[row] == 1:
                anchors[row] = depths[row]
                first.append((row, depths[row], rank))
                continue
            anchors[row], step = anchors[parent], distances[parent] - 1
            if parent not in here[step]:
                here[step].append(parent)
            following[step].append((row, here[step].index(parent), rank))
        self.steps = sum(map(bool, here))
        spare = np.array([size, 0, 1])  # of tables that are longer: written where nobody reads
        heads, members, found = (np.zeros(x.shape, np.int64) for x in (self._first, self._here, self._next))
        heads[:], found[:] = spare[:, None], spare[:, None]
        heads[:, : len(first)] = np.array(first, np.int64).reshape(-1, 3).T
        for step, (rows, more) in enumerate(zip(here, following, strict=True)):
            members[step, : len(rows)] = rows
            found[step, :, : len(more)] = np.array(more, np.int64).reshape(-1, 3).T
        return [depths, anchors, distances, paths, heads, members, found]

    def layout(self, device) -> Layout:
        """The layout of the step that checks. The sum over a path runs by position, whichever slots its rows have. So a
        tree gives the bits of a chain, and of the pending token alone."""
        longest = self.tree.spine
        return Layout(self.depths, torch.arange(self.tree.size, device=device), self.depths + 1 - longest, self.paths,
                      apart=True)

    def take(self, spine: Tensor, runners_up: Tensor, shape: Shape) -> None:
        """Takes in the spine and the first rows of the branches of a tree, which is then grown or checked.

        Args:
            spine: [B, P] tokens, the pending one first.
            runners_up: [B, P, k], at d what could stand in the place of the spine's token d.
        """
        self.set(shape)
        self.tokens[:, : spine.shape[1]] = spine
        if shape.parents:
            rows, depths, ranks = self._first
            self._tokens[:, rows] = runners_up[:, depths, ranks - 1]
        self.step.zero_()

    def here(self) -> Tensor:
        """The rows that the next step drafts after: [W]."""
        return self._here.index_select(0, self.step)[0]

    def grow(self, ranked: Tensor) -> None:
        """Writes what was drafted: ranked [B, W, FOLLOWERS or more], the choices after each of `here`, best first."""
        rows, places, ranks = self._next.index_select(0, self.step)[0]
        torch.ops.aten.index_put_(self._tokens, [None, rows], ranked[:, places, ranks])
        self.step += 1


class Growth:
    """The layout of a step that drafts after rows of a tree, each of which sees those that it follows."""

    def __init__(self, nodes: Nodes):
        self.nodes, self.rows = nodes, nodes.width

    def layout(self, device) -> Layout:
        nodes = self.nodes
        here = nodes.here()
        return Layout(nodes.depths[here], here, torch.zeros_like(here), nodes.paths[here])
