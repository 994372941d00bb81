"""The least probability that survives top-k and top-p. Masses are whole numbers, so no order of adding them matters.

Shapes: B batch, n positions, V vocabulary.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

FIRST = (128, 4096)  # a CPU ranks this number of the most probable words before it ranks all
UNIT = 2.0**56  # of masses
STRETCH = 1024  # numbers that a GPU sums up beside others


def smallest_kept(probs: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """All words that are at least as probable survive.

    Args:
        probs: [B, n, V]. top_k: [B], 0: all; None: all of all rows. top_p: [B].

    Returns:
        [B, n, 1].
    """
    top_k, top_p = None if top_k is None else top_k[:, None, None], top_p[:, None, None].double()
    order = _most_probable(probs, top_k, top_p)  # [B, n, V or fewer]
    mass = _mass(order)
    upto = running_sum(mass)
    before = upto - mass
    count, total = torch.full_like(upto[..., :1], order.shape[-1]), torch.full_like(upto[..., :1], int(UNIT))
    if top_k is not None:
        count = torch.where(top_k == 0, count, top_k).clamp(max=order.shape[-1])
        total = torch.where(top_k == 0, total, upto.gather(-1, count - 1))
    last = (before < _share(top_p, total)).sum(-1, keepdim=True).clamp(min=1) - 1
    by_count = 0.0 if top_k is None else torch.where(top_k == 0, 0.0, order.gather(-1, count - 1))
    return torch.where(top_p == 1, by_count, order.gather(-1, last))


def _mass(probs: Tensor) -> Tensor:
    return (probs.double() * UNIT).long()


def _share(top_p: Tensor, total: Tensor) -> Tensor:
    return (top_p * total.double()).long()


def _most_probable(probs: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """Probabilities in descending order, all of them, or as many as decide every row's top-k and top-p."""
    looks = probs.device.type == "cpu" and not is_compiling()
    for few in FIRST if looks else ():  # a CPU sorts slowly and looks for free: nearly always few hold the nucleus
        if probs.shape[-1] <= few:
            break
        order = probs.topk(few).values
        mass = _mass(order).sum(-1, keepdim=True)
        enough = (mass >= _share(top_p, torch.full_like(mass, int(UNIT)))) | (top_p == 1)
        if top_k is not None:
            enough = torch.where(top_k == 0, enough, top_k <= few)
        if bool(enough.all()):
            return order
    return probs.sort(dim=-1, descending=True).values


def in_stretches(x: Tensor) -> Tensor:
    """[..., N] -> [..., stretches, STRETCH], with zeros at the end of the last."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % STRETCH)).unflatten(-1, (-1, STRETCH))


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1) of [..., N]. A GPU sums several rows in two steps, stretches and their sums: a row's scan occupies
    one of its processors, and the compiler of torch 2.11 fails on long scans of several rows."""
    if not x.is_cuda or x.numel() == x.shape[-1] or x.shape[-1] <= STRETCH:
        return x.cumsum(-1)
    within = in_stretches(x).cumsum(-1)
    before = torch.nn.functional.pad(within[..., :-1, -1].cumsum(-1), (1, 0))
    return (within + before[..., None]).flatten(-2)[..., : x.shape[-1]]
