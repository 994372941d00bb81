"""Where a model's numbers stop being finite: a weight that is no number, or a dtype that does not reach far enough.

Every step tells whether the logits that its next token is drawn from are finite. If they are not, the text goes through
the model once more, and every part of it is looked at.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..errors import UserError
from ..model import Transformer

OUTPUTS = 64  # positions whose logits are computed at a time


class Origin(NamedTuple):
    """The first value that is not finite: which part of the model gave it, and at which token."""

    part: str
    position: int | None  # None: the text does not meet it, as a drafted token may
    by_weights: bool  # some of the part's own weights are not finite; otherwise they overflow, or nobody looked


@torch.inference_mode()
def origin(model: Transformer, cache: KVCache, tokens: list[int], chunk_size: int) -> Origin | None:
    """Where the first value that is not finite arises. None: all are finite, and all weights that can be read. Every
    rank calls this.

    Args:
        cache: a new one, with room for all tokens.
    """
    found: list[Origin] = []
    seen: Counter[str] = Counter()  # positions that a part has given

    def look(name: str, part: nn.Module, args: tuple, out: Tensor) -> None:
        if not found and not bool(out.isfinite().all()):
            bad = (~out.isfinite()).flatten(2).any(-1)[0]
            found.append(Origin(name, seen[name] + int(bad.long().argmax()), _has_bad_weights(model, part, *args)))
        seen[name] += out.shape[1]

    parts = [(name, part) for name, part in model.named_modules() if not list(part.children()) and name != "rope"]
    hooks = [part.register_forward_hook(lambda *given, name=name: look(name, *given)) for name, part in parts]
    try:
        blocks = prefill_blocks(cache, range(1), 0, len(tokens), chunk_size)
        hidden = model.prefill(torch.tensor([tokens], device=model.device), blocks)
        for some in hidden.split(OUTPUTS, 1):
            model.output(some)
    finally:
        for hook in hooks:
            hook.remove()
        if cache.prefix.offload is not None:
            cache.prefix.offload.close_work()
    if not found:
        found += [Origin(name, None, True) for name, weight in model.named_parameters()
                  if not bool(weight.float().isfinite().all())]
    return found[0] if found else None


def _has_bad_weights(model: Transformer, part: nn.Module, given: Tensor) -> bool:
    """Packed weights cannot be read, but nothing else makes zeros into what is not finite. Of several ranks each tells
    what it sees first, and none can run a part by itself."""
    if isinstance(part, nn.Embedding):
        return True
    return model.group is None and not bool(part.forward(torch.zeros_like(given[:, :1])).isfinite().all())


def explain(model: Transformer, found: Origin | None, num_tokens: int) -> UserError:
    """One line for what `origin` found."""
    if found is None:
        return UserError(f"the target's logits after {num_tokens:,} tokens were not finite numbers, and without drafts "
                         "they are: a drafted token overflows, or the device miscalculates; load the model with "
                         "--dtype float32")
    where = "" if found.position is None else f", at position {found.position:,} of {num_tokens:,} tokens"
    if found.by_weights:
        why = "weights of it are not finite numbers; download or convert the checkpoint again"
    elif model.dtype == torch.float16:
        why = "float16 ends at 65,504; load the model with --dtype bfloat16 or float32"
    else:
        why = (f"they exceed {model.dtype_name}; compare config.json (rms_norm_eps, rope_theta, rope_scaling) with the "
               "original, or download the checkpoint again")
    return UserError(f"the target's numbers are not finite from {found.part} on{where}: {why}")
