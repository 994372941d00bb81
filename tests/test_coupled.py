"""Shared draws: noise against its law and its slow twin, draws against the law, and however they are computed."""

import math

import pytest
import torch
from conftest import slow
from torch import Tensor

from triforce.decode import acceptance, gumbel
from triforce.decode.gumbel import draw, exponential
from triforce.decode.sampling import key_of
from triforce.decode.tape import Tape

LAWS = ([0.5, 0.25, 0.125, 0.125], [0.9, 0.05, 0.03, 0.02 - 1e-4, 1e-4],
        [0.6, 0.4 - 2e-6, 1e-6, 1e-6], [0.0, 0.3, 0.0, 0.7])


def keys(seeds: int, positions: int) -> Tensor:
    return key_of(torch.arange(seeds), torch.arange(positions).expand(seeds, -1))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean; classes of fewer than 5 are put together."""
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    terms = (counts - expected) ** 2 / expected.clamp(min=1e-9)
    freedom = max(len(counts) - 1, 1)
    return float((terms.sum() - freedom) / math.sqrt(2 * freedom))


def test_noise_has_its_law():
    """In 1,000 classes of equal probability, and far out on both sides."""
    noise = exponential(keys(400, 500)[..., None], torch.arange(20)).flatten()
    assert noise.min() > 0
    classes = (-torch.expm1(-noise) * 1000).long()
    assert abs(chi_square(classes.bincount(minlength=1000).double(), torch.full((1000,), 4000.0).double())) < 5
    for tail in (1e-3, 1e-4, 1e-5):
        for count in ((noise < -math.log1p(-tail)).sum(), (noise > -math.log(tail)).sum()):
            assert abs(float(count) - tail * len(noise)) < 5 * math.sqrt(tail * len(noise))


def test_noise_of_neighbours_is_independent():
    """Of seeds, positions and words that follow each other; and of one number's two parts."""
    noise = exponential(keys(100, 100)[..., None], torch.arange(200)) - 1
    for pairs in (noise[1:] * noise[:-1], noise[:, 1:] * noise[:, :-1], noise[..., 1:] * noise[..., :-1],
                  noise[1:, 1:, 1:] * noise[:-1, :-1, :-1], (noise**2 - 1)[:, 1:] * noise[:, :-1]):
        assert abs(float(pairs.mean())) < 6 * float(pairs.std()) / math.sqrt(pairs.numel())
    whole = ((noise + 1) / math.log(2)).floor()
    rest = noise + 1 - whole * math.log(2)
    parts = (whole - whole.mean()) * (rest - rest.mean())
    assert abs(float(parts.mean())) < 6 * float(parts.std()) / math.sqrt(parts.numel())


def twin(key: int, word: int) -> float:
    """The same number in Python's own whole numbers, and with its own logarithm."""
    mask = 2**64 - 1
    x = ((key & mask) ^ word) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    high, low = x >> 40, x & (2**40 - 1)
    zeros = 24 - high.bit_length()
    return zeros * math.log(2) - math.log1p(-(low + 0.5) / 2**41)


def test_noise_against_its_twin():
    key, words = keys(3, 40), torch.arange(100)
    found = exponential(key[..., None], words)
    expected = [[[twin(one, word) for word in range(100)] for one in row] for row in key.tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=5e-7, atol=0)
    assert found[2, 7, 41].item() == 0.8870084649064303  # on every device, and in every version


@pytest.mark.parametrize("probs", [*LAWS[1:3], *slow(LAWS[0], LAWS[3])], ids=str)
def test_draws_follow_the_law(probs):
    """Of 300,000, over neighbouring seeds and positions."""
    law = torch.tensor(probs).expand(300, 1000, -1)
    tokens = draw(law, torch.arange(300), torch.arange(1000).expand(300, -1))
    counts = tokens.flatten().bincount(minlength=len(probs)).double()
    assert chi_square(counts, torch.tensor(probs, dtype=torch.float64) * 3e5) < 5
    assert (counts[torch.tensor(probs) == 0] == 0).all()


@pytest.mark.parametrize("words", [1000, 32_000])
@pytest.mark.parametrize("traced", [False, True])
def test_the_winner_and_those_after_it(monkeypatch, traced, words):
    """The first is what is drawn; nearly always the others are the next to arrive, and never the same word twice. Also
    where all that are possible stand side by side, as the frequent words of most vocabularies do."""
    monkeypatch.setattr(gumbel, "is_compiling", lambda: traced)
    law = (2 * torch.randn(1, 1, 1000, generator=torch.Generator().manual_seed(0))).softmax(-1).expand(1, 2000, -1)
    law = torch.where(law > 1e-3, law, 0.0)  # so few that on a CPU only they run
    law = torch.nn.functional.pad(law[:, : 2_000_000 // words], (0, words - 1000))
    seed, position = torch.tensor([8]), torch.arange(law.shape[1])[None]
    found = gumbel.ranking(law, seed, position, 4)
    times = exponential(key_of(seed, position)[..., None], torch.arange(words)) / law.double()
    expected = times.argsort(-1)[..., :4]
    assert torch.equal(found[..., 0], draw(law, seed, position)) and torch.equal(found[..., 0], expected[..., 0])
    assert all(len(set(row)) == 4 for row in found[0].tolist())
    agree = (found == expected).double().mean((0, 1))
    assert (agree > (0.9 if traced else 0.999)).all(), agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runners_up_at_temperature_0_are_the_next_most_probable(dtype):
    """Nearly always: and whatever the noise, the winner is the most probable word."""
    torch.manual_seed(0)
    tape = Tape(1, 8192, 500, "cpu", coupled=True, runners_up=3)
    logits, position = 3 * torch.randn(1, 8000, 500).to(dtype), torch.arange(8000)[None]
    tape.params.set(temperature=0.0, top_p=1.0, top_k=None, min_p=None, seed=[5])
    ranked, best = tape.rank(logits, position), logits.float().topk(2, -1)
    assert torch.equal(ranked[..., 0], logits.argmax(-1)) and ranked.shape[2] == 4
    second = ranked[..., 1] == best.indices[..., 1]
    assert second.float().mean() > 0.6  # by draws of the words' own law it is 0.2
    clear = logits.float().topk(3, -1).values
    clear = clear[..., 1] > clear[..., 2] + 1.5  # more than four times as probable as the next
    assert clear.sum() > 200 and second[clear].float().mean() > 0.92


def test_a_chain_is_kept_as_far_as_it_equals_the_draws():
    tokens, drawn = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 2, 3], [1, 9, 3]]), torch.tensor([[1, 2, 3, 7]] * 4)
    verdict = acceptance.match_chain(tokens, torch.tensor([3, 2, 3, 3]), drawn)
    assert verdict.num_accepted.tolist() == [3, 2, 0, 1] and torch.equal(verdict.tokens, drawn)
    alone = acceptance.match_chain(tokens[:, :0], torch.tensor([0] * 4), drawn[:, :1])
    assert alone.num_accepted.tolist() == [0] * 4 and alone.tokens.tolist() == [[1]] * 4
