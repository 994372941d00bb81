"""Pieces are traced without weights, compiled in another process, found again, and compute the same."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace

import pytest
import torch
from conftest import in_fp8, make_engine, random_pair, random_prompt, slow
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from triforce import answers, attention, caches, cli, float8, graphs, jobs, narrowing, nucleus, precompile
from triforce import pieces as pieces_module
from triforce.costs import prefill_seconds
from triforce.drafting.protocol import Drafter
from triforce.graphs import Compiler, traced
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer
from triforce.kept import Folder
from triforce.kv.prefix import PrefixStore
from triforce.model import Block, ModelConfig, RopeScaling, Transformer
from triforce.pieces import COMPLETE, FAILED, Loaded, Pieces, piece_name, put_together, reachable, take_apart
from triforce.quantize import fp8_copy
from triforce.session import Session
from triforce.state import State
from triforce.tape import FULL, Tape


class PeriodDrafter(Drafter):
    """A user's own: the last token once more."""

    emits_laws = False

    def __init__(self, tape):
        self.tape, self.count = tape, tape.buffer()

    def propose(self, start, plan, probs):
        self.tape.tokens.scatter_(1, start[:, None] + 1, self.tape.tokens.gather(1, start[:, None]))
        return self.count.fill_(1)


pytestmark = pytest.mark.xdist_group("precompile")  # they share what takes long: what was traced, and compiled
SETTINGS = {"budget": 64, "flush_interval": 16, "chunk_size": 4, "prefill_chunk_size": 64, "max_seq_len": 512}
LONGROPE = RopeScaling("longrope", 8.0, 32, attention_factor=1.5, short_factor=(1.0, 1.0), long_factor=(2.0, 3.0))
SMALL = "Speculator._begin"  # what a CPU compiles in a second


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Jobs that engines ask for, which nobody does, in a cache of their own."""
    monkeypatch.setenv("TRIFORCE_CACHE", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr(jobs, "start", lambda job, wait=False: asked.append(job))
    yield asked
    for thread in threading.enumerate():  # what an engine still loads is none of the next test's
        if thread.name == "pieces":
            thread.join(20)


@pytest.fixture(scope="module")
def small_job():
    """What an engine of the pair asks for with `SETTINGS`, all that is traced for it, and, compiled, what of that a CPU
    compiles in seconds."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "start", lambda job, wait=False: asked.append(job))
        run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=2)
    found = precompile.collect(asked[0])
    return asked[0], found, {name: piece.compile() for name, piece in found.items() if SMALL in name}


def run(engine, rows=1, tokens=48, prefix=None):
    prompts = [random_prompt(200 + 40 * row, seed=row) for row in range(rows)]
    if prefix is not None:
        prompts = [prompt[:45] for prompt in prompts]
    how = {"temperature": 0.0, "ignore_eos": True, "prefix": prefix}
    return [out.tokens for out in engine.generate(prompts, tokens, **how)]


def missing(engine):
    return engine.caches.state.compiler.pieces.missing


@pytest.fixture(scope="module")
def found_before():
    return {}


@pytest.fixture
def traced_once(monkeypatch, found_before):
    """What is called alike in several tests is traced in one of them, where it is not to be compiled."""
    trace = precompile.trace

    def traced(function, args, mode):
        key = piece_name("any", function, args)
        if key not in found_before:
            found_before[key] = trace(function, args, mode)
        return found_before[key]

    monkeypatch.setattr(precompile, "trace", traced)


@pytest.mark.parametrize("options, rows", [
    ({"gamma": "auto"}, 1), ({"offload": True}, 1), ({"sampling": "coupled"}, 1),
    ({"sampling": "coupled", "tree_size": 32}, 1),
    ({"family": {"qk_norm": True, "rotary_factor": 0.5, "rope_scaling": LONGROPE}, "fp8": True}, 1),
    ({"draft": lambda tape: PeriodDrafter(tape)}, 1), ({"shared": True}, 3),
    *slow(({}, 1), ({"gamma": "auto"}, 3), ({"draft_cache": "streaming"}, 1),
          ({"retrieval": False}, 1), ({"retrieval": False, "draft_cache": "snapkv"}, 1), ({"fp8": True}, 1),
          ({"weights": ()}, 1), ({"weights": (), "multiplies": True}, 1), ({"weights": ("layers.0.mlp.down",)}, 1)),
])
def test_every_piece_that_a_step_calls_is_traced(pair, asked, traced_once, monkeypatch, options, rows):
    """By name, which holds the shapes and strides of what it is called with."""
    target, draft = pair
    options = dict(options)
    if options.pop("multiplies", False):  # in fp8, a long prompt by parts
        monkeypatch.setattr(float8, "multiplies", lambda device: True)
        monkeypatch.setattr(float8, "STEP", 40)
    if "family" in options:
        target = Transformer.random(replace(target.config, **options.pop("family")))
    if "weights" in options:  # in fp8: of all layers, or all but these
        target = in_fp8(target, *options.pop("weights"))
    drafting = fp8_copy(target) if options.pop("fp8", False) else None
    shared = options.pop("shared", False)
    engine = make_engine(target, None if "draft" in options else draft, drafting=drafting, compile="beside",
                         max_batch_size=rows, **SETTINGS, **options)
    prefix = engine.prefill(random_prompt(200)) if shared else None
    for tokens in (2, 24):  # where no row will flush, a batch has no masked part
        run(engine, rows, tokens=tokens, prefix=prefix)
    assert (engine.caches.state.base > 0) == shared
    traced = precompile.collect(asked[0])
    assert not any(isinstance(piece, precompile.Untraced) for piece in traced.values())
    assert len(missing(engine)) >= 10 and all(piece.paths for piece in traced.values())
    rest = {name for name in missing(engine) if name not in traced}
    if "offload" in options:  # the verify's second halves of a layer, and the merging of what streams past
        rest -= {name for name in rest if name.startswith(("level2_rows8.Block.after", "level2_rows8.merge"))}
    assert not rest


