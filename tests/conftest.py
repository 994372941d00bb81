"""Small random pairs for the tests of the logic, and the embedded pair for the tests of the whole."""

import contextlib
import gc
import hashlib
import os
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import triforce
from triforce import cli
from triforce.cache.blocks import PrefillBlock
from triforce.config import Placement, Settings, split
from triforce.cpu import row_unit
from triforce.decode.batch import DecodeBatch, Models, Sizes
from triforce.decode.controller import Controller, Costs
from triforce.decode.pilot import guess
from triforce.engine.buffers import Buffers
from triforce.engine.engine import Engine
from triforce.engine.logprobs import logits_of
from triforce.errors import UserError
from triforce.fp8 import MADE
from triforce.hf.folders import TINY
from triforce.hf.names import places, put
from triforce.hf.tokenizer import Tokenizer
from triforce.model import ModelConfig, Transformer
from triforce.runtime.graphs import Compiler

VOCAB = 64
SIZES = {"flush_interval": 16, "chunk_size": 4, "budget": 64}  # so small that a short text is flushed many times
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # what tests share with these

# Models this small gain nothing from threads, and wait for them where other work has the cores. The variable is for the
# processes that tests start; test_rows.py asks for more.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Nor does compiling a few small kernels gain from a pool of processes that each import PyTorch first.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


# The inner loop, `python -m pytest -m quick`: files whose tests take little, of every part of the library.
QUICK = {"acceptance", "attention", "api", "cli_flags", "controller", "generation", "graphs", "memory", "model",
         "ngram", "packed", "pilot", "sampling", "session", "state", "views"}


