"""Where a model's numbers stop being finite: a weight that is no number, or a dtype that does not reach far enough.

Every step tells whether the logits that its next token is drawn from are finite. If they are not, the text goes through
the model once more, and every part of it is looked at.
"""

from collections import Counter

import torch
from torch import Tensor, nn

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..errors import UserError
from ..experts import Experts
from ..model import Transformer

OUTPUTS = 64  # positions whose logits are computed at a time


@torch.inference_mode()
def explain(model: Transformer, cache: KVCache, tokens: list[int], chunk_size: int) -> UserError:
    """One line that says where the first value that is not finite arises: in which part of the model, at which position
    of the text, and why. Every rank calls this. cache: a new one, with room for all tokens."""
    found: list[tuple[str, bool]] = []  # (part and position, whether its own weights are the cause)
    seen: Counter[str] = Counter()  # positions that a part has given

    def look(name: str, part: nn.Module, args: tuple, out: Tensor) -> None:
        if not found and not bool(out.isfinite().all()):
            position = seen[name] + int((~out.isfinite()).flatten(2).any(-1)[0].long().argmax())
            # Packed weights cannot be read. But only weights turn zeros into values that are not finite. With several
            # ranks, none can run a part by itself.
            by_weights = isinstance(part, nn.Embedding) or model.group is None and not bool(
                part.forward(torch.zeros_like(args[0][:, :1])).isfinite().all())
            found.append((f"{name} on, at position {position:,} of {len(tokens):,} tokens", by_weights))
        seen[name] += out.shape[1]

    # Experts are looked at as one: what is in them has other shapes.
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Experts)
             or not list(part.children()) and name != "rope" and not (model.config.num_experts and ".mlp." in name)]
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
    # The text may miss a weight that only a drafted token meets.
    found += [(f"{name} on", True) for name, weight in model.named_parameters()
              if not bool(weight.float().isfinite().all())]
    if not found:
        return UserError(f"the target's logits after {len(tokens):,} tokens were not finite numbers, and without "
                         "drafts they are: a drafted token overflows, or the device miscalculates; load the model "
                         "with --dtype float32")
    where, by_weights = found[0]
    why = (f"they exceed {model.dtype_name}; compare config.json (rms_norm_eps, rope_theta, rope_scaling) with the "
           "original, or download the checkpoint again")
    if by_weights:
        why = "weights of it are not finite numbers; download or convert the checkpoint again"
    elif model.dtype == torch.float16:
        why = "float16 ends at 65,504; load the model with --dtype bfloat16 or float32"
    return UserError(f"the target's numbers are not finite from {where}: {why}")

