"""Trees of drafted tokens: which row stands where, and how a check walks down one."""

import pytest
import torch

from triforce.decode.acceptance import match_tree
from triforce.tree import TokenTree


def test_rows_of_a_tree():
    tree = TokenTree(4, 2)
    assert (tree.num_leaves, tree.rows) == (6, 12)
    assert tree.depths("cpu").tolist() == [0, 1, 2, 3, 1, 1, 2, 2, 3, 3, 0, 0]
    spine, others = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[[21, 31, 0], [22, 32, 0], [23, 33, 0]]])
    rows = tree.arrange(spine, others)
    assert rows.tolist() == [[10, 11, 12, 13, 21, 31, 22, 32, 23, 33, 10, 10]]
    assert tree.leaves_of(rows).tolist() == [[[21, 31], [22, 32], [23, 33]]]


@pytest.mark.parametrize("tree", [TokenTree(5), TokenTree(1, 3)])
def test_without_leaves_it_is_a_chain(tree):
    assert (tree.num_leaves, tree.rows) == (0, tree.spine)
    assert tree.depths("cpu").tolist() == list(range(tree.spine))
    spine = torch.arange(tree.spine)[None]
    assert tree.arrange(spine, torch.zeros(1, tree.spine - 1, 3)) is spine


def walk(tree: TokenTree, tokens: list[int], num_drafted: int, drawn: list[int]) -> tuple[list[int], int, int]:
    """What is emitted, how much of it the spine has, and whether a leaf: one token after the other."""
    emitted, row = [], 0
    while True:
        emitted.append(drawn[row])
        if row >= tree.spine or row == num_drafted:  # nothing follows here
            return emitted, min(row, len(emitted) - 1 - (row >= tree.spine)), int(row >= tree.spine)
        leaves = [tree.spine + row * tree.leaves + i for i in range(tree.leaves)]
        follows = [child for child in (row + 1, *leaves) if tokens[child] == drawn[row]]
        if not follows:
            return emitted, row, 0
        if follows[0] != row + 1:
            emitted.append(drawn[follows[0]])
            return emitted, row, 1
        row += 1


@pytest.mark.parametrize("leaves", [0, 1, 3])
def test_a_check_walks_down_a_tree(leaves):
    tree, generator = TokenTree(5, leaves), torch.Generator().manual_seed(leaves)
    tokens, drawn = torch.randint(3 + leaves, (2, 500, tree.rows), generator=generator)  # often the same
    num_drafted = torch.randint(5, (500,), generator=generator)
    verdict = match_tree(tree, tokens, num_drafted, drawn)
    seen = set()
    for b in range(500):
        emitted, num_accepted, beside = walk(tree, tokens[b].tolist(), int(num_drafted[b]), drawn[b].tolist())
        assert verdict.tokens[b, : len(emitted)].tolist() == emitted
        assert (int(verdict.num_accepted[b]), int(verdict.beside[b])) == (num_accepted, beside)
        assert len(emitted) == num_accepted + beside + 1
        rows = verdict.rows[b, : len(emitted)]
        assert drawn[b][rows].tolist() == emitted
        seen.add((num_accepted, beside))
    assert seen >= {(depth, leaf) for depth in range(3) for leaf in range(min(leaves, 1) + 1)}
