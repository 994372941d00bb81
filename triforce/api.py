"""`triforce.generate`: everything in one call, for a notebook. The engine is kept for the next call.

`AsTransformers`: an engine for scripts that call a transformers model.
"""

import gc
from types import SimpleNamespace

from .config import Placement, Sampling, Settings, names_of, split
from .engine.engine import Engine, generate_options
from .engine.loading import load
from .errors import UserError
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
    key = repr((str(checkpoint), sorted((name, str(value)) for name, value in loading.items())))
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
            options: those of `Engine.generate`. Without do_sample those of sampling say nothing.

        Raises:
            UserError: an option is unknown, or asks for more than one beam.
        """
        import torch

        unused = {"use_cache"} if do_sample else {"use_cache"} | names_of(Sampling)
        options = {name: value for name, value in options.items() if name not in unused and value is not None}
        if num_beams != 1:
            raise UserError(f"num_beams ({num_beams}) must be 1: one text is drawn for each prompt")
        rows = [row.tolist() if mask is None else row[mask.bool()].tolist() for row, mask in zip(
            input_ids, [None] * len(input_ids) if attention_mask is None else attention_mask, strict=True)]
        results = self.engine.generate(rows, max_new_tokens, stop_token_ids=eos_token_id,
                                       **options if do_sample else {**options, "temperature": 0.0})
        pad = next(one for one in (pad_token_id, *self.engine.eos_ids, 0) if one is not None)
        longest = max(len(one.tokens) for one in results)
        answers = torch.tensor([one.tokens + [pad] * (longest - len(one.tokens)) for one in results])
        found = torch.cat([input_ids, answers.to(input_ids)], 1)
        return SimpleNamespace(sequences=found) if return_dict_in_generate else found


def unload() -> None:
    """Frees the engine that `generate` keeps."""
    import torch

    _kept.clear()
    gc.collect()  # compiled steps make reference cycles
    torch.cuda.empty_cache()
