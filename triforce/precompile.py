"""Compiles the pieces of a State for later processes, in a process of its own: `python -m triforce.precompile`.

The State is built once more of fake tensors, which have shapes and no memory, and all its steps are gone through. So no
weights are needed, and nobody waits: whoever started this runs the pieces as they are written, until it next begins
with another prompt, or until the next process, which finds them compiled.
"""

import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .drafting.protocol import Drafter
from .graphs import Compiler, traced
from .jobs import Job
from .kept import Folder
from .kv.prefix import PrefixStore
from .model import Block, ModelConfig, Transformer
from .narrowing import widths
from .parallel import ONE_SHOT_BYTES, Group
from .pieces import COMPLETE, FAILED, Path, layout, pack, piece_name, reachable, take_apart
from .plan import Plan
from .quantize import fp8_copy
from .state import State

log = logging.getLogger("triforce")
# Fused kernels keep intermediate results in float32 unless told to round as the written code does. Which ones are fused
# depends on what else is in a piece, and bits must not. Nor may they depend on which of two kernels won a race on one
# machine, or one rank; and a step that is recorded before it has run cannot hold such a race. So each kernel has one
# configuration. Products of few rows are not to be padded to eight: the kernel that pads costs more than is gained.
OPTIONS = {"emulate_precision_casts": True, "shape_padding": False, "deterministic": True,
           "triton.autotune_pointwise": False}


def work(job: Job, part: int = 0, parts: int = 1) -> list[str]:
    """Compiles what the folder lacks: every piece, or one of so many parts. Returns the names of what is new."""
    folder, new = Folder(job.about), []
    with folder.locked(part):  # another process may be at the same work
        pieces = collect(job)
        for name, piece in list(pieces.items())[part::parts]:
            if folder.read(name) is not None:
                continue
            try:
                compiled = piece.compile()
            except Exception as error:  # whatever the compiler meets: the piece runs as it is written
                reason = next(iter(str(error).splitlines()), "")
                log.warning("%s runs as it is written, since it does not compile: %s: %s", name, type(error).__name__,
                            reason)
                compiled, name = f"{type(error).__name__}: {error}".encode(), name + FAILED
            if not folder.write(name, compiled):
                return new
            new.append(name)
    if all(folder.read(name) is not None or folder.read(name + FAILED) is not None for name in pieces):
        folder.write(COMPLETE, b"")
    return new


def collect(job: Job) -> "dict[str, Traced | Untraced]":
    """Traces the pieces of all steps, by the names of their files."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tracer = Tracer(mode)
    group = _fake_group(job, mode) if job.size > 1 else None
    with mode, torch.no_grad(), traced():
        target = _model(job.target, job, group)
        draft = None if job.draft is None else _model(job.draft, job, None)
        drafting = fp8_copy(target) if job.fp8 else None
        for model in (target, draft, drafting):
            _shorten(model)
        settings = job.settings if job.custom_laws is None else replace(job.settings, draft=lambda _: Unknown(job))
        shared = None
        if job.base:
            shared = PrefixStore.blank(job.target, job.base, job.device, job.dtype, settings.scored_chunk_size)
        state = State(target, draft, settings, shared=shared, compiler=Compiler(job.device, pieces=tracer),
                      drafting=drafting, draft_ranks=job.draft_ranks, **job.sizes)
        if job.streams and not job.base:  # its own layers, from host memory, which is not there: see `PrefixStore`
            state.cache.prefix.length_on_device = False
        for lengths in _lengths(state):
            _go_through(state, lengths, narrows=state.narrower is not None and not job.streams)
    # A draft that several ranks share has a group of its own, which is not known here.
    return {name: piece for name, piece in tracer.found.items() if not (job.shared_draft and name.startswith("draft"))}


def _model(config: ModelConfig, job: Job, group: Group | None) -> Transformer:
    model = Transformer.empty(config, job.device, job.dtype)
    return model if group is None else model.join(group)


def _shorten(model: Transformer | None) -> None:
    """Of the layers that are compiled as one, two stay: the others would give nothing new."""
    if model is not None:
        few: list[Block] = []
        for layer in model.layers:
            if sum(layer.kind == other.kind for other in few) < 2:
                few.append(layer)
        model.layers = nn.ModuleList(few)


def _fake_group(job: Job, mode: FakeTensorMode) -> Group:
    """Ranks that are not there. What is compiled for them names their group as the real ones do."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=job.rank, world_size=job.size, store=FakeStore())
    assert dist.group.WORLD.group_name == job.group_name
    buffer = None
    if job.one_shot:
        with mode:
            buffer = torch.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=job.device)
    return Group(job.rank, job.size, job.group_name, buffer)