@pytest.mark.parametrize("rows, words", [(1, 3000), (8, 3000), (8, 2**17)], ids=["row", "batch", "many words"])
@pytest.mark.parametrize("coupled", [False, True], ids=["rejection", "coupled"])
def test_the_ways_that_a_gpu_goes_to_a_law_are_traced(rows, words, coupled, monkeypatch):
    """They are others than a CPU's, and others for a batch. What is traced has no memory and no device."""
    monkeypatch.setattr(nucleus, "_on_gpu", lambda x: True)

    def draw(tape, logits, position):
        return tape.rank(logits, position) if coupled else tape.draw(tape.law(logits), position, FULL)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode, torch.no_grad(), graphs.traced():
        tape = Tape.allocate(rows, 1024, words, torch.device("cpu"), coupled, 2 if coupled else 0)
        logits, position = torch.empty(rows, 8, words), torch.empty(rows, 8, dtype=torch.int64)
        assert len(precompile.trace(draw, (tape, logits, position), mode).paths) > 4


def test_layers_in_fp8_and_wider_ones_are_pieces_of_their_own(pair):
    target = in_fp8(pair[0], "layers.0.mlp.down")
    layers = [*target.layers, *pair[0].layers, *in_fp8(pair[0]).layers]
    names = [piece_name("level1", Block.after, [layer]) for layer in layers]
    assert len(set(names)) == 3 and names[1] == names[4] == names[5] and names[2] == names[3]


def test_traced_without_memory(asked):
    """A target of layers of a billion parameters is traced as one of a few is."""
    target, draft = random_pair()
    engine = make_engine(target, draft, compile="beside", **SETTINGS)
    run(engine, tokens=2)
    large = replace(target.config, dim=8192, n_head=64, n_kv_head=8, head_dim=128, ffn_dim=28672, vocab_size=128256)
    assert len(precompile.collect(replace(asked[0], target=large))) > 20


def test_a_call_like_one_before_gives_tensors_of_its_own():
    """Or else a piece that is given both would read one of them twice."""
    mode, x = FakeTensorMode(shape_env=ShapeEnv()), torch.zeros(2, 3)
    tracer = precompile.Tracer(mode)
    double, total = tracer.piece("level", lambda x: (x * 2, None)), tracer.piece("sum", lambda a, b: a + b)
    with mode, graphs.traced():
        x = torch.empty(2, 3).t()
        (one, _), (other, _) = double(x), double(x)
        total(one, other)
    assert other.shape == one.shape == (3, 2) and other.stride() == one.stride() == (1, 3) and len(tracer.found) == 2
    assert sorted(piece.paths for piece in tracer.found.values()) == [[[0]], [[0], [1]]]


