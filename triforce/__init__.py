"""triforce: several times faster generation from a long context, without changing what the model says.

    import triforce
    out = triforce.generate("...", checkpoint="tiny")
    print(out.text, out.stats)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import generate, unload
    from .chat import Chat
    from .engine import Engine, Stream
    from .errors import UserError
    from .generation import Generation, Stats
    from .loading import load
    from .prefix import Prefix

__all__ = ["Chat", "Engine", "Generation", "Prefix", "Stats", "Stream", "UserError", "generate", "load", "unload"]
__version__ = "0.2.0"

_MODULES = {"generate": "api", "unload": "api", "Engine": "engine", "Stream": "engine", "UserError": "errors",
            "Chat": "chat", "Prefix": "prefix",
            "Generation": "generation", "Stats": "generation", "load": "loading"}


def __getattr__(name: str):
    """PyTorch takes seconds to import: it is imported with the first name that needs it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _MODULES.keys())
