"""Log-probabilities of the tokens that a round emitted, by the full level's logits of that round.

An emitted token follows the full level's distribution at its position, so the logits there say how probable it was.
They are computed once more from the hidden states, which the level keeps of its last step: so steps are the same,
compiled or recorded, whether or not anybody asks.

Shapes: B batch, S rows of a spine, n tokens at most of a row, V words that the tokenizer can name, k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..decode.verifier import Verifier


@dataclass(frozen=True)
class Logprob:
    """Natural logarithms of probabilities at the place of one token."""

    logprob: float  # of the token, as it was drawn: after bias, temperature, top-p and the like
    model_logprob: float  # of the token, by the model's own distribution: temperature 1, nothing cut, no bias
    top: list[tuple[int, float]]  # the k most probable tokens by the model's own distribution: (id, log-probability)


@torch.inference_mode()
def of_round(level: Verifier, counts: list[int], k: int) -> list[list[Logprob]]:
    """The entries of the full level's last round, one a token, for each row. Waits for the device once. counts: tokens
    that the round emitted, row by row."""
    n = max(counts)
    logits = logits_of(level)[:, :n]  # [B, n, V and padding]
    drawn = level.tape.probs(logits).log()
    own = logits[..., : level.tape.vocab_size]
    own = own.to(torch.promote_types(own.dtype, torch.float32)).log_softmax(-1)
    tokens = level.outbox.buffer[:, :n, None]
    top = own.topk(k, dim=-1)
    columns = [drawn.gather(2, tokens), own.gather(2, tokens), top.values, top.indices]
    table = torch.cat([column.double() for column in columns], 2).tolist()  # [B, n, 2 + 2 k]
    return [[Logprob(drawn, model, [(int(one), value) for one, value in zip(rest[k:], rest[:k], strict=True)])
             for drawn, model, *rest in row[:count]] for row, count in zip(table, counts, strict=True)]


def logits_of(level: Verifier) -> Tensor:
    """The logits that the last step's tokens were drawn from, [B, S, V and padding]."""
    tree = level.tree.cut(level.num_rows)
    logits = level.model.output(level.hidden[:, : tree.rows].contiguous())
    if not tree.branches:
        return logits
    return logits.gather(1, level.drawn_from[:, : tree.spine, None].expand(-1, -1, logits.shape[2]))