def test_layers_that_are_compiled_as_one_are_traced_as_one(asked, monkeypatch):
    """Five layers give the pieces of two. In fp8, there are two kinds of them."""
    target, draft = random_pair()
    engine = make_engine(target, draft, drafting=fp8_copy(target), compile="beside", **SETTINGS)
    run(engine, tokens=2)
    monkeypatch.setattr(precompile, "trace", lambda function, args, mode: function(*args))
    small, found = asked[0], {}
    for n_layer in (2, 5):
        job = replace(small, target=replace(small.target, n_layer=n_layer), draft=replace(small.draft, n_layer=n_layer))
        found[n_layer] = precompile.collect(job).keys()
    assert found[5] == found[2] and len(found[2]) > 15
    mixed = in_fp8(Transformer.random(replace(target.config, n_layer=5)), "layers.3.mlp.down").config
    names = precompile.collect(replace(small, target=mixed, fp8=False)).keys()
    assert len([name for name in names if "level2_rows1.Block.before" in name]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", [{"offload": True}, {"offload": "auto", "num_resident_layers": 1}])
def test_what_streams_is_given_queries_as_its_kernels_take_them(pair, asked, monkeypatch, how, shared):
    """Where a GPU's kernel reads lengths on the device, a prefix that does not stream gets them in another form: also
    that of rows over a shared one which does."""
    engine = make_engine(*pair, compile="beside", max_batch_size=2, **how, **SETTINGS)
    run(engine, 2, tokens=2, prefix=engine.prefill(random_prompt(200)) if shared else None)
    used, as_one_query = [], attention.as_one_query

    def noted(q):
        used.append("as_one_query")
        return as_one_query(q)

    def up_to(q, rows, k, v, lengths, bound, places, is_empty=None):
        used.append("up_to")
        return attention.empty(attention.as_rows(q, k.shape[1], rows))

    monkeypatch.setattr(attention, "spans", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "as_one_query", noted)
    monkeypatch.setattr(attention, "up_to", up_to)
    monkeypatch.setattr(PrefixStore, "can_narrow", property(lambda self: self.length_on_device))
    [job] = [job for job in asked if (job.base > 0) == shared]
    assert job.streams
    found = precompile.collect(job)  # of all rows alone
    assert not any(isinstance(piece, precompile.Untraced) for piece in found.values())
    assert set(used) == ({"as_one_query", "up_to"} if shared else set())
    used.clear()
    precompile.collect(replace(job, streams=False))
    assert set(used) == {"as_one_query", "up_to"}


@pytest.fixture
def narrows(monkeypatch):
    """Steps do less once rows have ended, as on a GPU."""
    monkeypatch.setattr(PrefixStore, "can_narrow", True)
    monkeypatch.setattr(attention, "spans", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "up_to", lambda q, rows, k, *_: attention.empty(
        attention.as_rows(q, k.shape[1], rows)))


@pytest.mark.parametrize("shared", [False, True])
def test_steps_of_fewer_rows_are_traced(pair, asked, traced_once, narrows, monkeypatch, shared):
    """As a GPU takes them where no bits are promised."""
    engine = make_engine(*pair, compile="beside", max_batch_size=4, **SETTINGS)
    run(engine, 4, tokens=2, prefix=engine.prefill(random_prompt(200)) if shared else None)
    found, state = precompile.collect(asked[0]), engine.caches.state
    assert missing(engine) <= found.keys()
    assert not any(isinstance(piece, precompile.Untraced) for piece in found.values())
    outer, tail, tape = state.hierarchy.outer, state.cache.tail.whole, state.tape.tokens
    tokens = tape.clone()
    for going in ([2], [0, 3]):
        before = set(missing(engine))
        state.hierarchy.compute_for(going, len(going))
        written = []
        for how in (graphs.traced, contextlib.nullcontext):
            tail.zero_()
            tape.copy_(tokens)
            with how(), outer.rehearsal():
                for rows in (1, outer.rows):
                    outer.rehearse(outer.length.clone(), rows)
            written.append(tail.clone())
            if how is graphs.traced:  # as on a GPU
                new = set(missing(engine)) - before
        assert new <= found.keys() and len(new) >= 10
        assert written[0].abs().sum((0, 1, 3, 4, 5)).nonzero().flatten().tolist() == going
        torch.testing.assert_close(*written)
    monkeypatch.setattr(PrefixStore, "can_narrow", False)
    assert not new & precompile.collect(asked[0]).keys()


@pytest.mark.parametrize("tile, rows", [(16, 4), (40, 3)], ids=["whole-tiles", "filled-up"])
@pytest.mark.parametrize("options", [{}, {"sampling": "coupled", "leaves": 1}])
def test_steps_of_promised_bits_are_traced(pair, asked, traced_once, narrows, monkeypatch, options, tile, rows):
    """As a GPU takes them, with the keys that rows share in as many parts as one tile of rows needs. If fewer rows
    attend, they run the same pieces."""
    monkeypatch.setattr(attention, "_can_split", lambda rows: True)
    monkeypatch.setattr(attention, "_cudnn", attention._plain_causal)
    monkeypatch.setattr(attention, "LONG", 64)
    monkeypatch.setattr(attention, "FEW", (0, 0))
    for module in (attention, narrowing):
        monkeypatch.setattr(module, "TILE", tile)
    for name, value in {"LONG": 64, "MERGED": 0.0, "TILES": 1000}.items():
        monkeypatch.setattr(narrowing, name, value)
    engine = make_engine(*pair, compile="beside", max_batch_size=rows, **SETTINGS, **options)
    run(engine, rows, tokens=2, prefix=engine.prefill(random_prompt(200)))
    state = engine.caches.state
    state.rewind(2)
    outer = state.hierarchy.outer
    assert outer.num_attending == rows
    state.round()
    assert (rows * outer.tree.rows * 2 % tile > 0) == (tile == 40)  # two query heads share a KV head
    before = missing(engine)
    outer.attend_for([1], 1)
    state.round()
    assert missing(engine) == before
    found = precompile.collect(asked[0])
    joins = {name for name in missing(engine) if "for_join" in name and name.startswith(f"level{FULL}")}
    assert joins and joins <= found.keys()
    assert not any(isinstance(piece, precompile.Untraced) for piece in found.values())


def test_compiled_steps_read_the_bias_where_it_is(small_job):
    """Whatever a call sets takes effect without anything compiled anew; what only results need is in no piece."""
    ends = {name: piece for name, piece in small_job[1].items() if "Speculator._finish" in name}
    assert len(ends) >= 2
    for piece in ends.values():
        assert sum(path[-1] == "logit_bias" for path in piece.paths) == 1
        assert not any(path[-1] == "hidden" for path in piece.paths)


def test_a_compiled_piece_computes_the_same(small_job):
    """Another layer of another model of the same shape, through the paths that were noted."""
    _, traced, _ = small_job
    name = next(name for name in traced if name.startswith("level1") and "Block.after" in name)
    loaded = Loaded(traced[name].compile())
    like = {path: torch.empty_strided(x.shape, x.stride()).normal_() for path, x in
            zip(map(tuple, traced[name].paths), traced[name].tensors, strict=True)}
    states = [(like[2, 0, 0], torch.empty_strided((1, 2, 6), (12, 1, 2)).normal_())]  # nothing is merged with it
    args = random_pair(std=0.1)[0].layers[1], like[1,], states
    assert piece_name("level1_rows3", Block.after, args) == name
    with torch.inference_mode():
        torch.testing.assert_close(loaded(args), Block.after(*args))
        with pytest.raises(AssertionError, match="compiled as"):
            loaded((args[0], args[1][:, :2], states))


def test_merged_states_are_compiled_in_any_order():
    """A merge has the order of its states in memory where it is traced, and perhaps not where it is compiled."""
    config, mode = ModelConfig(32, 32, 1, 4, 4, 8, 48), FakeTensorMode(shape_env=ShapeEnv())

    def states():  # as a CPU's kernel gives them
        return [(torch.randn(1, 3, 4, 8).transpose(1, 2), torch.randn(1, 3, 4).transpose(1, 2)) for _ in range(2)]

    with mode, torch.no_grad(), traced():
        layer = Transformer.empty(config, torch.device("cpu"), torch.float32).layers[0]
        piece = precompile.trace(Block.after, (layer, torch.randn(1, 3, 32), states()), mode)
    args = Transformer.random(config, std=0.1).layers[0], torch.randn(1, 3, 32), states()
    with torch.inference_mode():
        torch.testing.assert_close(Loaded(piece.compile())(args), Block.after(*args))


def compile_some(job, compiled):
    """Into a job's folder, what was compiled for the like; the rest is missing, as if it had failed."""
    folder = Folder(job.about)
    for name, piece in compiled.items():
        folder.write(name, piece)
    folder.write(COMPLETE, b"")
    return folder


def test_the_next_prompt_runs_compiled_pieces_and_no_text_changes_in_its_midst(asked, small_job):
    pair = random_pair()
    expected = run(make_engine(*pair, compile=False, **SETTINGS))
    engine = make_engine(*pair, compile="beside", **SETTINGS)
    assert run(engine) == expected and len(asked) == 1
    first = engine.caches.state
    compile_some(asked[0], small_job[2])
    pieces = first.compiler.pieces
    assert run(engine) == expected and engine.caches.state is first  # the same prompt: the same bits
    assert not pieces.ready and any(SMALL in name for name in pieces.missing)
    engine.generate(random_prompt(150, seed=9), 8)  # meanwhile they are loaded
    assert engine.caches.state is first and pieces.complete and len(asked) == 1
    loaded(pieces)
    pieces.missing.clear()
    assert run(engine) == expected and not any(SMALL in name for name in pieces.missing)
    assert len(pieces.ready) == len(small_job[2]) == first.compiler.num_pieces and first.compiler.is_complete


def loaded(pieces) -> None:
    """Waits for what is being loaded."""
    pieces._loader.join(20)
    assert not pieces._loader.is_alive()


def test_a_later_process_waits_for_no_piece_that_comes_too_late(asked, small_job, monkeypatch):
    """They are loaded beside a prefill where it is a long one, and many tokens follow."""
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    expected = run(engine)
    compile_some(asked[0], small_job[2])
    slow = threading.Event()
    monkeypatch.setattr(pieces_module, "import_compiler", lambda: slow.wait(10))
    monkeypatch.setattr(caches, "IDLE", 0.0)

    def later(compile="beside"):
        engine = make_engine(*random_pair(), compile=compile, **SETTINGS)
        assert run(engine) == expected
        return engine, engine.caches.state.compiler.pieces

    engine, pieces = later()
    assert pieces.complete and pieces._loader.is_alive() and not pieces.ready
    slow.set()
    loaded(pieces)
    assert not pieces.ready  # before another text begins
    engine.generate(random_prompt(150, seed=9), 4)
    assert run(engine) == expected and len(pieces.ready) == len(small_job[2])
    assert len(later(compile=True)[1].ready) == len(small_job[2]) and len(asked) == 1  # waited for
    monkeypatch.setattr(caches, "LOADING", 0.0)  # any prefill is long enough
    fill = State.prefill

    def prefill(self, *args, **more):
        if self.compiler.pieces._loader is not None:
            loaded(self.compiler.pieces)
        fill(self, *args, **more)

    monkeypatch.setattr(State, "prefill", prefill)
    assert not later()[1].ready  # for so few new tokens
    monkeypatch.setattr(caches, "MANY", 48)
    assert len(later()[1].ready) == len(small_job[2])


def test_pieces_are_loaded_while_nobody_asks(asked, small_job, monkeypatch):
    """Not beside a prefill, nor right after an answer: who asks once, ends then."""
    run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=4)
    compile_some(asked[0], small_job[2])
    loads, real, fill = [], pieces_module.Loaded, State.prefill
    monkeypatch.setattr(pieces_module, "Loaded", lambda data: loads.append(1) or real(data))
    monkeypatch.setattr(caches, "IDLE", 0.4)

    def prefill(self, *args, **more):
        before = len(loads)
        time.sleep(1.0)
        assert len(loads) == before and self.compiler.pieces.complete
        fill(self, *args, **more)

    monkeypatch.setattr(State, "prefill", prefill)
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    for seed in (8, 9):
        engine.generate(random_prompt(150, seed=seed), 4)
        pieces = engine.caches.state.compiler.pieces
        assert pieces._loader.is_alive() and not loads  # it waits
    time.sleep(0.3)
    begun = []
    monkeypatch.setattr(caches.Caches, "_compute", lambda *args: begun.append(time.sleep(1.0)))
    engine.prefill(random_prompt(150, seed=10))
    assert begun and not loads
    loaded(pieces)
    assert len(loads) == len(small_job[2])


