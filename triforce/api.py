"""`triforce.generate`: everything in one call, for a notebook. The engine is kept for the next call.

`AsTransformers`: an engine for scripts that call a transformers model.
"""

import gc
from types import SimpleNamespace

from .config import Placement, Sampling, Settings, names_of, split
from .engine.engine import Engine, generate_options
from .engine.loading import load
from .errors import UserError
from .hf.fingerprint import files_of
from .hf.folders import resolve
from .runtime.host import ProcessLock

_kept: dict[str, Engine] = {}  # at most one engine, under the description of how it was loaded
_lock = ProcessLock()  # or else each of several threads would load one


def generate(prompt, checkpoint="tiny", **options):
    """Continues a prompt. Loads an engine, unless the last call's does.

    Args:
        prompt, checkpoint, options: those of `load`, `Engine.generate` and `Engine.stream`.

    Returns:
        a Generation, or a list of them for a list of prompts.

    Raises:
        UserError: see `load` and `Engine.generate`; unknown options are found before anything is loaded.
    """
    split(options, Sampling, Settings, Placement, what="option", known=generate_options() | {"group"})
    loading = {name: options.pop(name) for name in options.keys() & (names_of(Settings, Placement) | {"group"})}
    files = files_of(resolve(checkpoint).absolute())  # a training may write to them
    key = repr((str(checkpoint), files, sorted((name, str(value)) for name, value in loading.items())))
    with _lock:
        if key not in _kept:
            unload()
            _kept[key] = load(checkpoint, **loading)
        engine = _kept[key]
    return engine.generate(prompt, **options)


class AsTransformers:
    """An engine behind the `generate` of transformers, for scripts that evaluate (LongBench, HELMET)."""

    def __init__(self, engine: Engine):
        self.engine, self.device = engine, engine.device

    def generate(self, input_ids, attention_mask=None, max_new_tokens: int = 20, do_sample: bool = False,
                 eos_token_id: int | list[int] | None = None, pad_token_id: int | None = None, num_beams: int = 1,
                 return_dict_in_generate: bool = False, **options):
        """Prompts and answers, [B, S + n], a shorter answer filled up with pad_token_id; with return_dict_in_generate
        as the attribute `sequences`.

        Args:
            input_ids: [B, S]. attention_mask: [B, S], 0 where a prompt is filled up. None: nowhere.
            eos_token_id: ends an answer, beside the checkpoint's own ends.
            options: those of `Engine.generate`, of one answer a prompt. Without do_sample those of sampling say
                nothing. With it they are by default the checkpoint's, or else those of transformers.

        Raises:
            UserError: an option is unknown, or asks for more than one beam or answer; input_ids have another shape.
        """
        import torch

        unused = {"use_cache"} if do_sample else {"use_cache"} | names_of(Sampling)
        options = {name: value for name, value in options.items() if name not in unused and value is not None}
        if num_beams != 1 or "num_samples" in options:
            raise UserError(f"num_beams ({num_beams}) must be 1, without num_samples: a prompt gets one answer")
        input_ids = torch.as_tensor(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else torch.as_tensor(attention_mask)
        if input_ids.ndim != 2 or mask.shape != input_ids.shape:
            raise UserError(f"input_ids {list(input_ids.shape)} and attention_mask {list(mask.shape)} must be [B, S]")
        rows = [row[mine.bool()].tolist() for row, mine in zip(input_ids, mask, strict=True)]
        options = drawn_from(self.engine) | options if do_sample else {**options, "temperature": 0.0}
        results = self.engine.generate(rows, max_new_tokens, stop_token_ids=eos_token_id, **options)
        pad = next(one for one in (pad_token_id, *self.engine.eos_ids, 0) if one is not None)
        longest = max(len(one.tokens) for one in results)
        answers = torch.tensor([one.tokens + [pad] * (longest - len(one.tokens)) for one in results])
        found = torch.cat([input_ids, answers.to(input_ids)], 1)
        return SimpleNamespace(sequences=found) if return_dict_in_generate else found


def drawn_from(engine: Engine) -> dict[str, float]:
    """What transformers samples by, with do_sample: what the checkpoint says, or else its defaults."""
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 50} | engine.defaults
    return {**usual, "temperature": usual["temperature"] or 1.0}


def unload() -> None:
    """Frees the engine that `generate` keeps."""
    import torch

    _kept.clear()
    gc.collect()  # compiled steps make reference cycles
    torch.cuda.empty_cache()
