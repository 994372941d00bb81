"""Compiled pieces of a step, and the step as a CUDA graph. Knows nothing of models or caches.

A step is one pass over all layers. Compiling it whole takes half a minute at 32 layers; here only its few different
pieces are compiled (a layer's two halves, once for all layers) and the sequence of them is recorded as one CUDA graph,
whose replay costs the host microseconds. Between the pieces stand calls of fixed kernels, which see the lengths that
change, or read them on the device: so nothing is compiled anew when the context grows.
"""

import contextlib
import gc
import importlib
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor

KEPT_GRAPHS = 32  # per step; one for each extent of a view, and for each way to draft


@contextlib.contextmanager
def compiler_imported(wanted: bool):
    """Imports the compiler, which takes seconds, beside what is done within: weights are read, mostly."""
    thread = threading.Thread(target=importlib.import_module, args=("torch._inductor.compile_fx",))
    if wanted:
        thread.start()
    try:
        yield
    finally:
        if wanted:
            thread.join()  # an import that outlives its process ends in a traceback


def put(x: Tensor, index: Tensor, value: Tensor, batch_dim: int = 0, dim: int = 1) -> None:
    """Writes, for each row b of the batch, value[b, j] at place index[b, j] of dimension `dim` of x.

    In place even where it is compiled: of what `scatter_` writes to, the compiler copies the whole, twice.

    Args:
        index: [B, M]. value: [B, M, ...], the other dimensions of x in their order.
    """
    places: list[Tensor | None] = [None] * x.ndim
    places[batch_dim], places[dim] = torch.arange(len(index), device=index.device)[:, None], index
    torch.ops.aten.index_put_(x, places, value)


class Compiler:
    """Makes the levels' compilers: real ones, or, if not enabled, ones that leave every function as it is.

    One for each State: all graphs share one pool of memory, which ends with the last of them.
    """

    def __init__(self, enabled: bool, device: torch.device):
        self.enabled, self.record = enabled, enabled and device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.record else None

    def level(self, name: str) -> "Level":
        return Level(self, name)


class Level:
    """Compiles for one level, whose shapes are all constant: `level(function)`, and `level.step(function)`."""

    # Fused kernels keep intermediate results in float32 unless told to round as the written code does. Which ones are
    # fused depends on what else is in a graph, and bits must not. And products of few rows are not to be padded to
    # eight, which the compiler would decide by timing them alone: the kernel that pads costs more than is gained.
    OPTIONS = {"emulate_precision_casts": True, "shape_padding": False}

    def __init__(self, compiler: Compiler, name: str):
        self.compiler, self.name = compiler, name
        self._compiled: dict[Callable, Callable] = {}

    def __call__(self, function: Callable) -> Callable:
        """The function, compiled; each function once."""
        if not self.compiler.enabled:
            return function
        if function not in self._compiled:
            # torch.compile remembers by code object which sizes vary. Other levels run the same code with other
            # sizes: a copy under a name of its own keeps them constant.
            code = function.__code__.replace(co_name=f"{function.__name__}_{self.name}")
            copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__,
                                      function.__closure__)
            self._compiled[function] = torch.compile(copy, fullgraph=True, dynamic=False, options=self.OPTIONS)
        return self._compiled[function]

    def step(self, function: Callable, num_lengths: int = 0, warm_up: int = 1) -> Callable:
        """The function as a graph, on a GPU; it must write its results into tensors that stay where they are.

        Args:
            num_lengths: so many of the first arguments are lengths of caches, in ascending order: other kernels run
                only where two are equal, or the first is 0.
            warm_up: calls with the same arguments before a graph is recorded. More than 1 for what is made of steps
                that are graphs already, and may not be called again.
        """
        return Graphed(function, self.compiler.pool, num_lengths, warm_up) if self.compiler.record else function


class Graphed:
    """Runs a function as it is the first times, then records a graph per set of arguments and replays it.

    What a function does must follow from its arguments: those that are no tensors are part of the graph's key. Within
    the recording of another graph it runs as it is, and becomes part of that.
    """

    def __init__(self, function: Callable, pool, num_lengths: int, warm_up: int):
        self.function, self.pool, self.num_lengths, self.warm_up = function, pool, num_lengths, warm_up
        self.graphs: OrderedDict[tuple, torch.cuda.CUDAGraph] = OrderedDict()
        self.calls: Counter[tuple] = Counter()

    def __call__(self, *args) -> None:
        if torch.cuda.is_current_stream_capturing():  # part of a longer graph
            self.function(*args)
            return
        key, kind = self._key(args)
        if self.calls[kind] < self.warm_up:  # compiles, loads kernels, sizes workspaces: none of it can be recorded
            self.calls[kind] += 1
            self.function(*args)
            return
        if key not in self.graphs:
            self._keep(key, args)
        self.graphs.move_to_end(key)
        self.graphs[key].replay()

    def prepare(self, *args) -> None:
        """Records a call, if it is warmed up and new. The device goes on with what it has to do."""
        key, kind = self._key(args)
        if key not in self.graphs and self.calls[kind] >= self.warm_up:
            self._keep(key, args)

    def _keep(self, key: tuple, args) -> None:
        self.graphs[key] = self._record(args)
        if len(self.graphs) > KEPT_GRAPHS:
            self.graphs.popitem(last=False)

    def _key(self, args) -> tuple[tuple, tuple]:
        """What the graph of a call depends on, and what decides which kernels the call runs."""
        key = tuple((arg.data_ptr(), arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        # Of lengths, kernels depend on which of the stretches between them are empty.
        lengths = args[: self.num_lengths]
        kind = tuple(a < b for a, b in zip((0, *lengths), lengths, strict=False)) + key[self.num_lengths :]
        return key, kind

    def _record(self, args) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph() would empty the allocator's cache and collect garbage each time. Here garbage waits: what
        # an engine that is gone has left, its graphs above all, cannot be freed while this one records.
        graph, stream, collects = torch.cuda.CUDAGraph(), torch.cuda.Stream(), gc.isenabled()
        stream.wait_stream(torch.cuda.current_stream())
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    self.function(*args)
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        return graph