def test_pieces_are_loaded_beside_the_texts_of_who_never_rests(asked, small_job, monkeypatch):
    """And no text waits for them."""
    run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=4)
    compile_some(asked[0], small_job[2])
    slow = threading.Event()
    monkeypatch.setattr(pieces_module, "import_compiler", lambda: slow.wait(10))
    monkeypatch.setattr(caches, "IDLE", 1000.0)
    for busy in (1000.0, 0.0):
        monkeypatch.setattr(caches, "BUSY", busy)
        engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
        stream = engine.stream(random_prompt(150, seed=8), 16)
        next(stream)
        pieces = engine.caches.state.compiler.pieces
        if busy:
            assert pieces._loader is None
        else:
            assert pieces._loader.is_alive()
            slow.set()
            loaded(pieces)
            assert len(pieces._loaded) == len(small_job[2])
        stream.close()
        pieces.load()  # or else its thread would wait


def test_who_has_rested_is_not_busy(asked, small_job, monkeypatch):
    """In a first process the rest may have been while pieces were being compiled."""
    monkeypatch.setattr(caches, "IDLE", 0.2)
    monkeypatch.setattr(caches, "BUSY", 0.4)
    engine, found = make_engine(*random_pair(), compile="beside", **SETTINGS), []
    run(engine, tokens=4)
    compile_some(asked[0], small_job[2])
    time.sleep(0.6)
    for piece in engine.stream(random_prompt(150, seed=8), 8):
        found.append(piece)
        assert engine.caches.state.compiler.pieces._loader is None
    loaded(engine.caches.state.compiler.pieces)
    assert found


