"""Logits beside those of transformers on the same folder, and where the two part: which layer, which position."""

import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..engine import Engine
from ..memory import available
from ..model import ModelConfig

TOKENS = 2048  # of the first text
LAST = 64  # logits that are compared at the far end
CHUNK = 2048  # tokens that transformers computes at a time
PATIENCE = {"cpu": 30.0, "cuda": 60.0}  # seconds that transformers may take for the far end


@dataclass(frozen=True)
class Allowed:
    """By how many units in the last place two right implementations may differ, times the root of the number of
    layers: each layer rounds once more, in an order of its own."""

    most: float  # of the largest logit
    mean: float  # of a logit's mean size
    hidden: float  # of the norm of a hidden state


HALF = Allowed(4.0, 1.5, 6.0)  # products are added up in float32 and rounded once
FULL = Allowed(40.0, 16.0, 100.0)  # products of a thousand numbers are added up in float32 itself, in any order


def allowed(dtype: torch.dtype) -> Allowed:
    return HALF if dtype.itemsize == 2 else FULL


@dataclass
class Text:
    """Tokens, and what transformers says after the last ones of them."""

    name: str
    ids: list[int]
    last: int  # positions that are compared
    keeps_hidden: bool
    logits: Tensor | None = None  # [last, V] float32
    hidden: list[Tensor] = field(default_factory=list)  # behind each layer, [S, dim]
    seconds: float = 0.0


def far_length(config: ModelConfig, ids: list[int], dtype: torch.dtype, device: torch.device, seconds: float) -> int:
    """Tokens of the text at the far end: all that the model can attend over, or as many as memory and patience allow.

    Args:
        seconds: that transformers took for the first text.
    """
    length, free = min(config.max_len, len(ids)), available(device)
    token = config.kv_elements_per_token * dtype.itemsize
    work = CHUNK * 8 * config.ffn_dim * dtype.itemsize + (TOKENS + LAST) * config.vocab_size * 8
    while length > 2 * TOKENS:
        # Its cache is copied with each chunk; attention makes the time grow faster than the length.
        fits = free is None or 2 * length * token + work <= free
        if fits and seconds * (length / TOKENS) ** 1.3 <= PATIENCE[device.type]:
            return length
        length //= 2
    return 0


@torch.inference_mode()
def of_transformers(folder: Path, texts: list[Text], ids: list[int], config: ModelConfig, dtype: torch.dtype,
                    device: torch.device, far: int | None) -> int:
    """Fills in what transformers says of the first text, then of the far end, which is added to the texts.

    Args:
        ids: of all that there is. far: tokens of the far end, 0 for none; None: as many as are affordable.

    Returns:
        the tokens of the far end.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    if device.type == "cuda":  # whose first call loads kernels, which no second text waits for
        model(torch.tensor([ids[:64]], device=device))
    _run(model, texts[0], device)
    if far is None:
        far = far_length(config, ids, dtype, device, texts[0].seconds)
    if far:
        texts.append(Text("far end", ids[:far], min(LAST, far), False))
        _run(model, texts[-1], device)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return far


def _run(model, text: Text, device: torch.device) -> None:
    begun, first, cache, logits = time.perf_counter(), len(text.ids) - text.last, None, []
    ids = torch.tensor([text.ids], device=device)
    with Watch(model.model.layers if text.keeps_hidden else []) as watch:
        for start in range(0, len(text.ids), CHUNK):
            part = ids[:, start : start + CHUNK]
            wanted = max(start + part.shape[1] - max(start, first), 0)
            out = model(part, past_key_values=cache, use_cache=True, logits_to_keep=max(wanted, 1))
            cache = out.past_key_values
            if wanted:
                logits.append(out.logits[0, -wanted:].float().cpu())
    text.logits, text.hidden, text.seconds = torch.cat(logits), watch.outputs(), time.perf_counter() - begun


class Watch:
    """Keeps on the CPU what layers give, whichever part of a text they are given at a time."""

    def __init__(self, layers):
        self.layers, self.parts = list(layers), [[] for _ in layers]

    def __enter__(self) -> "Watch":
        def keep(parts):
            return lambda module, args, out: parts.append((out if isinstance(out, Tensor) else out[0])[0].cpu().clone())

        self.hooks = [layer.register_forward_hook(keep(parts))
                      for layer, parts in zip(self.layers, self.parts, strict=True)]
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()

    def outputs(self) -> list[Tensor]:
        """Of each layer, [S, dim]."""
        return [torch.cat(parts) for parts in self.parts]


def compare(engine: Engine, text: Text) -> dict:
    """A record: the differences, what the dtype allows, and where the two part if they differ by more."""
    with Watch(engine.target.layers if text.keeps_hidden else []) as watch:
        logits = engine.logits([text.ids], last=text.last)[0].cpu()
    if not bool(logits.isfinite().all()):
        raise engine.explain_not_finite(text.ids)
    width = min(logits.shape[1], text.logits.shape[1])
    ours, theirs = logits[:, :width], text.logits[:, :width]
    most, total, size, largest, same = 0.0, 0.0, 0.0, 0.0, 0
    rows = []
    for a, b in zip(ours.split(256), theirs.split(256), strict=True):  # so that nothing of the whole size is made
        apart = (a - b).abs()
        rows.append(apart.amax(1))
        most, total = max(most, float(apart.max())), total + float(apart.sum(dtype=torch.float64))
        size, largest = size + float(b.abs().sum(dtype=torch.float64)), max(largest, float(b.abs().max()))
        same += int((a.argmax(1) == b.argmax(1)).sum())
    mean, size = total / ours.numel(), size / ours.numel()
    allows = allowed(engine.target.dtype)
    unit = torch.finfo(engine.target.dtype).eps * engine.target.config.n_layer**0.5
    told = {"name": f"logits, {text.name}", "tokens": len(text.ids), "positions": text.last,
            "dtype": str(engine.target.dtype).removeprefix("torch."), "max_difference": most, "mean_difference": mean,
            "max_allowed": allows.most * unit * largest, "mean_allowed": allows.mean * unit * size,
            "same_top": same / text.last, "seconds_of_transformers": text.seconds}
    told["passed"] = most <= told["max_allowed"] and mean <= told["mean_allowed"]
    if not told["passed"]:
        over = torch.cat(rows) > told["max_allowed"]
        position = len(text.ids) - text.last + int(over.float().argmax()) if bool(over.any()) else None
        layer = None
        if text.keeps_hidden:
            layer, first = parting(watch.outputs(), text.hidden, engine.target.dtype)
            position = position if first is None else first
        told |= {"layer": layer, "position": position, "advice": _advice(text, layer, position)}
    return told


def parting(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> tuple[int | None, int | None]:
    """(layer, position) where hidden states first differ by more than the dtype allows. None: nowhere."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = a.float(), b.float()
        apart = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-30)
        over = apart > allowed(dtype).hidden * torch.finfo(dtype).eps * (i + 1) ** 0.5
        if bool(over.any()):
            return i, int(over.float().argmax())
    return None, None


def _advice(text: Text, layer: int | None, position: int | None) -> str:
    if layer is not None:
        return (f"The hidden states part first behind layer {layer}, at position {position}: compare the tensors "
                f"model.layers.{layer}.* of the two folders, or download the checkpoint again.")
    if text.keeps_hidden:
        return ("The hidden states behind every layer agree, so the final norm or the output layer differs: compare "
                "model.norm and lm_head, and tie_word_embeddings of config.json.")
    return (f"The logits part at position {position}. If the first text agrees, positions are counted in another way: "
            "compare rope_theta and rope_scaling of config.json.")
