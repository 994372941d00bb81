"""Compiled pieces of a step, made once for a machine and kept in a folder.

A piece is a function of a step between two calls of fixed kernels: half a layer, the sampling at its end. The module
`precompile` traces pieces without weights and compiles them in a process of its own; here they are found and run. A
piece that is not there runs as it is written: that is slower, and otherwise the same but for rounding.

What a piece reads need not be among its arguments: weights and buffers are found through the objects that are. A traced
piece names each tensor by its path from the arguments, so that the same code finds the tensors of another layer, or of
another process. All else that it depends on (numbers, settings) is in the folder's description, or among the arguments.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable

from torch import Tensor, dtype, nn

from .kept import Folder
from .model import Block
from .streams import use_device

log = logging.getLogger("triforce")
COMPILER = "torch._inductor.compile_fx"
_importing = threading.Lock()
ENDING = ".piece"
COMPLETE = "complete"  # its presence says that all pieces of the folder have been tried
FAILED = ".failed"  # ends the name of a file that says why a piece could not be compiled
Path = tuple  # steps from a list of arguments to a tensor: a str is an attribute, an int an index, [name] a key


def signature(args) -> str:
    """Shapes, strides and dtypes of the tensors among the arguments, and the values of all plain ones."""
    return json.dumps([_describe(arg) for arg in args])


def _describe(arg):
    if isinstance(arg, Tensor):
        return layout(arg)
    if isinstance(arg, (list, tuple)):
        return [_describe(one) for one in arg]
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    if isinstance(arg, dtype):
        return str(arg)
    return arg.kind if isinstance(arg, Block) else type(arg).__name__


def layout(x: Tensor) -> list:
    strides = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return [list(x.shape), strides, str(x.dtype), x.device.type]


def piece_name(level: str, function: Callable, args) -> str:
    """The file of a piece of a level, called with these arguments."""
    digest = hashlib.sha256(signature(args).encode()).hexdigest()[:16]
    return f"{level}.{function.__qualname__}.{digest}{ENDING}"


def find(args, path: Path) -> Tensor:
    """The tensor at a path."""
    here = args
    for step in path:
        here = getattr(here, step) if isinstance(step, str) else here[step] if isinstance(step, int) else here[step[0]]
    return here


def reachable(args) -> dict[int, tuple[Tensor, Path]]:
    """All tensors that can be reached from the arguments, by identity, each with the shortest path to it."""
    found: dict[int, tuple[Tensor, Path]] = {}
    seen, queue = set(), [(args, ())]
    while queue:
        later = []
        for here, path in queue:
            if id(here) in seen:
                continue
            seen.add(id(here))
            if isinstance(here, Tensor):
                found[id(here)] = here, path
            else:
                later += [(child, (*path, step)) for step, child in _children(here)]
        queue = later
    return found


def _children(here) -> list[tuple]:
    if isinstance(here, (list, tuple)):
        return list(enumerate(here))
    if isinstance(here, dict):
        return [([name], value) for name, value in here.items()]
    children = []
    if isinstance(here, nn.Module):
        parts = (here._parameters, here._buffers, here._modules)
        children = [(name, value) for part in parts for name, value in part.items()]
    if isinstance(here, nn.Module) or type(here).__module__.startswith(__package__ + "."):
        children += [(name, value) for name, value in getattr(here, "__dict__", {}).items()
                     if name not in ("_parameters", "_buffers", "_modules")]
    return children


def take_apart(result, tensors: list[Tensor]):
    """What a piece returns, with each tensor replaced by its number in `tensors`, to which it is added."""
    if isinstance(result, Tensor):
        tensors.append(result)
        return len(tensors) - 1
    if isinstance(result, (list, tuple)):
        return [type(result).__name__, *(take_apart(one, tensors) for one in result)]
    assert result is None, result
    return None


def put_together(shape, tensors: list[Tensor]):
    """The opposite of `take_apart`."""
    if not isinstance(shape, list):
        return shape if shape is None else tensors[shape]
    parts = [put_together(one, tensors) for one in shape[1:]]
    return parts if shape[0] == "list" else tuple(parts)


def pack(paths: list[Path], layouts: list, result, artifact: bytes) -> bytes:
    """A piece as it is kept: a line of JSON, then PyTorch's compiled artifact."""
    return json.dumps({"paths": paths, "layouts": layouts, "result": result}).encode() + b"\n" + artifact


def import_compiler() -> None:
    """Imports the compiler: that takes seconds, in which whoever computes shares Python's lock with it."""
    with _importing:  # or the second of two would take the first one's interval for the usual one
        if COMPILER in sys.modules:
            return
        usual = sys.getswitchinterval()
        # Or else each operation of the prefill might wait 5 ms for Python's lock.
        sys.setswitchinterval(2e-4)
        try:
            importlib.import_module(COMPILER)
        except Exception as error:  # as where the process ends meanwhile; who needs it meets the error once more
            log.debug("%s was not imported: %s", COMPILER, error)
        finally:
            sys.setswitchinterval(usual)