def test_pieces_are_not_loaded_for_an_engine_that_is_gone(asked, small_job, monkeypatch):
    run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=4)
    compile_some(asked[0], small_job[2])
    loads = []
    monkeypatch.setattr(pieces_module, "Loaded", lambda data: loads.append(1))
    monkeypatch.setattr(caches, "IDLE", 1000.0)
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    run(engine, tokens=4)
    thread = engine.caches.state.compiler.pieces._loader
    assert thread.is_alive()
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive() and not loads


def test_who_lost_the_caches_has_nothing_loaded(asked, small_job):
    """By the end of its stream, beside the rounds of another; nor does a prefill that fails leave pieces waiting."""
    run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=4)
    compile_some(asked[0], small_job[2])
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    first, second = (engine.stream(random_prompt(150, seed=seed), 16) for seed in (8, 9))
    next(first)
    next(second)
    pieces = engine.caches.state.compiler.pieces
    first.close()
    assert pieces._loader is None
    second.close()
    assert pieces._loader.is_alive()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(caches.Caches, "_compute", lambda *args: 1 / 0)
        engine.prefill(random_prompt(150, seed=10))
    loaded(pieces)
    assert len(pieces._loaded) == len(small_job[2])


def test_no_text_runs_what_was_loaded_after_it_began(asked, small_job, monkeypatch):
    """Nor the half that was loaded before."""
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    expected = run(engine)
    compile_some(asked[0], small_job[2])
    first, rest, real = threading.Event(), threading.Event(), pieces_module.Loaded

    def load(data):
        assert not first.is_set() or rest.wait(10)
        piece = real(data)
        first.set()
        return piece

    monkeypatch.setattr(pieces_module, "Loaded", load)
    later = make_engine(*random_pair(), compile="beside", **SETTINGS)
    begin, call, counts, called = Compiler.begin, Loaded.__call__, [], []

    def begin_late(compiler):
        assert first.wait(10)
        begin(compiler)
        counts.append(len(compiler.pieces._loaded))
        rest.set()
        loaded(compiler.pieces)
        counts.append(len(compiler.pieces._loaded))

    monkeypatch.setattr(caches, "LOADING", 0.0)  # beside a prefill
    monkeypatch.setattr(caches, "MANY", 1)
    monkeypatch.setattr(Compiler, "begin", begin_late)
    monkeypatch.setattr(Loaded, "__call__", lambda piece, args: called.append(piece) or call(piece, args))
    assert run(later) == expected and not called
    assert counts == [1, len(small_job[2])]
    later.generate(random_prompt(150, seed=9), 4)
    assert called


