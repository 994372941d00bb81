"""Where a model's numbers stop being finite: a weight that is no number, or a dtype that does not reach far enough.

Every step tells whether the logits that its next token is drawn from are finite. If they are not, the text goes through
the model once more, layer by layer, until a value appears that is none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..errors import UserError
from ..model import Transformer

OUTPUTS = 64  # positions whose logits are computed at a time


@dataclass(frozen=True)
class Origin:
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
    watch, offload = Watch(model), cache.prefix.offload
    blocks = prefill_blocks(cache, range(1), 0, len(tokens), chunk_size)
    try:
        with watch:
            x = model.embedding(torch.tensor([tokens], device=model.device))
            for i, layer in enumerate(model.layers):
                for start, stop, kv in blocks:
                    if not watch.is_done:
                        watch.start = start
                        x[:, start:stop] = layer(x[:, start:stop], kv.layer(i))
            for start in range(0, len(tokens), OUTPUTS):
                if not watch.is_done:
                    watch.start = start
                    model.output(model.norm(x[:, start : start + OUTPUTS]))
    finally:
        if offload is not None:
            offload.close_work()
    if watch.found is None:
        bad = (name for name, weight in model.named_parameters() if not bool(weight.float().isfinite().all()))
        return next((Origin(name, None, True) for name in bad), None)
    return watch.found


class Watch:
    """Looks at what each part of a model gives, and notes the first value that is not finite."""

    def __init__(self, model: Transformer):
        self.model, self.start, self.found = model, 0, None  # start: position of the first token that is given

    @property
    def is_done(self) -> bool:
        """Ranks go to the end together: each of them knows its own part, and waits for the others."""
        return self.found is not None and self.model.group is None

    def __enter__(self) -> "Watch":
        parts = [(name, part) for name, part in self.model.named_modules() if not list(part.children())]
        self.hooks = [part.register_forward_hook(self._look(name)) for name, part in parts if name != "rope"]
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()

    def _look(self, name: str):
        def hook(part: nn.Module, args: tuple, out: Tensor) -> None:
            if self.found is None and not bool(out.isfinite().all()):
                rows = (~out.isfinite()).flatten(2).any(-1)[0]
                self.found = Origin(name, self.start + int(rows.long().argmax()), self._has_bad_weights(part, *args))

        return hook

    def _has_bad_weights(self, part: nn.Module, given: Tensor) -> bool:
        """Packed weights cannot be read, but nothing else makes zeros into what is not finite."""
        if isinstance(part, nn.Embedding):
            return True
        if self.model.group is not None:
            return False
        return not bool(part.forward(torch.zeros_like(given[:, :1])).isfinite().all())


def explain(model: Transformer, found: Origin | None, num_tokens: int) -> UserError:
    """One line for what `origin` found."""
    if found is None:
        return UserError(f"the target's logits after {num_tokens:,} tokens were not finite numbers, and without drafts "
                         "they are: a drafted token overflows, or the device miscalculates; load the model with "
                         "--dtype float32")
    where = "" if found.position is None else f", at position {found.position:,} of {num_tokens:,} tokens"
    what = f"the target's numbers are not finite from {found.part} on{where}"
    if found.by_weights:
        return UserError(f"{what}: weights of it are not finite numbers; download or convert the checkpoint again")
    if model.dtype == torch.float16:
        return UserError(f"{what}: float16 ends at 65,504; load the model with --dtype bfloat16 or float32")
    return UserError(f"{what}: they exceed {model.dtype_name}; compare config.json (rms_norm_eps, rope_theta, "
                     "rope_scaling) with the original, or download the checkpoint again")
