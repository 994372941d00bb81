"""triforce: several times faster generation from a long context, without changing what the model says.

    import triforce
    out = triforce.generate("...", checkpoint="tiny")
    print(out.text, out.stats)
"""

from .api import generate, unload
from .engine import Engine, Stream
from .errors import UserError
from .generation import Generation, Stats
from .loading import load

__all__ = ["Engine", "Generation", "Stats", "Stream", "UserError", "generate", "load", "unload"]
__version__ = "0.1.0"
