"""Why a model's numbers are not finite: a weight that is no number, or a dtype that does not reach far enough.

Every round tells whether the logits of its first token are finite. If they are not, the weights are looked at.
"""

import torch
from torch import nn

from ..errors import UserError
from ..model import Transformer
from ..parallel import together


@torch.inference_mode()
def explain(model: Transformer, count: int) -> UserError:
    """One line for logits that are not finite after `count` tokens. Every rank calls this."""
    def first_broken() -> str:
        return next((name for name, part in model.named_modules() if not _is_sound(part)), "")

    broken = next(filter(None, together(model.group, first_broken)), "")
    why = f"weights of {broken} are no finite numbers" if broken else f"they exceed {model.dtype_name}"
    remedy = "compare config.json (rms_norm_eps, rope_theta, rope_scaling) with the original, or " * (not broken)
    if model.dtype == torch.float16:
        why, remedy = f"{why} (float16 ends at 65,504)", "load the model with --dtype bfloat16 or float32, or "
    return UserError(f"the target's logits after {count:,} tokens are not finite: {why}; {remedy}download or convert "
                     "the checkpoint again")


def _is_sound(part: nn.Module) -> bool:
    """Whether the weights of a part itself are finite. On each rank for itself, without hooks."""
    if getattr(part, "packed", None) is not None:  # it cannot be read; of zeros, weights alone make such numbers
        return bool(part.forward(torch.zeros(1, 1, part.in_features)).isfinite().all())
    return all(bool(weight.float().isfinite().all()) for weight in part.parameters(recurse=False))
