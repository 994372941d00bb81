"""Draws that levels share: a token follows from the distribution, the row's seed and the position, whichever level
draws it.

The words run a race. Word v arrives at the time E(v) / p(v), where p is the distribution and E(v) is exponential noise
of mean 1, made from the row's seed, the position and the word. The first to arrive follows p: this is the Gumbel-max
trick (argmax of log p + G, with G = -log E) without its logarithms. Two levels whose distributions are alike see nearly
the same race, so they nearly always draw the same word. A word of probability 0 never arrives, so temperature 0 needs
no rule of its own.

The noise is made in whole numbers. It is the same on every device, and whether or not it is compiled.

Shapes: B batch, n positions, V vocabulary, K words.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .sampling import GOLDEN, key_of, mix, shift

# -ln(1 - w / 2) / w, in units of 2**-29, as a polynomial of w that is right to 2**-24 of it over [0, 1].
_COEFFICIENTS = (268435461, 67108030, 22391560, 8169348, 4434652, -1515173, 5044765, -3412989, 1474894)
_LN2 = 762123384786  # in units of 2**-40
_LANES = 64  # of words, so that a GPU looks for the winner in many places at once


def exponential(key: Tensor, words: Tensor) -> Tensor:
    """Exponential noise of mean 1: key [...] int64 and words [...], broadcast, -> float64, always above 0.

    It is memoryless: which multiple of ln 2 it exceeds and what is left over are independent. The first is distributed
    as the number of zeros before the first one in random bits, the second that of -ln(1 - w / 2), w uniform.
    """
    bits = mix((key ^ words) * GOLDEN)  # not words * GOLDEN: Inductor would write it with numbers beyond 64 bits
    high, low = shift(bits, 40), bits & ((1 << 40) - 1)
    zeros = 24 + 1023 - ((2 * high + 1).double().view(torch.int64) >> 52)  # 24 less the exponent
    fraction, scaled = low >> 10, torch.full_like(low, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        scaled = (scaled * fraction >> 30) + coefficient
    # A product of 41 and 22 bits, in whole numbers: a compiler may round a float product in another way.
    rest = (2 * low + 1) * (scaled + 64 >> 7)  # in units of 2**-63
    return ((zeros * _LN2).double() * 2.0**23 + rest.double()) * 2.0**-63


def draw(probs: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The words that win: probs [B, n, V] (any positive sums), seed [B], position [B, n] -> [B, n]."""
    return ranking(probs, seed, position, 1).squeeze(-1)


def ranking(probs: Tensor, seed: Tensor, position: Tensor, count: int) -> Tensor:
    """The winners, and after each the runners-up, of which a few may be missing: [B, n, count].

    In a whole vocabulary the runners-up are the first words of other lanes than the winner's. They are nearly always
    the next to arrive, and need no search. Where too few words can arrive, others stand in their place.
    """
    key = key_of(seed, position)[..., None]
    if probs.device.type == "cpu" and not is_compiling():
        words = _possible(probs, count)
        if words is not None:  # the others' noise decides nothing
            times = exponential(key, words) / probs.gather(-1, words).double()
            return words.gather(-1, _ascending(times, count))
    words = torch.arange(probs.shape[-1], device=probs.device)
    return _first(exponential(key, words) / probs.double(), count)


def _possible(probs: Tensor, least: int) -> Tensor | None:
    """All words that have a probability, at least `least` words [B, n, K], in ascending order; None if they are
    many."""
    count = max(int((probs > 0).sum(-1).max()), least)
    if count > probs.shape[-1] // 4:
        return None
    return probs.topk(count, dim=-1).indices.sort(-1).values


def _first(times: Tensor, count: int) -> Tensor:
    """The place of the least of times [..., V], then of the least of other lanes: [..., count].

    Word v runs in lane v modulo `_LANES`. Vocabularies often list words by frequency, so neighbours are rivals: if a
    lane were a stretch of the list, most probable words would share one. If only the winner is wanted, lanes are
    stretches: a GPU reads them faster.
    """
    size = -(-times.shape[-1] // _LANES)
    padded = torch.nn.functional.pad(times, (0, size * _LANES - times.shape[-1]), value=float("inf"))
    if count == 1:
        best, place = padded.unflatten(-1, (_LANES, size)).min(-1)
        stretch = best.argmin(-1, keepdim=True)
        return stretch * size + place.gather(-1, stretch)
    best, place = padded.unflatten(-1, (size, _LANES)).min(-2)
    lanes = _ascending(best, count)
    return (place.gather(-1, lanes) * _LANES + lanes).clamp(max=times.shape[-1] - 1)


def _ascending(times: Tensor, count: int) -> Tensor:
    """The places of the `count` least times [..., K], by one search each: they are few."""
    places = [times.argmin(-1, keepdim=True)]
    for _ in range(count - 1):
        times = times.scatter(-1, places[-1], float("inf"))
        places.append(times.argmin(-1, keepdim=True))
    return torch.cat(places, -1)
