"""`triforce.generate`: everything in one call, for a notebook. The engine is kept for the next call."""

import gc

from .config import Placement, Sampling, Settings, names_of, split
from .engine.engine import Engine, generate_options
from .engine.loading import load
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
    names = names_of(Settings, Placement) | {"group"}
    loading = {name: options.pop(name) for name in names & options.keys()}
    key = repr((str(checkpoint), sorted((name, str(value)) for name, value in loading.items())))
    with _lock:
        if key not in _kept:
            unload()
            _kept[key] = load(checkpoint, **loading)
        engine = _kept[key]
    return engine.generate(prompt, **options)


def unload() -> None:
    """Frees the engine that `generate` keeps."""
    import torch

    _kept.clear()
    gc.collect()  # compiled steps make reference cycles
    torch.cuda.empty_cache()
