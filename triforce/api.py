"""`triforce.generate`: everything in one call, for a notebook. The engine is kept for the next call."""

import gc
import inspect

from .engine import Engine
from .errors import UserError, not_known
from .generation import check_max_new_tokens, stop_strings
from .loading import load, setting_names
from .sampling import check_sampling

_kept: dict[str, Engine] = {}  # at most one engine, under the description of how it was loaded


def generate(prompt, checkpoint="tiny", **options):
    """Loads what is needed and continues the prompt.

    Args:
        prompt, and every option of `Engine.generate` and `Engine.stream`; those that `load` knows go there.

    Returns:
        a Generation, or a list of them for a list of prompts.

    Raises:
        UserError: an option is unknown or out of range, before anything is loaded; or see `load` and `Engine.generate`.
    """
    loading = {name: options.pop(name) for name in list(options) if name in setting_names()}
    check_options(options)
    key = repr((str(checkpoint), sorted((name, str(value)) for name, value in loading.items())))
    if key not in _kept:
        unload()
        _kept[key] = load(checkpoint, **loading)
    return _kept[key].generate(prompt, **options)


def check_options(options: dict) -> None:
    """What can be said of the options of a generation without a model."""
    known = (inspect.signature(Engine.generate).parameters.keys() | inspect.signature(Engine.stream).parameters.keys()
             | inspect.signature(Engine._serve).parameters.keys()) - {"self", "prompt", "prompts", "options", "unknown"}
    for name in options:
        if name not in known:
            raise UserError(not_known(name, "option", known | setting_names()))
    check_max_new_tokens(options.get("max_new_tokens", 1))
    stop_strings(options.get("stop"))
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if name in options and isinstance(options[name], (int, float)):  # of one a prompt, the engine sees to it
            check_sampling({name: options[name]}, 1)


def unload() -> None:
    """Frees the engine that `generate` keeps."""
    import torch

    _kept.clear()
    gc.collect()  # compiled steps make reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
