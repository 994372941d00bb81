"""From logits to probabilities, and from probabilities and a uniform number to a token. Knows nothing of speculation.

Randomness is a pure function of (seed of the row, position, level, purpose): a counter-based generator written in
plain tensor operations. There is no generator state, so a captured graph replays it, ranks agree without a broadcast
and a row of a batch draws what it would draw alone. No function here makes the host wait for the device.

Shapes: B batch, V vocabulary, n positions.
"""

from dataclasses import dataclass, fields
from functools import reduce

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ..config import Sampling
from .top_p import STRETCH, in_stretches, running_sum, smallest_kept

# Purposes: each (position, level) has one number to accept or reject a drafted token by, and one to draw a token by.
ACCEPT, SAMPLE = 0, 1
MANY = 2**16  # probabilities above which a GPU draws in two steps


@dataclass(frozen=True)
class Uses:
    """Which parts of `probabilities` some row needs; the others may be skipped."""

    greedy: bool = True
    drawn: bool = True
    top_k: bool = True
    top_p: bool = True
    min_p: bool = True
    logit_bias: bool = True


class SamplingParams:
    """Per-row sampling settings, a tensor [B] for each field of `Sampling`, and `logit_bias` [B, V]: to change one
    changes no shape and recompiles nothing.

    Args:
        vocab_size: V. 1: there is no bias.
    """

    def __init__(self, batch: int, device, vocab_size: int = 1):
        self.logit_bias = torch.zeros(batch, vocab_size, device=device)
        for field in fields(Sampling):
            if field.metadata["dtype"] is None:
                continue
            value = field.metadata["neutral"] if field.metadata["neutral"] is not None else 1
            dtype = getattr(torch, field.metadata["dtype"])
            setattr(self, field.name, torch.full((batch,), value, dtype=dtype, device=device))
        self._needed = Uses()

    @property
    def uses(self) -> Uses:
        """What steps do. Compiled code does all, since it serves any row."""
        return Uses() if is_compiling() else self._needed

    def set(self, **values) -> None:
        """Overwrites all rows in place by the fields of `Sampling`, each one value or a list of one a row. Call it
        before a text begins: the text's recorded steps keep those settings."""
        columns = vars(Sampling(**values).rows(len(self.seed), vocab_size=self.logit_bias.shape[1]))
        biases = columns.pop("logit_bias")
        self.logit_bias.zero_()
        for row, bias in zip(self.logit_bias, biases, strict=True):
            if bias:
                row[torch.tensor(list(bias), device=row.device)] = torch.tensor(
                    list(bias.values()), dtype=row.dtype, device=row.device)
        # Below this a float32 logit divided by the temperature overflows.
        columns["temperature"] = [max(one, 1e-6) if one > 0 else 0.0 for one in columns["temperature"]]
        for name, column in columns.items():
            target = getattr(self, name)
            target.copy_(torch.tensor(column, dtype=target.dtype))
        drawn = any(columns["temperature"])
        self._needed = Uses(greedy=0.0 in columns["temperature"], drawn=drawn, top_k=drawn and any(columns["top_k"]),
                            top_p=drawn and any(p < 1 for p in columns["top_p"]),
                            min_p=drawn and any(columns["min_p"]), logit_bias=any(biases))


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are drawn from: bias, then temperature, then top-k, top-p and min-p, renormalised.

    A token as probable as the least probable one kept is kept too, so ties do not depend on an order. Rows of
    temperature 0 put all mass on the argmax.

    Args:
        logits: [B, n, V].

    Returns:
        [B, n, V], float32 or wider.
    """
    uses = params.uses
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    if uses.logit_bias:  # to add 0 changes no bit of it
        logits = logits + params.logit_bias.to(wide)[:, None]
    temperature = params.temperature.to(wide)[:, None, None]
    if uses.greedy:
        greedy = temperature == 0
        one_hot = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        if not uses.drawn:
            return one_hot
        temperature = torch.where(greedy, 1.0, temperature)
    probs = torch.softmax(logits / temperature, dim=-1)
    thresholds = []
    if uses.top_k or uses.top_p:
        thresholds.append(smallest_kept(probs, params.top_k if uses.top_k else None, params.top_p))
    if uses.min_p:
        thresholds.append(params.min_p.to(wide)[:, None, None] * probs.amax(-1, keepdim=True))
    if thresholds:
        probs = torch.where(probs >= reduce(torch.maximum, thresholds), probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.where(greedy, one_hot, probs) if uses.greedy else probs


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative distribution passes u: probs [..., V] (any positive sum), u [...] -> [...].

    Sums are taken in float64, so a token's chance is right to 2**-52, not to the 2**-24 of a float32 uniform.
    """
    if probs.is_cuda and probs.numel() > MANY:
        return _in_two_steps(probs, u)
    cumulative = running_sum(probs.double())
    return (cumulative <= u[..., None] * cumulative[..., -1:]).sum(-1)


def _in_two_steps(probs: Tensor, u: Tensor) -> Tensor:
    """`sample`, which finds a stretch of tokens first, and then the token in it. It needs only the sums of the other
    stretches. The arguments have the same shape, but for V."""
    stretches = in_stretches(probs)
    upto = F.pad(stretches.sum(-1, dtype=torch.float64).cumsum(-1), (1, 0))  # [..., N + 1], from 0 on
    passed = u[..., None] * upto[..., -1:]
    which = (upto[..., 1:-1] <= passed).sum(-1, keepdim=True)
    place = which[..., None].expand(*which.shape, STRETCH)
    within = stretches.gather(-2, place).squeeze(-2).double().cumsum(-1)
    # The stretch's sum may be rounded in another way here, and a token without a chance must not be drawn.
    most = torch.nextafter(within[..., -1:], torch.zeros_like(within[..., -1:]))
    rest = torch.minimum(passed - upto.gather(-1, which), most)
    return which.squeeze(-1) * STRETCH + (within <= rest).sum(-1)


def uniform(seed: Tensor, position: Tensor, level: int, purpose: int) -> Tensor:
    """Uniform numbers in [0, 1): seed [B], position [B, n] -> [B, n] float64, multiples of 2**-52."""
    bits = mix(key_of(seed, position) + _signed((2 * level + purpose + 1) * GOLDEN))
    return shift(bits, 12).double() * 2.0**-52


def key_of(seed: Tensor, position: Tensor) -> Tensor:
    """64 random bits for each position, [B, n] int64, of seed [B] and position [B, n]."""
    return mix(mix(seed + GOLDEN)[:, None] + position * GOLDEN)


def _signed(constant: int) -> int:
    """The int64 with the same 64 low bits."""
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >> 63 else constant


GOLDEN = _signed(0x9E3779B97F4A7C15)


def shift(x, bits: int):
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit flips each output bit half of the time."""
    x = (x ^ shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift(x, 31)