def slow(*cases) -> list:
    """Cases of a parametrized test that are left to `-m "slow or not slow"`, each one argument or a tuple of several.
    Others, much like them, are run by `python -m pytest`. Some tests that take long are marked as a whole."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and what that starts ignores it, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if item.path.stem.removeprefix("test_") in QUICK and not item.get_closest_marker("slow"):
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """What has been imported stays: `Engine.release` need not have the garbage collector look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # on machines without pytest-xdist: -p no:xdist -o addopts=""
def pytest_xdist_auto_num_workers(config) -> int:
    """Tests have one thread each, so as many run side by side as there are cores, up to four; on a GPU one."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 4)


def random_pair(dtype=torch.float32, device="cpu", vocab_size=VOCAB, std=0.3):
    """A GQA target of two layers and a draft of one, with weights large enough for peaked distributions."""
    target = ModelConfig(vocab_size, 32, 2, 4, 2, 8, 48, max_position_embeddings=8192)
    draft = ModelConfig(vocab_size, 16, 1, 2, 2, 8, 32)
    return (Transformer.random(target, seed=0, device=device, dtype=dtype, std=std),
            Transformer.random(draft, seed=1, device=device, dtype=dtype, std=std))


def parent_of(shape, row: int) -> int:
    """The row of a tree that a row follows."""
    return row - 1 if row <= shape.spine else shape.parents[row - shape.spine - 1]


def rank_of(shape, row: int) -> int:
    return 0 if row <= shape.spine else shape.ranks[row - shape.spine - 1]


def in_fp8(model: Transformer, *wide: str) -> Transformer:
    """The model with the layers of its blocks in fp8, as `weights="fp8"` reads them. wide: layers that are not."""
    config = replace(model.config, float8=replace(MADE, wide=("output", *wide)))
    scaled = Transformer.empty(config, model.device, model.dtype)
    wide, parameters = dict(model.named_parameters()), dict(scaled.named_parameters())
    parts = {name: replace(place, order=None) for name, place in places(scaled.config).items()}
    with torch.no_grad():
        for name, place in places(model.config).items():
            put(parameters, parts, name, wide[place.parameter][place.start : place.start + place.shape[0]], None)
    return scaled


def random_prompt(length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_state(target, draft, prompts, *, vocab_size=VOCAB, budget=64, capacity=1024, max_new_tokens=512, sampling=None,
               rule="rejection", drafting=None, num_resident_layers=None, pack=False, base=0, compiler=None,
               **settings) -> DecodeBatch:
    """A DecodeBatch with prompts prefilled, without an Engine around it.

    sampling: of the law; rule: how drawn tokens are checked.
    base: tokens that the prompts have in common, which its rows share.
    compiler: of its steps. None: they run as they are written.
    """
    chosen = {"gamma": 6, "block_size": 8, "flush_interval": 16, "chunk_size": 4, "rebuild_interval": 16,
              "prefill_chunk_size": 2048, "sampling": rule, **settings}
    resolved = Settings(**chosen).resolve(has_model=draft is not None)
    compiler, document = compiler or Compiler(torch.device("cpu")), None
    sizes = Sizes(len(prompts), capacity, budget, vocab_size, base, num_resident_layers)
    if base:
        of_document = replace(sizes, batch=1, shared=0)
        document = DecodeBatch(Models(target), resolved, of_document, compiler)
        document.prefill(0, prompts[0][: base + 1])
        document, sizes = document.cache.prefix.part(base), replace(sizes, resident_layers=None)
        if pack:
            document.pack()
    unit = row_unit(target, len(prompts), resolved.block_size, compiled=False)
    state = DecodeBatch(Models(target, draft, drafting), resolved, sizes, compiler, pack=pack, shared=document,
                        row_unit=unit)
    law = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": None, "seed": list(range(len(prompts)))}
    state.params.set(**{**law, **(sampling or {})})
    state.prefill_all(prompts)
    state.begin(max_new_tokens)
    return state


def make_engine(target, draft_model=None, *, tokenizer=None, drafting=None, **options) -> Engine:
    """An Engine without a checkpoint; options are those of `Settings` and `Placement`."""
    eos = {"eos_ids": options.pop("eos_ids")} if "eos_ids" in options else {}
    [settings, placement], _ = split({"gamma": 6, "block_size": 8, **options}, Settings, Placement, what="option")
    return Engine(target, tokenizer, draft_model, drafting=drafting, settings=settings, placement=placement, **eos)


def tensors(book) -> list[torch.Tensor]:
    """Keys and values of a prefix over `random_pair`, and what views are chosen by."""
    return [x.clone() for i in range(2) for x in (*book.store.layer(i, 0), book.store.chunk_keys[i])]


def kept(cache, i: int, row: int, start: int, stop: int) -> torch.Tensor:
    """Keys and values of layer i at positions of a row, which lie in the prefix, in the tail, or in both."""
    border = cache.lens[row]
    parts = [cache.prefix.load(i, row, start, min(stop, border))] if start < border else []
    if stop > border:
        parts.append(cache.tail.load(i, row, max(start - border, 0), stop - border))
    return torch.cat(parts, 2)


def assert_view_holds_its_selection(view, row: int = 0) -> None:
    """It is a true selection, and each layer holds the K/V at the positions that it says, of what it is chosen from."""
    source = view.source
    assert view.selected[row] and view.lens[row] == view.held < source.own_lens[row]
    for i in view.layers:
        at = positions(view, row, i)[..., None].expand(-1, -1, view.cache.config.head_dim)
        for whole, held in zip(source.load(i, row, source.base, source.lens[row]), (view.k, view.v), strict=True):
            assert torch.equal(held[i][row][:, : view.held], whole.gather(1, at))


def run_rounds(state, count: int, **how) -> list[list[int]]:
    """Rounds until every row has `count` tokens; returns the first `count` of each."""
    rows = [[] for _ in range(state.batch)]
    while min(map(len, rows)) < count:
        for row, tokens in zip(rows, state.round(**how), strict=True):
            row += tokens
    return [row[:count] for row in rows]


def bits(state, count, **how):
    """Greedy tokens of row 0, a hash of the logits behind each, and what happened on the way."""
    tokens, hashes, offsets = [], [], set()
    while len(tokens) < count:
        offsets.add(state.lens[0] % state.settings.flush_interval)
        new = state.round(**how)[0]
        hashes += hashes_of(state, 0, len(new))
        tokens += new
    totals = {"full": state.hierarchy.outer.totals[0].tolist()}
    if state.hierarchy.inner is not None:
        totals["retrieval"] = state.hierarchy.inner.totals[0].tolist()
    rejected = {name: drafted - accepted for name, (accepted, drafted, _) in totals.items()}
    return tokens[:count], hashes[:count], rejected, offsets


def hashes_of(state, row: int, count: int) -> list[str]:
    """Of the logits behind the tokens of a row's last round."""
    logits = logits_of(state.hierarchy.outer)[row, :count].contiguous().float().cpu()
    return [hashlib.sha256(one.numpy().tobytes()).hexdigest() for one in logits]


def bits_of_rows(state, count, **how) -> list[list[tuple[int, str]]]:
    """Of each row of a batch, `count` greedy tokens, each with a hash of the logits behind it."""
    rows = [[] for _ in range(state.batch)]
    while min(map(len, rows)) < count:
        for row, new in enumerate(state.round(**how)):
            rows[row] += zip(new, hashes_of(state, row, len(new)), strict=True)
    return [row[:count] for row in rows]


