"""Which drafted tokens a chain or a tree of checks keeps, and what it draws instead."""

import pytest
import torch

from triforce.decode import acceptance
from triforce.decode.acceptance import match_tree, verify_chain
from triforce.tree import TokenTree


def test_acceptance_keeps_the_longest_passing_prefix():
    target = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [1.0, 0.0], [0.3, 0.7]]])
    draft = torch.tensor([[[0.9, 0.1], [0.2, 0.8], [0.0, 1.0]]])
    tokens = torch.tensor([[0, 1, 1]])

    def verdict(accept, draw, count=3, probs=draft):
        u = torch.tensor([accept], dtype=torch.float64), torch.full((1, 4), draw, dtype=torch.float64)
        got = verify_chain(tokens, probs, torch.tensor([count]), target, *u)
        kept = int(got.num_accepted)
        return kept, got.tokens[0, : kept + 1].tolist()

    assert verdict([0.6, 0, 0], 0.0) == (0, [1])  # 0.6 * 0.9 > 0.5: the residual has only token 1
    assert verdict([0.5, 0.99, 0.0], 0.5) == (2, [0, 1, 0])  # the third has target_prob 0, and never passes
    assert verdict([0.5, 0.99, 0.0], 0.9, count=2) == (2, [0, 1, 0])  # a bonus token from row 2
    assert verdict([0.5, 0.0, 0.0], 0.1, count=0) == (0, [0])
    assert verdict([0.49, 0.79, 0.0], 0.0, probs=None) == (2, [0, 1, 0])  # deterministic proposals: draft_prob is 1
    assert verdict([0.51, 0.0, 0.0], 0.0, probs=None) == (0, [1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_and_nearly_equal_laws_give_no_nan(dtype):
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1e-3, 1e-2):
        logits = torch.randn(4, 6, 50, generator=generator).to(dtype)
        target = logits.float().softmax(-1)
        draft = (logits + scale * torch.randn(4, 6, 50, generator=generator)).to(dtype)[:, :5].float().softmax(-1)
        tokens = draft.argmax(-1)
        for u in (0.0, 0.5, 1 - 2.0**-52):
            verdict = acceptance.verify_chain(tokens, draft, torch.tensor([0, 1, 3, 5]), target,
                                              torch.full((4, 5), u, dtype=torch.float64),
                                              torch.full((4, 6), u, dtype=torch.float64))
            assert ((verdict.tokens >= 0) & (verdict.tokens < 50)).all()
            assert (verdict.num_accepted <= torch.tensor([0, 1, 3, 5])).all()
        same = target[:, :5]
        assert torch.isfinite(acceptance.residual(same, same)).all()
        assert (acceptance.residual(same, same).sum(-1) > 0).all()


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
