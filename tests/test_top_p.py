"""What survives top-k and top-p, against Python's own numbers."""

from fractions import Fraction

import pytest
import torch
from conftest import make_state, random_pair, random_prompt, run_rounds

from triforce.decode import sampling
from triforce.decode.top_p import smallest_kept


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
def test_what_survives(words, top_k):
    probs, top_p = laws(words), torch.tensor([0.9, 1.0, 0.37], dtype=torch.float64)
    given = None if top_k is None else torch.tensor(top_k)
    expected = [[survivors(probs[row, at], top_k[row] if top_k else 0, float(top_p[row])) for at in range(4)]
                for row in range(3)]
    assert any(1 < len(kept) < words for row in expected for kept in row)
    mask = probs >= smallest_kept(probs, given, top_p)
    assert [[set(one.nonzero().flatten().tolist()) for one in row] for row in mask] == expected


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_border_is_inexact_only_where_a_law_only_drafts(rule, monkeypatch):
    """What is drafted changes with it, and nothing that is emitted."""
    pair, texts, seen = random_pair(std=0.3), [], []

    def keep_all(probs, top_k, top_p, drafts):
        if not drafts:
            return smallest_kept(probs, top_k, top_p)
        seen.append(probs.shape[1])
        return torch.zeros_like(probs[..., :1])

    for exact in (True, False):
        if not exact:
            monkeypatch.setattr(sampling, "smallest_kept", keep_all)
        state = make_state(*pair, [random_prompt(100)], rule=rule, gamma=3, gamma_inner=2,
                           sampling={"temperature": 1.0, "top_p": 0.3, "seed": [4]})
        if rule == "rejection":
            laws, own = [], state.tape.probs
            monkeypatch.setattr(state.tape, "probs", lambda logits, drafts=False, laws=laws, own=own: laws.append(
                (drafts, logits.shape[1])) or own(logits, drafts))
        texts.append(run_rounds(state, 20))
    assert {1, 3} <= set(seen) and len(seen) > 40  # drafts, and the level between
    if rule == "coupled":
        assert texts[0] == texts[1]
    else:
        assert {drafts for drafts, rows in laws if rows > 3} == {False} and (True, 1) in laws