def _lengths(state: State) -> Iterator[list[int]]:
    """Lengths of the rows' prefixes that differ in which parts attention is made of."""
    interval, rows, base = state.settings.flush_interval, state.batch, state.base
    long = base + ((state.capacity - base) // interval - 1) // 2 * interval
    yield [base] * rows
    if long > base:
        yield [long] * rows
        if rows > 1:
            yield [long - interval, *[long] * (rows - 1)]


def _go_through(state: State, lengths: list[int], narrows: bool) -> None:
    """Every step that a plan can take. narrows: those that do less work once rows have ended, too."""
    hierarchy = state.hierarchy
    for row, length in enumerate(lengths):
        state.cache.prefix.truncate(row, length)
        if hierarchy.view is not None:
            hierarchy.view.fit(row)
    outer, inner, here = hierarchy.outer, hierarchy.inner, state.tape.buffer()
    ends_of = [[state.capacity] * state.batch]
    if state.batch > 1 or state.base:  # a prefix that no row will add to has no masked part
        ends_of.append(lengths)
    for ends in ends_of:
        hierarchy.open(ends)
        hierarchy.open_sources(ends)
        fewer = widths(1, state.batch) if narrows and not state.settings.coupled else []
        for width in [*fewer, state.batch]:
            outer.compute_for(None if width == state.batch else list(range(width)), width)
            for rows in {1, outer.rows}:
                outer.rehearse(here, rows)
        if narrows:
            state.narrower.begin(promises_bits=True)
            if outer.num_attending is not None:
                outer.rehearse(here, outer.rows)
        for name, source in hierarchy.sources.items():
            for level in hierarchy.levels:
                if level.rows > 1 and name != "custom":
                    source.propose(here, Plan(min(2, level.rows - 1), name), level.draft_probs)
    if inner is not None:
        inner.rehearse(here, inner.rows, outer.draft_probs)
        if outer.tree.size:
            inner.rehearse_growth()


class Unknown(Drafter):
    """In the place of a user's drafter: what a level needs to know of it."""

    def __init__(self, job: Job):
        self.emits_laws = job.custom_laws


class Tracer:
    """In the place of `Pieces`: traces each piece as it is called with something new. A call like one before gives
    tensors like those, and of its own: tracing finds tensors by identity."""

    complete = False

    def __init__(self, mode: FakeTensorMode):
        self.mode = mode
        self.found: dict[str, Traced | Untraced] = {}
        self._results: dict[str, object] = {}

    def piece(self, level: str, function: Callable) -> Callable:
        def call(*args):
            name = piece_name(level, function, args)
            if name not in self.found:
                try:
                    self.found[name] = trace(function, args, self.mode)
                except Exception as error:  # as where a piece does not compile: the others are none the worse
                    self.found[name] = Untraced(error)
                self._results[name] = function(*args)
            return tree_map_only(Tensor, _like, self._results[name])

        return call


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


class Seen(TorchDispatchMode):
    """Notes which tensors are read or written, by identity."""

    def __init__(self):
        super().__init__()
        self.ids: dict[int, None] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ids.update((id(x), None) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return function(*args, **(kwargs or {}))


@dataclass
class Traced:
    """A piece as a graph of operations."""

    graph: torch.fx.GraphModule
    tensors: list[Tensor]
    paths: list[Path]
    result: object
    mode: FakeTensorMode

    def compile(self) -> bytes:
        """What `Pieces` loads."""
        context = torch._guards.TracingContext(self.mode)
        with torch._guards.tracing(context), torch.no_grad():
            artifact = torch._inductor.standalone_compile(
                self.graph, self.tensors, dynamic_shapes="from_tracing_context", options={"config_patches": OPTIONS})
        with tempfile.TemporaryDirectory() as folder:
            artifact.save(path=f"{folder}/artifact", format="binary")
            with open(f"{folder}/artifact", "rb") as file:
                return pack(self.paths, [layout(x) for x in self.tensors], self.result, file.read())


@dataclass
class Untraced:
    """A piece that has no graph: it is run as it is written."""

    error: Exception

    def compile(self) -> bytes:
        raise self.error


def trace(function: Callable, args, mode: FakeTensorMode) -> Traced:
    """The operations of a call, on the tensors that it reaches from its arguments."""
    known = reachable(args)
    with Seen() as seen:
        function(*args)
    tensors, paths = zip(*(known[i] for i in seen.ids if i in known), strict=True)
    results: list[Tensor] = []
    shapes = []

    def flat(*_):
        results.clear()
        shapes[:] = [take_apart(function(*args), results)]
        return tuple(results)

    graph = make_fx(flat, tracing_mode="real")(*tensors)
    constants = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    assert not constants, f"{function.__qualname__} reads tensors that its arguments do not lead to: {constants}"
    return Traced(graph, list(tensors), [list(path) for path in paths], shapes[0], mode)


if __name__ == "__main__":
    os.nice(10)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        work(pickle.load(sys.stdin.buffer), *map(int, sys.argv[1:]))
    except OSError as error:
        sys.exit(f"cannot keep compiled steps in {error.filename}: {error.strerror}; set TRIFORCE_CACHE to a folder "
                 "that can be written")
