"""Which drafted tokens a chain of checks keeps, and what it draws instead."""

import pytest
import torch

from triforce.decode import acceptance
from triforce.decode.acceptance import verify_chain


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