class Loaded:
    """A compiled piece, ready to run."""

    def __init__(self, data: bytes):
        import torch._inductor as inductor  # takes seconds

        head, _, artifact = data.partition(b"\n")
        about = json.loads(head)
        self.paths = [tuple(path) for path in about["paths"]]
        self.layouts, self.result = about["layouts"], about["result"]
        handle, path = tempfile.mkstemp(suffix=".artifact")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(artifact)
            self.run = inductor.CompiledArtifact.load(path=path, format="binary")
        finally:
            os.unlink(path)

    def __call__(self, args):
        tensors = [find(args, path) for path in self.paths]
        for tensor, expected, path in zip(tensors, self.layouts, self.paths, strict=True):
            assert layout(tensor) == expected, f"{path} is {layout(tensor)}, and was compiled as {expected}"
        return put_together(self.result, self.run(*tensors))


class Pieces:
    """The pieces of a folder, once all are compiled and loaded. A text runs them if they were loaded when it began, so
    its bits do not change midway. A thread loads them. That takes seconds, and the thread shares Python's lock with
    the computation: `load` says when it may go on, and `pause` stops it before the next piece, but not in the import of
    the compiler. The thread ends with its Pieces.

    Args:
        common: given names that this rank found, says which of them all ranks found: they must compute alike.
        device: that the pieces run on.
        wait: texts wait until all are loaded.
    """

    def __init__(self, folder: Folder, common: Callable[[set[str]], set[str]] = lambda names: names, device=None,
                 wait: bool = False):
        self.folder, self.device, self._common, self._wait = folder, device, common, wait
        self.ready: dict[str, Loaded] = {}  # for the present text
        self.missing: set[str] = set()  # that were asked for and ran as they are written
        self._found: dict[str, bytes] = {}
        self._loaded: dict[str, Loaded] = {}
        self._loader: threading.Thread | None = None
        self._begins = math.inf  # by time.monotonic(), when the thread may go on
        self.complete = False

    def look(self) -> None:
        """Finds what is there, if all is whole. What is damaged has to be made anew."""
        marked = self.folder.read(COMPLETE) is not None
        found = {name: self.folder.read(name) for name in self.folder.names(ENDING)} if marked else {}
        whole = marked and None not in found.values()
        self.complete = bool(self._common({COMPLETE} if whole else set()))
        names = self._common(set(found)) if self.complete else set()
        self._found = {name: found[name] for name in sorted(names)}

    def load(self, delay: float = 0.0) -> None:
        """Begins to load what is there, in a thread, or goes on with it.

        Args:
            delay: seconds until then.
        """
        self._begins = time.monotonic() + (0.0 if self._wait else delay)
        if self.complete and self._loader is None:
            self._loader = threading.Thread(target=_load, args=(weakref.ref(self),), name="pieces")
            self._loader.start()

    def pause(self) -> None:
        """Loads no further piece until `load` is called again, unless texts wait for them."""
        if not self._wait:
            self._begins = math.inf

    def load_next(self) -> bool:
        """Loads another piece. False: that was all."""
        if not self._found:
            return False
        name, data = self._found.popitem()
        try:
            self._loaded[name] = Loaded(data)
        except Exception as error:  # whatever the compiler's own format meets: it runs as it is written
            log.warning("%s could not be loaded, and runs uncompiled: %s: %s", name, type(error).__name__, error)
        return True

    def may_go_on(self) -> bool:
        return time.monotonic() >= self._begins

    def begin(self) -> None:
        """A text begins."""
        if self._wait and self._loader is not None:
            self._loader.join()
        there = self._loader is not None and not self._loader.is_alive()
        if self._common({"there"} if there else set()):
            self.ready = {name: self._loaded[name] for name in self._common(set(self._loaded))}

    def piece(self, level: str, function: Callable) -> Callable:
        """The function, compiled where it was kept for what it is called with."""

        def call(*args):
            loaded = self._find(piece_name(level, function, args))
            return function(*args) if loaded is None else loaded(args)

        return call

    def _find(self, name: str) -> Loaded | None:
        if name not in self.ready:
            self.missing.add(name)
        return self.ready.get(name)


def _load(pieces: "weakref.ref[Pieces]") -> None:
    """What the thread does."""
    if (owner := _wait(pieces)) is None:
        return
    use_device(owner.device)
    del owner
    import_compiler()
    while (owner := _wait(pieces)) is not None and owner.load_next():
        del owner


def _wait(pieces: "weakref.ref[Pieces]") -> Pieces | None:
    """Until it is time to go on. None: they are gone, or the process ends, and waits for this thread."""
    while threading.main_thread().is_alive() and (owner := pieces()) is not None:
        if owner.may_go_on():
            return owner
        del owner
        time.sleep(0.05)
    return None