def test_batches_of_changing_sizes_run_what_was_loaded_by_turns(asked, small_job, monkeypatch):
    """Each size has pieces of its own, which are loaded once."""
    loads, real, goes_on = [], pieces_module.Loaded, threading.Event()
    monkeypatch.setattr(pieces_module, "Loaded", lambda data: loads.append(1) or real(data))
    monkeypatch.setattr(pieces_module, "import_compiler", lambda: goes_on.wait(10))
    for rows in (1, 2):
        run(make_engine(*random_pair(), compile="beside", **SETTINGS, max_batch_size=2), rows, tokens=4)
        compile_some(asked[-1], {f"unused.{name}": piece for name, piece in small_job[2].items()})
    engine, ready = make_engine(*random_pair(), compile="beside", **SETTINGS, max_batch_size=2), []
    for turn in range(4):
        run(engine, 1 + turn % 2, tokens=4)
        pieces = engine.caches.state.compiler.pieces
        ready.append(len(pieces.ready))
        goes_on.set()
        loaded(pieces)
        goes_on.clear()
    count = len(small_job[2])
    assert ready == [0, 0, count, count] and len(loads) == 2 * count


def test_a_piece_that_cannot_be_loaded_runs_as_it_is_written(asked, small_job, caplog):
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    expected = run(engine)
    folder = compile_some(asked[0], small_job[2])
    bad, *others = sorted(small_job[2])
    folder.write(bad, small_job[2][bad].partition(b"\n")[0] + b"\nno artifact")
    later = make_engine(*random_pair(), compile=True, **SETTINGS)
    assert run(later) == expected and sorted(later.caches.state.compiler.pieces.ready) == others
    assert sum("could not be loaded" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("delay, fewest, most", [(0.0, 1, 3), (30.0, 0, 0)])
def test_a_process_that_ends_while_pieces_are_loaded_does_not_wait_for_all(tmp_path, delay, fewest, most):
    """A hundred, of a second each."""
    code = ("import time\nfrom triforce import pieces\nfrom triforce.kept import Folder\n"
            "pieces.import_compiler = lambda: None\n"
            "pieces.Loaded = lambda data: (print('one', flush=True), time.sleep(1))\n"
            "folder = Folder({'a': 'test'})\n"
            "for i in range(100):\n    folder.write(f'{i}.piece', b'x')\n"
            "folder.write('complete', b'')\nfound = pieces.Pieces(folder)\nfound.look()\n"
            f"found.load({delay})\ntime.sleep(0.5)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20,
                          env={**os.environ, "TRIFORCE_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0 and not done.stderr and fewest <= done.stdout.count("one") <= most


def test_long_prefills_are_told_by_what_they_compute():
    config = ModelConfig(128256, 4096, 32, 32, 8, 128, 14336)  # Llama-3.1-8B
    assert 8 < prefill_seconds(config, 0, 122_880) < 11  # measured on an H200: 9.3
    assert 0.3 < prefill_seconds(config, 0, 16_384) < 0.7 and prefill_seconds(config, 122_800, 122_880) < 0.1


def test_what_is_damaged_is_not_there(asked, small_job, caplog):
    """A flipped bit, a file cut short, an empty one, and something else."""
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    expected = run(engine)
    folder = compile_some(asked[0], small_job[2])
    names = folder.names(".piece")[:1]
    path = folder.path / names[0]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for harm in (bytes(flipped), whole[:-100], b"", b"{}"):
        path.write_bytes(harm)
        assert Folder(asked[0].about).read(names[0]) is None
    for name in folder.names(".piece"):
        (folder.path / name).write_bytes(flipped)
    caplog.clear()
    asked.clear()
    again = make_engine(*random_pair(), compile="beside", **SETTINGS)
    assert run(again) == expected and any(SMALL in name for name in missing(again))
    assert len(asked) == 1  # it is made anew
    assert sum("damaged" in record.message for record in caplog.records) == 1  # said once


def test_another_version_is_another_folder(asked, small_job, monkeypatch):
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    run(engine, tokens=2)
    compile_some(asked[0], small_job[2])
    monkeypatch.setattr(torch, "__version__", "99.0")
    other = make_engine(*random_pair(), compile="beside", **SETTINGS)
    run(other, tokens=2)
    assert len(asked) == 2 and not other.caches.state.compiler.pieces.complete


@pytest.fixture
def no_superuser():
    """Who may write anywhere: for the while, files are asked for as a user without rights."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_folder_that_cannot_be_written(asked, no_superuser, monkeypatch, caplog):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        monkeypatch.setenv("TRIFORCE_CACHE", folder)
        assert run(make_engine(*random_pair(), compile="beside", gamma="auto", **SETTINGS), tokens=20)
        assert not os.listdir(folder)
    assert sum("cannot keep" in record.message for record in caplog.records) == 1


def test_a_cache_that_is_a_file(asked, tmp_path, caplog):
    (tmp_path / "cache").write_text("not a folder")
    assert run(make_engine(*random_pair(), compile="beside", gamma="auto", **SETTINGS), tokens=20)
    assert sum("cannot" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("pieces", [None, 2])
def test_what_is_missing_is_compiled_after_the_answer(asked, pieces):
    """Beside it, that would slow it down. Also after one that is broken off."""
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    stream = engine.stream(random_prompt(100), 8)
    for given, _ in enumerate(stream, 1):
        assert not asked
        if given == pieces:
            break
    stream.close()
    assert (stream.result.finish_reason == "interrupted") == (pieces is not None)
    assert len(asked) == 1
    engine.generate(random_prompt(100), 8)
    assert len(asked) == 1  # the same State: its job has been started


@pytest.mark.parametrize("flags,calls", [([], 1), (["--compare"], 4)])
def test_a_comparison_of_times_is_over_before_anything_is_compiled(asked, monkeypatch, flags, calls):
    """A command answers four times to compare: all of them without processes that compile."""
    monkeypatch.setattr(answers, "load_engine", lambda *_: make_engine(
        *random_pair(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer, compile="beside", **SETTINGS))
    tokenizer, ended, close = Tokenizer(TINY / "target"), [], Session.close
    monkeypatch.setattr(Session, "close", lambda session: ended.append(len(asked)) or close(session))
    assert cli.main(["--prompt", "Call me Ishmael.", "--max-new-tokens", "4", "--device", "cpu", *flags]) == 0
    assert set(ended) == {0} and len(ended) >= calls and asked


def test_processes_that_cannot_be_started_are_told(asked, monkeypatch, caplog):
    def none_more(job):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(jobs, "start", none_more)
    assert run(make_engine(*random_pair(), compile="beside", **SETTINGS), tokens=4)
    assert [record.message for record in caplog.records] == [
        "steps are not compiled: [Errno 11] Resource temporarily unavailable"]


def test_the_wait_for_compiled_steps_is_told(asked, monkeypatch):
    """As a part of the prefill of the call that waited, and of no other."""
    monkeypatch.setattr(jobs, "start", lambda job, wait=False: time.sleep(0.3 * wait))
    engine, prompt = make_engine(*random_pair(), compile=True, **SETTINGS), random_prompt(100)
    first, second = (engine.generate(prompt, 4).stats for _ in range(2))
    assert 0.3 <= first.compiling <= first.prefill and second.compiling == 0.0
    assert f"  of it, compiling {first.compiling:>19.2f} s" in str(first).splitlines()
    assert f"  of it, compiling {'-':>21}" in str(second).splitlines()
    assert make_engine(*random_pair(), compile="beside", **SETTINGS).generate(prompt, 4).stats.compiling == 0.0


def test_waiting_for_what_cannot_be_kept_is_no_traceback(tmp_path, monkeypatch, caplog, capfd):
    (tmp_path / "cache").write_text("not a folder")
    monkeypatch.setenv("TRIFORCE_CACHE", str(tmp_path / "cache"))
    assert run(make_engine(*random_pair(), compile=True, **SETTINGS), tokens=20)
    assert "not all steps could be compiled" in caplog.text
    said = capfd.readouterr().err
    assert "set TRIFORCE_CACHE to a folder" in said and "Traceback" not in said


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRIFORCE_CACHE", str(tmp_path))
    folder = Folder({"a": 1})
    assert folder.write("x.piece", b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not folder.write("x.piece", b"after") and folder.read("x.piece") == b"before"
    assert sorted(path.name for path in folder.path.iterdir()) == ["about.json", "x.piece"]
    assert "No space left" in caplog.text


def test_a_piece_that_does_not_compile_runs_as_it_is_written(asked, small_job, monkeypatch, caplog):
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    expected = run(engine)

    def fails(piece):
        raise RuntimeError("no compiler here\n\nWhile executing %view_2: a trace of many lines")

    monkeypatch.setattr(precompile, "collect", lambda job: small_job[1])
    monkeypatch.setattr(precompile.Traced, "compile", fails)
    new = precompile.work(asked[0])
    assert new and all(name.endswith(FAILED) for name in new) and len(caplog.records) == len(new)
    assert all(record.message.endswith("RuntimeError: no compiler here") for record in caplog.records)
    again = make_engine(*random_pair(), compile="beside", **SETTINGS)
    assert run(again) == expected and again.caches.state.compiler.pieces.complete and len(asked) == 1


def test_a_piece_without_a_graph_leaves_the_others_compiled(asked, small_job, monkeypatch):
    def trace(function, args, mode):
        if "_finish" in function.__qualname__:
            raise AssertionError("no graph")
        return small_job[1][next(iter(small_job[1]))]

    monkeypatch.setattr(precompile, "trace", trace)
    monkeypatch.setattr(precompile.Traced, "compile", lambda piece: b"compiled")
    new = precompile.work(small_job[0])
    failed = [name for name in new if name.endswith(FAILED)]
    assert failed and all("_finish" in name for name in failed) and len(new) - len(failed) > 10


@pytest.mark.slow
def test_killed_and_two_at_once(asked, small_job, monkeypatch):
    """A process that is killed leaves whole files or none; two at the same work do it once."""
    engine = make_engine(*random_pair(), compile="beside", **SETTINGS)
    run(engine, tokens=2)
    job = asked[0]
    code = ("import pickle, sys\nfrom triforce import precompile\n"
            "own = precompile.collect\n"
            "precompile.collect = lambda job: {n: p for n, p in own(job).items() if '_begin' in n}\n"
            "precompile.work(pickle.load(sys.stdin.buffer))\n")
    killed, folder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE), Folder(job.about)
    with killed.stdin as pipe:
        pipe.write(pickle.dumps(job))
    while not folder.names(".piece") and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert folder.names(".piece") and all(folder.read(name) is not None for name in folder.names(".piece"))
    done = len(folder.names(".piece"))

    class Compiled:  # here already, though not at once: forks need neither import nor compile anything
        def __init__(self, piece):
            self.piece = piece

        def compile(self):
            time.sleep(0.2)
            return self.piece

    rest = {name: Compiled(piece) for name, piece in small_job[2].items()}
    assert set(folder.names(".piece")) < set(rest)
    monkeypatch.setattr(precompile, "collect", lambda job: rest)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        said = pool.map(precompile.work, [job, job], chunksize=1)
    assert sorted(map(len, said))[0] == 0 and sum(map(len, said)) == len(folder.names(".piece")) - done > 0
    pieces = Pieces(folder)
    pieces.look()
    assert len(folder.names(".piece")) == len(rest) and pieces.complete


@pytest.mark.quick
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"draft_cache": "snapkv"}])
def test_a_prefill_waits_for_no_compiled_piece(pair, asked, options):
    """So its keys and values are the same in a first process and in a later one."""
    engine = make_engine(*pair, compile="beside", **SETTINGS, **options)
    state = engine.prepare([random_prompt(200)], 8)
    assert len(engine.caches._due) == 1 and not missing(engine)
    state.round()
    assert missing(engine)


@pytest.mark.quick
@pytest.mark.parametrize("ends", ["DONE = True", "raise RuntimeError('too late')"])
def test_the_compiler_is_imported_beside_what_comes_next(monkeypatch, tmp_path, ends):
    name = f"as_slow_as_a_compiler_{len(ends)}"
    (tmp_path / f"{name}.py").write_text(f"import time\ntime.sleep(0.5)\n{ends}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(pieces_module, "COMPILER", name)
    met, usual = [], sys.getswitchinterval()
    monkeypatch.setattr(threading, "excepthook", met.append)
    both = [threading.Thread(target=pieces_module.import_compiler) for _ in range(2)]  # for another engine, too
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert (name in sys.modules) == ("DONE" in ends) and not met
    assert sys.getswitchinterval() == usual


def test_paths_lead_to_what_is_reached(pair):
    target, _ = pair
    found = reachable((target.layers[1], [torch.zeros(2)]))
    paths = {path for _, path in found.values()}
    assert (0, "attention", "qkv", "weight") in paths and (1, 0) in paths


def test_results_are_put_together_as_they_were():
    x, y, z = (torch.full((1,), i) for i in range(3))
    for result in (x, (x, [(y, z)]), [x, None], None):
        tensors = []
        shape = take_apart(result, tensors)
        again = put_together(shape, tensors)
        assert str(again) == str(result)
