"""The least probability that survives top-k and top-p. Masses are whole numbers, so no order of adding them matters.

There are two ways to the same number. Words are **ranked**. For many words in many rows, a GPU's compiled code
**searches**, bit by bit: a probability survives if the more probable ones are fewer than k and have less mass than p,
so each pass over the words says on which side of a few candidates the number lies. A compiled pass reads the words
once; a sort reads and writes them again and again. A law that only drafts need not be exact: for few words on a GPU,
over all rows, one pass finds the border **nearly**, and for more the most probable words of a row alone are ranked.

Shapes: B batch, n positions, V vocabulary.
"""

import torch
from torch import Tensor
from torch.compiler import is_compiling

FIRST = (128, 4096)  # on a CPU so many of the most probable words are ranked before all are
SEARCHED = 2**22  # probabilities from which on a GPU's compiled code searches (measured on an H200)
BITS = 2  # that a pass decides: of 3, a pass takes twice as long
PATTERN_BITS = 30  # of float32 numbers from 0 to 1: in the order of the numbers, as whole numbers
UNIT = 2.0**56  # of masses
NEARLY, NEARLY_AS_WRITTEN = 5 * 2**15, 2**15  # probabilities up to which a GPU looks for a border nearly
RANKED = 1024  # words of each row that are ranked beyond that
STRETCH = 1024  # numbers that a GPU sums up beside others
EDGES, HALVINGS = 128, 16  # borders that are tried then, from the largest probability down to so many halvings of it


def smallest_kept(probs: Tensor, top_k: Tensor | None, top_p: Tensor, most: int | None = None) -> Tensor:
    """All at least as probable survive: probs [B, n, V], top_k [B] (0: all; None: all of all rows), top_p [B] ->
    [B, n, 1]. most: see `ranked`."""
    top_k, top_p = None if top_k is None else top_k[:, None, None], top_p[:, None, None].double()
    are_many = _on_gpu(probs) and probs.numel() >= SEARCHED
    if most is None and is_compiling() and are_many and probs.dtype == torch.float32:
        return searched(probs, top_k, top_p)
    return ranked(probs, top_k, top_p, most)


def nearly_kept(probs: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """Nearly `smallest_kept`, for laws that only draft.

    Of few words, over all rows, the border is up to 9% less: for one row of 32,000 an H200 takes 10 us, and 63 where it
    ranks them; as it is written 55 and 82, but for one of 128,256 it would take 180 and takes 102. Of many it is at
    least the last of RANKED of a row, and top-p is a share of the mass of these where top-k asks for more. Where all
    words are to survive, all do.
    """
    if not _on_gpu(probs):
        return smallest_kept(probs, top_k, top_p)
    if probs.numel() > (NEARLY if is_compiling() else NEARLY_AS_WRITTEN):
        return smallest_kept(probs, top_k, top_p, RANKED)
    top_p = top_p[:, None, None].to(probs.dtype)
    steps = torch.arange(EDGES, device=probs.device) * (HALVINGS / EDGES)
    edges = probs.amax(-1, keepdim=True) * torch.exp2(-steps)  # [B, n, EDGES], descending
    above, every = probs[..., None, :] >= edges[..., None], EDGES  # [B, n, EDGES, V]
    mass = torch.where(above, probs[..., None, :], 0.0).sum(-1)
    total, by_count = torch.ones_like(mass[..., :1]), torch.full_like(mass[..., :1], every, dtype=torch.int64)
    if top_k is not None:
        top_k = top_k[:, None, None]
        by_count = torch.where(top_k == 0, every, (above.sum(-1) < top_k).sum(-1, keepdim=True))
        total = torch.where(top_k == 0, 1.0, mass.gather(-1, by_count.clamp(max=every - 1)))
    by_mass = torch.where(top_p == 1, every, (mass < top_p * total).sum(-1, keepdim=True))
    place = torch.minimum(by_count, by_mass)
    return torch.where(place == every, 0.0, edges.gather(-1, place.clamp(max=every - 1)))


def ranked(probs: Tensor, top_k: Tensor | None, top_p: Tensor, most: int | None = None) -> Tensor:
    """By sorting; arguments as in `searched`. most: only the most probable words are ranked, so many. None: as many as
    decide."""
    if most is None:
        order = _most_probable(probs, top_k, top_p)  # [B, n, V or fewer]
    else:
        order = probs.topk(min(most, probs.shape[-1])).values
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


def searched(probs: Tensor, top_k: Tensor | None, top_p: Tensor) -> Tensor:
    """By bits: probs [B, n, V] float32, top_k [B, 1, 1] or None, top_p [B, 1, 1] float64."""
    pattern, mass = probs.view(torch.int32), _mass(probs)
    total, by_count = torch.full_like(mass[..., :1], int(UNIT)), torch.zeros_like(pattern[..., :1])
    if top_k is not None:
        ones = torch.ones_like(pattern)
        found = _search(pattern, ones, top_k)
        above = pattern > found
        rest = top_k - above.sum(-1, keepdim=True)  # those as probable as the last one, as many as still count
        upto = torch.where(above, mass, 0).sum(-1, keepdim=True) + rest * _mass(found.view(torch.float32))
        total = torch.where(top_k == 0, total, upto)
        by_count = torch.where(top_k == 0, 0, found)
    by_mass = _search(pattern, mass, _share(top_p, total))
    return torch.where(top_p == 1, by_count, torch.maximum(by_count, by_mass)).view(torch.float32)


def _search(pattern: Tensor, weight: Tensor, bound: Tensor) -> Tensor:
    """The least number t [B, n, 1] such that all of pattern [B, n, V] above t weigh less than bound [B, n, 1]."""
    below = torch.full_like(pattern[..., :1], -1)  # what lies above it weighs too much
    for left in range(PATTERN_BITS - BITS, -1, -BITS):
        heavy = [torch.where(pattern > below + (step << left), weight, 0).sum(-1, keepdim=True) >= bound
                 for step in range(1, 2**BITS)]
        below = below + (sum(one.int() for one in heavy) << left)
    return below + 1


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


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
    """x.cumsum(-1) of [..., N]. Of several rows on a GPU in two steps, stretches and their sums: a row's scan occupies
    one of its processors, and the compiler of torch 2.11 fails on long scans of several rows."""
    if not _on_gpu(x) or x.numel() == x.shape[-1] or x.shape[-1] <= STRETCH:
        return x.cumsum(-1)
    within = in_stretches(x).cumsum(-1)
    before = torch.nn.functional.pad(within[..., :-1, -1].cumsum(-1), (1, 0))
    return (within + before[..., None]).flatten(-2)[..., : x.shape[-1]]
