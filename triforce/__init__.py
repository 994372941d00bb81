"""triforce: faster generation from a long context, without changing what the model says.

    import triforce
    out = triforce.generate("...", checkpoint="tiny")
    print(out.text, out.stats)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import AsTransformers, generate, unload
    from .decode.drafters.base import Drafter
    from .engine.conversation import Chat
    from .engine.engine import Engine
    from .engine.loading import load
    from .engine.output import Generation, Stats
    from .engine.prompt_cache import Prefix
    from .engine.session import Stream
    from .errors import UserError

_MODULES = {"generate": "api", "unload": "api", "AsTransformers": "api", "Engine": "engine.engine",
            "Stream": "engine.session", "UserError": "errors", "Chat": "engine.conversation",
            "Prefix": "engine.prompt_cache", "Generation": "engine.output", "Stats": "engine.output",
            "load": "engine.loading", "Drafter": "decode.drafters.base"}
__all__ = ["AsTransformers", "Chat", "Drafter", "Engine", "Generation", "Prefix", "Stats", "Stream", "UserError",
           "generate", "load", "unload"]
__version__ = "0.2.0"


def __getattr__(name: str):
    """PyTorch takes seconds to import: it is imported with the first name that needs it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES.keys())