def positions_in_view(state, layer=0, row=0):
    """Which positions a row's retrieval view holds, per KV head, found by comparing keys."""
    view, full = state.hierarchy.view, state.cache.prefix
    view.catch_up([row])
    held, keys = view.k[layer][row, :, : view.lens[row]], full.k[layer][row, :, : full.lens[row]]
    return [torch.cdist(held[head].double(), keys[head].double()).argmin(-1).tolist() for head in range(len(keys))]


def python(*arguments, **how) -> subprocess.CompletedProcess:
    """Of a process of its own, in the clone's folder."""
    return subprocess.run([sys.executable, *map(str, arguments)],
                          **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300, **how})


def refused(match: str, function, *args, **how) -> str:
    """The call ends with a UserError of one line, which says so. match: a pattern, or "" for any."""
    with pytest.raises(UserError, match=match or None) as caught:
        function(*args, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def command(capsys):
    """Runs a command of the library, which ends with `status`: (what it says, what it says of errors and progress)."""
    def run(*argv, status: int = 0):
        assert cli.main(list(argv)) == status
        return capsys.readouterr()

    return run


@pytest.fixture
def broken_off(monkeypatch):
    """Within, Ctrl-C comes where the second part of a prompt is to be computed."""
    @contextlib.contextmanager
    def within():
        compute = Buffers._compute

        def broken(self, cache, tokens, start, *more):
            if start > 0:
                raise KeyboardInterrupt
            compute(self, cache, tokens, start, *more)

        with monkeypatch.context() as patch:
            patch.setattr(Buffers, "_compute", broken)
            yield

    return within


@pytest.fixture
def watched(monkeypatch):
    """Has the calls of a function, which is an attribute of `owner`, noted: a list of `what` of their arguments."""
    def watch(owner, name: str, what) -> list:
        seen, function = [], getattr(owner, name)

        def noted(*args, **more):
            seen.append(what(*args, **more))
            return function(*args, **more)

        monkeypatch.setattr(owner, name, noted)
        return seen

    return watch


@pytest.fixture
def eager_to_draft(monkeypatch):
    """With gamma="auto", a verify is said to take so long that whatever can draft pays. A list of the plans of the
    rounds that are timed."""
    plans = []

    def known(*circumstances):
        costs = guess(*circumstances)
        costs.values[:] = [1000.0 if what in ("verify", "plain") else 1.0 for what, _ in costs.number]
        costs.seen[:] = Costs.WELL
        return costs

    def timed(self, plan, drafting, checking):
        assert (drafting > 0) == (plan.gamma > 0) and checking > 0
        plans.append(plan)

    monkeypatch.setattr("triforce.decode.pilot.guess", known)
    monkeypatch.setattr(Controller, "timed", timed)
    return plans


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Nothing is kept in the user's folder, nor found there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIFORCE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def states():
    """Weak references to the States that are made during a test, in order."""
    made, init = [], DecodeBatch.__init__

    def noted(self, *args, **kw):
        if "runs_on" not in kw:  # one of memory.py's plans, which holds nothing
            made.append(weakref.ref(self))
        init(self, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeBatch, "__init__", noted)
        yield made


@pytest.fixture
def computed(monkeypatch):
    """(first, tokens) of what goes through a prefill of the target, call by call; tokens: of all rows."""
    seen, prefill = [], Transformer.prefill

    def noted(self, tokens, blocks, *args, **how):
        if isinstance(blocks[0][2], PrefillBlock):  # a draft's window has another
            seen.append((blocks[0][2].start, tokens.numel()))
        return prefill(self, tokens, blocks, *args, **how)

    monkeypatch.setattr(Transformer, "prefill", noted)
    return seen


@pytest.fixture(scope="session")
def pair():
    return random_pair()


@pytest.fixture(scope="session")
def tiny_engine():
    """The embedded tokenizer, and random models of its vocabulary, a fifth as slow as the embedded ones."""
    tokenizer = Tokenizer(TINY / "target")
    models = random_pair(vocab_size=tokenizer.vocab_size, std=0.1)
    return make_engine(*models, tokenizer=tokenizer, eos_ids=triforce.load("tiny", device="cpu").eos_ids,
                       max_seq_len=4096)


def positions(view, row: int, i: int):
    """Where the tokens of layer i's selection stand in the row's own part of the prefix: [K, held]."""
    return view._positions(view._chunks[row, view.layers.index(i), None], view._prefix_len[row])[0]
