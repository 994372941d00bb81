"""Steps as CUDA graphs, and `torch.compile` of what lies between their kernels.

A step is one pass over all layers. A GPU records it as one CUDA graph, whose replay costs the host microseconds. The
functions between two fixed kernels may be compiled. The fixed kernels see the lengths that change, or read them on the
device: so nothing is compiled anew when the context grows.
"""

import functools
import gc
import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..errors import UserError

KEPT_GRAPHS = 32  # per step; one for each extent of a view, for each way to draft, and for other settings of the rows
SPARE = 3 * 2**28  # bytes of a GPU that recorded steps and libraries take besides all planned parts
# Fused kernels keep intermediate results in float32 unless told to round as the code does that is not compiled. Bits
# depend neither on what else is fused, nor on which of two kernels won a race: each kernel has one configuration.
# Products of few rows are not padded to eight: the kernel that pads costs more than is gained.
OPTIONS = {"emulate_precision_casts": True, "shape_padding": False, "deterministic": True,
           "triton.autotune_pointwise": False}
SHAPES = 256  # for which one function may be compiled, by all engines of a process
_recording = threading.Lock()  # whoever is done lets Python collect garbage again


def put(x: Tensor, index: Tensor, value: Tensor, batch_dim: int = 0, dim: int = 1) -> None:
    """Writes, for each row b of the batch, value[b, j] at place index[b, j] of dimension `dim` of x.

    In place even where it is compiled: of what `scatter_` writes to, the compiler copies the whole, twice.

    Args:
        index: [B, M]. value: [B, M, ...], the other dimensions of x in their order.
    """
    places: list[Tensor | None] = [None] * x.ndim
    places[batch_dim], places[dim] = torch.arange(len(index), device=index.device)[:, None], index
    torch.ops.aten.index_put_(x, places, value)


def staged(numbers: list, device: torch.device) -> Tensor:
    """Numbers of the host's, from where `copy_(..., non_blocking=True)` to a device waits for nothing."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda" and not is_compiling())


def unreserved(device: torch.device) -> int:
    """Bytes that the allocator may still take from a GPU, which is granted to this process in part or as a whole."""
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index  # "cuda" has none
    granted = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return min(free, granted - torch.cuda.memory_reserved(device))


def cache_folder() -> Path:
    """The folder that keeps compiled kernels: $TRIFORCE_CACHE, or `triforce` in the user's cache. It is made. Raises
    UserError if it cannot be, or if others may write to it: what it holds is run."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "triforce"
    path = Path(os.environ.get("TRIFORCE_CACHE") or usual).expanduser()
    remedy = "set TRIFORCE_CACHE to a folder of your own"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise UserError(f"cannot keep compiled kernels in {path}: {error.strerror}; {remedy}") from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"compiled kernels are run, and others may write to {path}; {remedy}, or: chmod go-w {path}")
    return path


class Compiler:
    """Says how the functions of a DecodeBatch's levels run: `compiler(function)`, and `compiler.step(function)`.

    All graphs of a DecodeBatch share one pool of memory, which ends with the last of them.

    Args:
        recorder: the stream on which steps are recorded as CUDA graphs. None: they are not.
        compiles: functions are compiled.
    """

    def __init__(self, device: torch.device, *, recorder: torch.cuda.Stream | None = None, compiles: bool = False):
        self.device, self.recorder, self.compiles = device, recorder, compiles
        self.pool = None if recorder is None else torch.cuda.graph_pool_handle()
        self.num_recorded = 0  # steps that ran as they are, were recorded, or were replayed for the first time
        self.seconds = 0.0  # that the host spent on those that ran or were recorded when they were called
        self.settings: Hashable = None  # by which steps that are not compiled differ from text to text

    def __call__(self, function: Callable) -> Callable:
        """The function, compiled where that is wanted."""
        return compiled(function) if self.compiles else function

    def step(self, function: Callable, num_lengths: int = 0, warm_up: int = 1) -> Callable:
        """The function as a graph, on a GPU; it must write its results into tensors that stay where they are.

        Args:
            num_lengths: how many of the first arguments are lengths of caches. They ascend: other kernels run only
                where two are equal, or the first is 0.
            warm_up: calls with the same arguments before a graph is recorded. More than 1 for
                what is made of steps that are graphs already, and may not be called again.
        """
        return function if self.recorder is None else Graphed(function, self, num_lengths, warm_up)


@functools.cache
def compiled(function: Callable) -> Callable:
    """The function, compiled for each set of shapes that it is called with, when it is first called with them."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder()))
    run = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
    limits = {"recompile_limit": SHAPES, "accumulated_recompile_limit": 4 * SHAPES}

    @functools.wraps(function)
    def call(*args):
        with torch._dynamo.config.patch(limits):
            return run(*args)

    return call


class Graphed:
    """Runs a function as it is the first times, then records a graph per set of arguments and replays it.

    What a function does must follow from its arguments, and from `Compiler.settings`: with those arguments that are no
    tensors, that is the graph's key. Within the recording of another graph it runs as it is, and becomes part of that.
    """

    def __init__(self, function: Callable, compiler: Compiler, num_lengths: int, warm_up: int):
        self.function, self.compiler, self.num_lengths, self.warm_up = function, compiler, num_lengths, warm_up
        self.graphs: OrderedDict[tuple, torch.cuda.CUDAGraph] = OrderedDict()
        self.calls: Counter[tuple] = Counter()

    def __call__(self, *args) -> None:
        if torch.cuda.is_current_stream_capturing():  # part of a longer graph
            self.function(*args)
            return
        key, kind = self._key(args)
        if key not in self.graphs:
            begun, runs = time.perf_counter(), self.calls[kind] < self.warm_up
            if runs:  # the device begins while the host still finds its kernels
                self.calls[kind] += 1
                self.function(*args)
            else:
                self.graphs[key] = recorded(self.function, args, self.compiler)
                if len(self.graphs) > KEPT_GRAPHS:
                    self.graphs.popitem(last=False)
            self.compiler.num_recorded += 1
            self.compiler.seconds += time.perf_counter() - begun
            if runs:
                return
        self.graphs.move_to_end(key)
        self.graphs[key].replay()

    def _key(self, args) -> tuple[tuple, tuple]:
        """What the graph of a call depends on, and what decides which kernels the call runs."""
        own = tuple((arg.data_ptr(), arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        # Of lengths, kernels depend on which of the stretches between them are empty.
        lengths = args[: self.num_lengths]
        empty = tuple(a < b for a, b in zip((0, *lengths), lengths, strict=False))
        settings = self.compiler.settings
        return (settings, *own), (settings, *empty, *own[self.num_lengths :])


def recorded(function: Callable, args, compiler: Compiler) -> torch.cuda.CUDAGraph:
    """A call of a function as a graph. Meanwhile Python collects no garbage: what an engine that is gone has left, its
    graphs above all, cannot be freed while another step is recorded."""
    # What a graph holds comes from a pool of its own, and while it is recorded the allocator gives back nothing that it
    # keeps for others, as after a prefill. torch.cuda.graph() would empty the allocator's cache each time.
    if unreserved(compiler.device) < SPARE:
        torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), compiler.recorder
    stream.wait_stream(torch.cuda.current_stream())
    with _recording, torch.cuda.stream(stream):
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=compiler.pool, capture_error_mode="thread_local")
            try:
                function(*args)
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
