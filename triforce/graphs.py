"""The step as a CUDA graph, and the levels' way to their compiled pieces. Knows nothing of models or caches.

A step is one pass over all layers. Compiling it whole takes half a minute at 32 layers; instead its few different
pieces are compiled, once for all layers and beforehand (see `pieces.py`), and the sequence of them is recorded as one
CUDA graph, whose replay costs the host microseconds. Between the pieces stand calls of fixed kernels, which see the
lengths that change, or read them on the device: so nothing is compiled anew when the context grows.
"""

import contextlib
import contextvars
import gc
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial

import torch
from torch import Tensor

KEPT_GRAPHS = 32  # per step; one for each extent of a view, for each way to draft, and for other settings of the rows
KEPT_PARTS = 4  # calls of a step of which a part is recorded
# Bytes of a GPU that recorded steps and libraries take besides all planned parts: on an H200 0.2 to 0.8 GiB of one row
# or 8.
SPARE = 3 * 2**28
_recording = threading.Lock()


def put(x: Tensor, index: Tensor, value: Tensor, batch_dim: int = 0, dim: int = 1, rows: Tensor | None = None) -> None:
    """Writes, for each row b of the batch, value[b, j] at place index[b, j] of dimension `dim` of x.

    In place even where it is compiled: of what `scatter_` writes to, the compiler copies the whole, twice.

    Args:
        index: [B, M]. value: [B, M, ...], the other dimensions of x in their order.
        rows: the row of each place, [B, M] or [B, 1]. None: in their order.
    """
    if len(index) == 1 and rows is None and not is_traced():  # the same in half of the time
        x.index_copy_(dim, index[0], value.movedim((0, 1), (batch_dim, dim)))
        return
    places: list[Tensor | None] = [None] * x.ndim
    places[batch_dim] = torch.arange(len(index), device=index.device)[:, None] if rows is None else rows
    places[dim] = index
    torch.ops.aten.index_put_(x, places, value)


def take(x: Tensor, of: Tensor | None) -> Tensor:
    """Of x [B, ...] these rows of the batch, [n, ...]. of: [n]. None: all of them, which is x itself."""
    return x if of is None else x.index_select(0, of)


def give(x: Tensor, of: Tensor | None, value: Tensor) -> None:
    """The opposite of `take`: writes value [n, ...] to these rows of x [B, ...]."""
    if of is None:
        x.copy_(value)
    else:
        x.index_copy_(0, of, value.to(x.dtype))


def staged(numbers: list, device: torch.device) -> Tensor:
    """Numbers of the host's, from where `copy_(..., non_blocking=True)` to a device waits for nothing."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda" and not is_traced())


def unreserved(device: torch.device) -> int:
    """Bytes that the allocator may still take from a GPU, which is granted to this process in part or as a whole."""
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index  # "cuda" has none
    granted = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return min(free, granted - torch.cuda.memory_reserved(device))


def make_room(device: torch.device) -> None:
    """Before a recording. What a graph holds comes from a pool of its own, and while it is recorded the allocator gives
    back nothing that it keeps for others, as after a prefill."""
    if unreserved(device) < SPARE:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def garbage_waits():
    """Within, Python collects no garbage: what an engine that is gone has left, its graphs above all, cannot be freed
    while another step is recorded. One thread at a time: whoever is done lets Python collect again."""
    with _recording:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


_tracing = contextvars.ContextVar("tracing", default=False)


@contextlib.contextmanager
def traced():
    """Within, functions are traced for the compiler: see `is_traced`."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_traced() -> bool:
    """Whether operations are being noted down rather than done: no value of a tensor can be looked at."""
    return _tracing.get()


def finish(result):
    """What a function returned, or, if it pauses here and there, what it returns at its end."""
    while isinstance(result, Generator):
        try:
            next(result)
        except StopIteration as end:
            return end.value
    return result


