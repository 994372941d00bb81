"""`triforce.generate`: everything in one call, for a notebook. The engine is kept for the next call."""

import gc
import inspect

from .engine import Engine
from .loading import load
from .state import Settings

_LOAD_ARGUMENTS = frozenset(inspect.signature(load).parameters) | Settings.__dataclass_fields__.keys()
_kept: dict[str, Engine] = {}  # at most one engine, under the description of how it was loaded


def generate(prompt, checkpoint="tiny", **options):
    """Loads what is needed and continues the prompt.

    Args:
        prompt, and every option of `Engine.generate` and `Engine.stream`; those that `load` knows go there.

    Returns:
        a Generation, or a list of them for a list of prompts.
    """
    loading = {name: options.pop(name) for name in list(options) if name in _LOAD_ARGUMENTS}
    key = repr((str(checkpoint), sorted((name, str(value)) for name, value in loading.items())))
    if key not in _kept:
        unload()
        _kept[key] = load(checkpoint, **loading)
    return _kept[key].generate(prompt, **options)


def unload() -> None:
    """Frees the engine that `generate` keeps."""
    import torch

    _kept.clear()
    gc.collect()  # compiled steps make reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
