"""Which drafted tokens are kept, and what replaces the first that is not. Pure functions on tensors.

Knows nothing of models, caches or levels. Random numbers come in as arguments. There are two rules. `verify_chain` is
that of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): what comes out has the
target's distribution, whatever the draft's was, as long as `draft_probs` is the distribution that the drafted tokens
were drawn from. `match_chain` keeps drafted tokens that the target draws, too: its output is what the target draws.
`match_tree` does the same with runners-up beside the drafted tokens, `match_nodes` with a tree of any shape.

Shapes: B batch, n drafted tokens at most, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..tree import TokenTree
from . import sampling
from .nodes import Nodes


class Verdict(NamedTuple):
    tokens: Tensor  # [B, n + 1]: the accepted ones of the spine, then those of a leaf or a branch, then what the level
    # that checks drew after them (recovered or bonus); the rest is meaningless
    num_accepted: Tensor  # [B], of the spine
    beside: Tensor  # [B]: how many were accepted after those, beside the spine; of leaves, 1 at most
    rows: Tensor  # [B, n + 1]: the rows of the block that `tokens` were drawn from


def of_chain(tokens: Tensor, num_accepted: Tensor) -> Verdict:
    """Where no tokens stand beside the spine."""
    rows = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    return Verdict(tokens, num_accepted, torch.zeros_like(num_accepted), rows)


def is_accepted(draft_prob: Tensor, target_prob: Tensor, u: Tensor) -> Tensor:
    """Accepts with probability min(1, target_prob / draft_prob). A token of probability 0 in either never passes."""
    return (u * draft_prob < target_prob) & (draft_prob > 0)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What the target has and the draft lacks, [..., V], unnormalised: the distribution of the token after a rejection.

    Where rounding leaves nothing (two distributions equal up to an ulp), it is the target's own.
    """
    rest = (target_probs - draft_probs).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target_probs)


def verify_chain(tokens: Tensor, draft_probs: Tensor | None, num_drafted: Tensor, target_probs: Tensor,
                 accept_u: Tensor, sample_u: Tensor) -> Verdict:
    """Accepts the longest prefix of a drafted chain that passes, then draws one token more.

    Args:
        tokens: [B, n] drafted tokens; those from num_drafted on are padding.
        draft_probs: [B, n, V], row i the distribution that tokens[:, i] was drawn from; None for deterministic
            proposals.
        num_drafted: [B].
        target_probs: [B, n + 1, V], row i the target's distribution of the token that stands where tokens[:, i] does.
        accept_u: [B, n], sample_u: [B, n + 1]: uniform numbers, one a position.
    """
    if tokens.shape[1] == 0:
        last = sampling.sample(target_probs[:, 0], sample_u[:, 0])
        return of_chain(last[:, None], torch.zeros_like(num_drafted))
    target_prob = target_probs[:, :-1].gather(2, tokens[..., None]).squeeze(2)  # [B, n]
    if draft_probs is None:
        draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter(2, tokens[..., None], 1.0)
    draft_prob = draft_probs.gather(2, tokens[..., None]).squeeze(2)
    accepted = is_accepted(draft_prob, target_prob, accept_u)
    accepted &= torch.arange(tokens.shape[1], device=tokens.device) < num_drafted[:, None]
    num_accepted = accepted.long().cumprod(1).sum(1)  # [B]

    stop = num_accepted[:, None, None]
    last_probs = target_probs.gather(1, stop.expand(-1, 1, target_probs.shape[2])).squeeze(1)  # [B, V]
    inside = stop.clamp(max=tokens.shape[1] - 1).expand(-1, 1, target_probs.shape[2])
    against = draft_probs.gather(1, inside).squeeze(1)
    rejected = (num_accepted < num_drafted)[:, None]
    last_probs = torch.where(rejected, residual(last_probs, against), last_probs)
    last = sampling.sample(last_probs, sample_u.gather(1, stop.squeeze(2)).squeeze(1))  # recovered or bonus token
    return of_chain(torch.cat([tokens, last[:, None]], 1).scatter(1, stop.squeeze(2), last[:, None]), num_accepted)


def match_chain(tokens: Tensor, num_drafted: Tensor, drawn: Tensor) -> Verdict:
    """Accepts the longest prefix of a drafted chain that equals what the target draws; then comes what it draws next.

    Args:
        tokens: [B, n] drafted tokens; those from num_drafted on are padding.
        num_drafted: [B].
        drawn: [B, n + 1], the target's own tokens, each after the drafted ones before it.
    """
    drafted = torch.arange(tokens.shape[1], device=tokens.device) < num_drafted[:, None]
    return of_chain(drawn, ((tokens == drawn[:, :-1]) & drafted).long().cumprod(1).sum(1))


def match_tree(tree: TokenTree, tokens: Tensor, num_drafted: Tensor, drawn: Tensor) -> Verdict:
    """`match_chain` over a tree's spine. A leaf that the target draws instead is kept, too.

    Args:
        tokens: [B, M], those of the block's rows. drawn: [B, M], the target's own, each after that of its row.
        num_drafted: [B], of the spine.
    """
    chain = match_chain(tokens[:, 1 : tree.spine], num_drafted, drawn[:, : tree.spine])
    if not tree.num_leaves:
        return chain
    stop, order = chain.num_accepted[:, None], chain.rows  # [B, 1], [B, S]
    at = stop.clamp(max=tree.spine - 2)
    first = tree.spine + at * tree.leaves  # [B, 1], the row of the first leaf there
    same = tokens.gather(1, first + torch.arange(tree.leaves, device=at.device)) == drawn.gather(1, stop)  # [B, k]
    found = same.any(1) & (chain.num_accepted < num_drafted)
    row = first + same.long().argmax(1, keepdim=True)
    order = torch.where((order == stop + 1) & found[:, None], row, order)
    return Verdict(drawn.gather(1, order), chain.num_accepted, found.long(), order)


def match_nodes(nodes: Nodes, num_drafted: Tensor, drawn: Tensor) -> Verdict:
    """`match_chain` over a tree of any shape: keeps the longest path on which each token is the target's own draw.

    Args:
        nodes: the tree, of M rows with paths of at most P, and its tokens.
        num_drafted: [B], of the spine. drawn: [B, M], the target's own tokens, each after that of its row.
    """
    size, longest = nodes.paths.shape
    ahead = torch.arange(longest, device=drawn.device)
    paths = nodes.paths.clamp(min=0)
    same = nodes.tokens == drawn[:, paths[:, 1]]  # [B, M]: is it what was drawn after the row that it follows?
    before = ahead >= nodes.depths[:, None]  # [M, P]: of a row's path, the pending token and what lies before it
    kept = (same[:, paths] | before).all(-1) & (nodes.anchors <= num_drafted[:, None])
    order = nodes.depths * size + torch.arange(size - 1, -1, -1, device=drawn.device)  # the deepest, of those the first
    last = torch.where(kept, order, -1).argmax(1)  # [B]
    depth, off = nodes.depths[last], nodes.distances[last]
    back = depth[:, None] - ahead  # [B, P]: how far before the last one
    rows = torch.where(back >= 0, paths[last].gather(1, back.clamp(min=0)), ahead)
    return Verdict(drawn.gather(1, rows), depth - off, off, rows)