class Compiler:
    """Makes the levels of a State, which say how their functions run.

    All graphs of a State share one pool of memory, which ends with the last of them.

    Args:
        recorder: the stream on which steps are recorded as CUDA graphs. None: they are not.
        pieces: compiled ones, see `pieces.Pieces`. None: every function runs as it is written.
        waited: seconds until these were compiled and loaded.
    """

    def __init__(self, device: torch.device, *, recorder: torch.cuda.Stream | None = None, pieces=None,
                 waited: float = 0.0):
        self.device, self.recorder, self.pieces, self.waited = device, recorder, pieces, waited
        self.pool = None if recorder is None else torch.cuda.graph_pool_handle()
        self.num_recorded = 0  # steps that ran as they are, were recorded, or were replayed for the first time
        self.seconds = 0.0  # that the host spent on those that ran or were recorded when they were called
        self.settings: Hashable = None  # by which written steps differ from text to text

    @contextlib.contextmanager
    def recording(self):
        """A call of a step that is no replay."""
        begun = time.perf_counter()
        yield
        self.num_recorded += 1
        self.seconds += time.perf_counter() - begun

    def begin(self) -> None:
        """A text begins, with the pieces that are loaded."""
        if self.pieces is not None:
            self.pieces.begin()

    @property
    def num_pieces(self) -> int:
        """Compiled ones, that the present text runs. Graphs of others are not its own."""
        return 0 if self.pieces is None else len(self.pieces.ready)

    @property
    def made_of(self) -> tuple[int, Hashable]:
        """What the present text's graphs are made of. Those of other texts are not its own where this differs."""
        return self.num_pieces, self.settings

    @property
    def is_complete(self) -> bool:
        """Whether the present text runs all pieces that can be compiled."""
        return self.num_pieces > 0 and self.pieces.complete

    def level(self, name: str) -> "Level":
        return Level(self, name)


class Level:
    """The functions of one level, whose shapes are all constant: `level(function)`, and `level.step(function)`."""

    def __init__(self, compiler: Compiler, name: str):
        self.compiler, self.name = compiler, name
        self._pieces: dict[Callable, Callable] = {}

    def __call__(self, function: Callable) -> Callable:
        """The function, compiled if that was done beforehand."""
        if self.compiler.pieces is None:
            return function
        if function not in self._pieces:
            self._pieces[function] = self.compiler.pieces.piece(self.name, function)
        return self._pieces[function]

    def step(self, function: Callable, num_lengths: int = 0, warm_up: int = 1) -> Callable:
        """The function as a graph, on a GPU; it must write its results into tensors that stay where they are.

        Args:
            num_lengths: so many of the first arguments are lengths of caches, in ascending order: other kernels run
                only where two are equal, or the first is 0.
            warm_up: calls with the same arguments before a graph is recorded, unless it is prepared. More than 1 for
                what is made of steps that are graphs already, and may not be called again.
        """
        if self.compiler.recorder is None:
            return function
        return Graphed(function, self.compiler, num_lengths, warm_up)


