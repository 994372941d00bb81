"""From logits to probabilities, and from probabilities and a uniform number to a token. Knows nothing of speculation.

Randomness is a pure function of (seed of the row, position, level, purpose): a counter-based generator written in
plain tensor operations. There is no generator state, so a captured graph replays it, ranks agree without a broadcast
and a row of a batch draws what it would draw alone. No function here makes the host wait for the device.

Shapes: B batch, V vocabulary, n positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import UserError

# Purposes: each (position, level) has one number to accept or reject a drafted token by, and one to draw a token by.
ACCEPT, SAMPLE = 0, 1


@dataclass
class SamplingParams:
    """Per-row sampling settings, as tensors: to change one changes no shape and recompiles nothing."""

    temperature: Tensor  # [B] float32; 0 is greedy
    top_p: Tensor  # [B] float32 in (0, 1]; 1 keeps all
    top_k: Tensor  # [B] int64; 0 keeps all
    min_p: Tensor  # [B] float32 in [0, 1); 0 keeps all
    seed: Tensor  # [B] int64

    @classmethod
    def allocate(cls, batch: int, device) -> "SamplingParams":
        floats = [torch.ones(batch, device=device), torch.ones(batch, device=device)]
        ints = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(*floats, ints, torch.zeros(batch, device=device), ints.clone())

    def set(self, **values) -> None:
        """Overwrites all rows in place: temperature, top_p, top_k, min_p, seed, as checked by `check_sampling`.

        Scalars hold for every row, sequences give one value a row. None is "keep all" for the filters.
        """
        rows = len(self.seed)
        check_sampling(values, rows)
        for name, value in values.items():
            column = list(value) if isinstance(value, (list, tuple)) else [value] * rows
            column = [_KEEP_ALL[name] if one is None else one for one in column]
            if name == "temperature":  # below this a float32 logit divided by it overflows
                column = [max(one, 1e-6) if one > 0 else 0.0 for one in column]
            target = getattr(self, name)
            target.copy_(torch.tensor(column, dtype=target.dtype))

_KEEP_ALL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_RANGES = {
    "temperature": (lambda x: 0 <= x < float("inf"), "0 (greedy) or a positive number"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1; 1 keeps every token"),
    "top_k": (lambda x: 0 <= x < 2**31 and int(x) == x, "a whole number from 0; 0 keeps every token"),
    "min_p": (lambda x: 0 <= x < 1, "at least 0 and below 1; 0 keeps every token"),
    "seed": (lambda x: -(2**63) <= x < 2**63 and int(x) == x, "a whole number of at most 64 bits"),
}


def check_sampling(values: dict, rows: int) -> None:
    """Raises UserError for a sampling setting that is out of range, of the wrong kind or of the wrong length."""
    for name, value in values.items():
        column = list(value) if isinstance(value, (list, tuple)) else [value]
        if len(column) != rows and isinstance(value, (list, tuple)):
            raise UserError(f"{name} has {len(column)} values for {rows} prompts; give one value, or one a prompt")
        in_range, wanted = _RANGES[name]
        for one in column:
            if one is None and name in _KEEP_ALL:
                continue
            if not isinstance(one, (int, float)) or not in_range(one):
                raise UserError(f"{name} ({one!r}) must be {wanted}")


def probabilities(logits: Tensor, params: SamplingParams, filtered: bool = True) -> Tensor:
    """The law that tokens are drawn from: temperature, then top-k, top-p and min-p, renormalised.

    A token as probable as the least probable one kept is kept too, so ties do not depend on a sort's order. Rows of
    temperature 0 put all mass on the argmax.

    Args:
        logits: [B, n, V].
        filtered: False skips the sort; the caller knows that no row uses top-k or top-p.

    Returns:
        [B, n, V], float32 or wider.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    greedy = (params.temperature == 0)[:, None, None]
    temperature = params.temperature.to(wide)[:, None, None]
    probs = torch.softmax(logits / torch.where(greedy, 1.0, temperature), dim=-1)
    top = probs.amax(-1, keepdim=True)
    threshold = params.min_p.to(wide)[:, None, None] * top  # [B, n, 1]
    if filtered:
        top_k, top_p = params.top_k[:, None, None], params.top_p.to(wide)[:, None, None]
        ranked = _most_probable(probs, params)  # [B, n, V or fewer]
        rank = torch.arange(ranked.shape[-1], device=logits.device)
        ranked = torch.where((rank < top_k) | (top_k == 0), ranked, 0.0)
        total = torch.where(top_k == 0, probs.sum(-1, keepdim=True), ranked.sum(-1, keepdim=True))
        before = ranked.cumsum(-1) - ranked  # mass of the more probable tokens
        kept = (ranked > 0) & ((before < top_p * total) | (top_p == 1))
        last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)
        nucleus = torch.where((top_k == 0) & (top_p == 1), 0.0, ranked.gather(-1, last))
        threshold = torch.maximum(threshold, nucleus)
    probs = torch.where(probs >= threshold, probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    one_hot = F.one_hot(logits.argmax(-1), logits.shape[-1]).to(wide)
    return torch.where(greedy, one_hot, probs)


def _most_probable(probs: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities in descending order, all of them, or as many as decide every row's top-k and top-p."""
    few = 128
    if probs.device.type == "cpu" and not torch.compiler.is_compiling() and probs.shape[-1] > few:
        # A CPU sorts slowly and looks for free: nearly always the first few hold the nucleus.
        ranked = probs.topk(few).values
        top_k = params.top_k[:, None]
        by_mass = (ranked.sum(-1) >= params.top_p[:, None]) | (params.top_p[:, None] == 1)
        if bool(torch.where(top_k == 0, by_mass, top_k <= few).all()):
            return ranked
    return probs.sort(dim=-1, descending=True).values


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative distribution passes u: probs [..., V] (any positive sum), u [...] -> [...].

    Sums are taken in float64, so a token's chance is right to 2**-52, not to the 2**-24 of a float32 uniform.
    """
    cumulative = probs.double().cumsum(-1)
    return (cumulative <= u[..., None] * cumulative[..., -1:]).sum(-1)


def uniform(seed: Tensor, position: Tensor, level: int, purpose: int) -> Tensor:
    """Uniform numbers in [0, 1): seed [B], position [B, n] -> [B, n] float64, multiples of 2**-52."""
    state = _mix(seed + _GOLDEN)[:, None]
    state = _mix(state + position * _GOLDEN)
    state = _mix(state + _signed((2 * level + purpose + 1) * _GOLDEN))
    return _shift(state, 12).double() * 2.0**-52


def _signed(constant: int) -> int:
    """The int64 with the same 64 low bits."""
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >> 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit flips each output bit half of the time."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
