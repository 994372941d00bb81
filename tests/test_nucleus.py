"""What survives top-k and top-p: two ways to find it, against Python's own numbers."""

from fractions import Fraction

import pytest
import torch

from triforce import nucleus
from triforce.nucleus import ranked, searched


def laws(words: int) -> torch.Tensor:
    """[3, 4, V]: flat and peaked ones, one with many ties, one with all its mass on a word."""
    generator = torch.Generator().manual_seed(words)
    logits = torch.randn(3, 4, words, generator=generator) * torch.tensor([0.5, 2.0, 8.0, 4.0])[:, None]
    logits[:, 3] = logits[:, 3].round()
    logits[2, 1, words // 2] = 200.0
    return logits.softmax(-1)


def survivors(law: torch.Tensor, top_k: int, top_p: float) -> set[int]:
    """By the definition: those before which, from the most probable one on, fewer than k and less than p of the mass of
    the first k lie; and what is as probable as the last of them."""
    order = sorted(range(len(law)), key=lambda word: -law[word])
    exact = [Fraction(x) for x in law.tolist()]
    order, before, kept = order[: top_k or None], Fraction(0), []
    total = sum(exact[word] for word in order) if top_k else Fraction(1)
    for word in order:
        if top_p == 1 or before < Fraction(top_p) * total:
            kept.append(word)
        before += exact[word]
    least = 0 if top_p == 1 and not top_k else min(exact[word] for word in kept)
    return {word for word in range(len(law)) if exact[word] >= least}


@pytest.mark.parametrize("top_k", [None, [0, 1, 7], [5, 40, 0]], ids=str)
@pytest.mark.parametrize("words", [50, 700])
def test_both_ways_find_what_survives(words, top_k):
    probs, top_p = laws(words), torch.tensor([0.9, 1.0, 0.37], dtype=torch.float64)
    given = None if top_k is None else torch.tensor(top_k)[:, None, None]
    expected = [[survivors(probs[row, at], top_k[row] if top_k else 0, float(top_p[row])) for at in range(4)]
                for row in range(3)]
    assert any(1 < len(kept) < words for row in expected for kept in row)
    for way in (ranked, searched):
        mask = probs >= way(probs, given, top_p[:, None, None])
        assert [[set(one.nonzero().flatten().tolist()) for one in row] for row in mask] == expected


def test_many_words_on_a_gpu_are_searched(monkeypatch):
    asked = []
    for name in ("ranked", "searched"):
        monkeypatch.setattr(nucleus, name, lambda *args, name=name: asked.append(name))
    for device, words in (("cpu", 2**22), ("meta", 2**22)):
        nucleus.smallest_kept(torch.empty(1, 1, words, device=device), None, torch.ones(1))
    assert asked == ["ranked", "ranked"]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: x.device.type == "meta"))
    for words, dtype in ((2**22, torch.float32), (2**22 - 1, torch.float32), (2**22, torch.float64)):
        nucleus.smallest_kept(torch.empty(1, 1, words, device="meta", dtype=dtype), None, torch.ones(1))
    assert asked[2:] == ["searched", "ranked", "ranked"]