class Graphed:
    """Runs a function as it is the first times, then records a graph per set of arguments and replays it. `prepare`
    records it beforehand. A function that pauses may be recorded as several graphs, one after the other.

    What a function does must follow from its arguments, and from `Compiler.made_of`: with those arguments that are no
    tensors, that is the graph's key. Within the recording of another graph it runs as it is, and becomes part of that.
    """

    def __init__(self, function: Callable, compiler: Compiler, num_lengths: int, warm_up: int):
        self.function, self.compiler, self.num_lengths, self.warm_up = function, compiler, num_lengths, warm_up
        self.graphs: OrderedDict[tuple, list[torch.cuda.CUDAGraph]] = OrderedDict()
        self._begun: dict[tuple, Recording] = {}  # by key, what `prepare` has recorded a part of
        self.calls: Counter[tuple] = Counter()
        self._unplayed: set[tuple] = set()  # keys of graphs that were recorded ahead: the first replay takes longer

    def __call__(self, *args) -> None:
        if torch.cuda.is_current_stream_capturing():  # part of a longer graph
            finish(self.function(*args))
            return
        key, kind = self._key(args)
        if key not in self.graphs:
            with self.compiler.recording():
                if self.calls[kind] < self.warm_up:  # the device begins while the host still finds its kernels
                    self.calls[kind] += 1
                    finish(self.function(*args))
                    return
                self._record(key, args)
        elif key in self._unplayed:
            self._unplayed.discard(key)
            self.compiler.num_recorded += 1
        self.graphs.move_to_end(key)
        for graph in self.graphs[key]:
            graph.replay()

    def prepare(self, *args, until: float = math.inf) -> None:
        """Records a call, if it is new. The device goes on with what it has to do.

        Args:
            until: of a function that pauses, no more than what is recorded by then, by time.perf_counter(), and at
                least a part. The next call for the same goes on.
        """
        key, kind = self._key(args)
        if key not in self.graphs:
            if self._record(key, args, until):
                self.calls[kind] = self.warm_up
                self._unplayed.add(key)
            if until == math.inf:
                self.compiler.num_recorded += 1  # it may have taken longer than what the device does

    def has(self, *args) -> bool:
        """Whether such a call is recorded."""
        return self._key(args)[0] in self.graphs

    def _record(self, key: tuple, args, until: float = math.inf) -> bool:
        """Returns whether it is done."""
        recording = self._begun.pop(key, None) or Recording(self.function, args, self.compiler)
        if not recording.go_on(until):
            self._begun[key] = recording
            if len(self._begun) > KEPT_PARTS:
                del self._begun[next(iter(self._begun))]
            return False
        self.graphs[key] = recording.graphs
        if len(self.graphs) > KEPT_GRAPHS:
            oldest, _ = self.graphs.popitem(last=False)
            self._unplayed.discard(oldest)
        return True

    def _key(self, args) -> tuple[tuple, tuple]:
        """What the graph of a call depends on, and what decides which kernels the call runs."""
        own = tuple((arg.data_ptr(), arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        # Of lengths, kernels depend on which of the stretches between them are empty.
        lengths = args[: self.num_lengths]
        empty = tuple(a < b for a, b in zip((0, *lengths), lengths, strict=False))
        made_of = self.compiler.made_of
        return (made_of, *own), (made_of, *empty, *own[self.num_lengths :])


class Recording:
    """A call of a function, recorded as one graph after the other: as many as it takes."""

    def __init__(self, function: Callable, args, compiler: Compiler):
        self.function, self.args, self.compiler = function, args, compiler
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._rest: Generator | None = None  # of the function, if it has paused

    def go_on(self, until: float) -> bool:
        """Records another graph. Returns whether it is the last one."""
        with self._captured() as graph:
            is_done = self._run(until)
        self.graphs.append(graph)
        return is_done

    @contextlib.contextmanager
    def _captured(self):
        """Within, a graph is recorded."""
        make_room(self.compiler.device)  # torch.cuda.graph() would empty the allocator's cache each time
        graph, stream = torch.cuda.CUDAGraph(), self.compiler.recorder
        stream.wait_stream(torch.cuda.current_stream())
        with garbage_waits(), torch.cuda.stream(stream):
            graph.capture_begin(pool=self.compiler.pool, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def _run(self, until: float) -> bool:
        """The function up to its end, or to its first pause at that time or later."""
        if self._rest is None:
            result = self.function(*self.args)
            if not isinstance(result, Generator):
                return True
            self._rest = result
        for _ in self._rest:
            if time.perf_counter() >= until:
                return False
        return True


def preparations(step: Callable, *args) -> Iterator[Callable[[], None]]:
    """What records a call of a step beforehand: one function, or none where the step is no graph."""
    if isinstance(step, Graphed):
        yield partial(step.prepare, *args)
