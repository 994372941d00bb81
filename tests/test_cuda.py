"""What only a CUDA GPU can show: bits in half precision, CUDA graphs, no recompilation, no hidden host sync.

    python -m pytest -m cuda -s tests/test_cuda.py
    python -m pytest -m cuda -s tests/test_cuda.py -k bfloat16                    # bits and fp8 in one of the dtypes
    python -m pytest -m cuda -s tests/test_cuda.py -k "float16 and not bfloat16"  # and in the other
"""

import functools
import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import assert_view_holds_its_selection, bits, bits_of_rows, in_fp8, make_engine, random_prompt

import triforce
from triforce import UserError, attention, fp8
from triforce.cache import kv_cache
from triforce.cache.offload import Offload
from triforce.cache.prefix import STRIDE
from triforce.cli.request import default_document
from triforce.decode import gumbel, sampling
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.decode.verifier import Outbox
from triforce.fp8 import fp8_copy
from triforce.model import ModelConfig, Transformer
from triforce.runtime.graphs import OPTIONS, Compiler

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONTEXT, NEW = 16_384, 512
TEXT = "It was a dark and stormy night, and the wind was loud. " * 40
VOCAB = 512
in_half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def num_compiled() -> int:
    """Functions that were compiled in this process, each for other shapes."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@functools.cache
def random_models_in(dtype, **more):
    """A GQA target with random weights: rejections come in plenty, ties and near ties too. more: of its config."""
    make = {"device": "cuda", "dtype": dtype}
    target = ModelConfig(VOCAB, 512, 4, 8, 4, 64, 1024, max_position_embeddings=131072, **more)
    draft = ModelConfig(VOCAB, 128, 2, 2, 2, 64, 256)
    return Transformer.random(target, std=0.05, **make), Transformer.random(draft, seed=1, std=0.05, **make)


@pytest.fixture(scope="module")
def random_models():
    return random_models_in(torch.bfloat16)


def engine_for(models, *, levels="triforce", budget=512, gamma=6, gamma_inner=2, compile=None,
               fp8=False, max_seq_len=24_576, **kw):
    target, draft = models
    return make_engine(target, draft if levels in ("triforce", "draft") else None, gamma=gamma, gamma_inner=gamma_inner,
                       retrieval=levels in ("triforce", "retrieval"), budget=budget,
                       drafting=fp8_copy(target) if fp8 else None, compile=compile, max_seq_len=max_seq_len,
                       prefill_chunk_size=8192, **kw)


def prepare(engine, ids, vocab_size, temperature=0.0, new=2048):
    engine.buffers.vocab_size = vocab_size
    return engine.prepare([ids], new, temperature=temperature, top_p=0.9, top_k=None, min_p=None, seed=[1])


WINDOWS = {"sliding_layers": (0, 2), "sliding_window": 1000, "sliding_theta": 1e3, "qk_norm": True, "post_norm": True,
           "shifted_norms": True, "activation": "gelu", "embedding_scale": 16.0}  # as of Gemma 3
# As of gpt-oss; in bf16 by grouped products.
EXPERTS = {"num_experts": 64, "active_experts": 4, "weighs_anew": True, "mlp_bias": True, "activation": "clamped",
           "sinks": True}


def models_of(which, dtype):
    """(target and draft, a text, the size of its vocabulary, `compile`: of the embedded pair's steps alone)."""
    if which == "tiny":
        engine = triforce.load("tiny", device="cuda", dtype=dtype)
        ids = engine.encode_prompt(default_document())[:CONTEXT]
        return (engine.target, engine.draft), ids, engine.vocab_size, True
    models = random_models_in(dtype, **{"random": {}, "experts": EXPERTS, "windows": WINDOWS}[which])
    return models, random_prompt(CONTEXT, vocab_size=VOCAB), VOCAB, None


# levels, budget, gamma, gamma_inner, and what else differs
VARIANTS = [("triforce", 512, 6, 2, {}), ("triforce", 1024, 7, 1, {}), ("retrieval", 512, 3, 2, {}),
            ("draft", 512, 5, 2, {}), ("triforce", 512, 6, 2, {"fp8": True}),
            ("triforce", 512, "auto", 3, {})]
# Compiled, which takes half a minute each. The others record their steps as they are written.
COMPILED = [VARIANTS[0], VARIANTS[-1]]
# Fewer tokens, and only with speculation.
MORE = [("triforce", 512, 6, 2, {"draft_cache": "query"}), ("retrieval", 512, 4, 2, {"draft_cache": "query"}),
        ("retrieval", 512, 4, 2, {"draft_cache": "snapkv"}), ("retrieval", 512, 4, 2, {"draft_cache": "streaming"}),
        ("none", 512, 6, 2, {"draft": "ngram"}),
        ("retrieval", 512, 6, 3, {"draft": "ngram"})]


@in_half_precision
@pytest.mark.parametrize("which", ["random", "tiny", "experts", "windows"])
def test_greedy_bits(which, dtype, eager_to_draft):
    """512 tokens at 16K: tokens and logits hashes, every hierarchy against no drafter and against speculate=False; of
    steps as they are, and of compiled ones."""
    models, ids, vocab_size, compile = models_of(which, dtype)
    variants = {"random": VARIANTS + MORE, "tiny": COMPILED, "experts": [*VARIANTS[:2], VARIANTS[-1]],
                "windows": [*VARIANTS[:2], VARIANTS[-1], MORE[0]]}[which]
    state = prepare(engine_for(models, levels="none", compile=compile), ids, vocab_size)
    plain, before = bits(state, NEW)[:2], num_compiled()
    for variant in variants:
        levels, budget, gamma, gamma_inner, options = variant
        count = NEW if variant in VARIANTS else 300
        expected = plain[0][:count], plain[1][:count]
        engine = engine_for(models, levels=levels, budget=budget, gamma=gamma, gamma_inner=gamma_inner,
                            rebuild_interval=64, compile=compile, **options)
        state = prepare(engine, ids, vocab_size)
        tokens, hashes, rejected, offsets = bits(state, count)
        drafted = int(state.hierarchy.outer.totals[0, 1])
        print(f"{which} {dtype} {levels} budget {budget} gamma {gamma} {options}: drafted {drafted}, rejected "
              f"{rejected}, flushes {state.num_flushes}, rounds {state.num_forwards}, offsets {len(offsets)}, "
              f"compiled {num_compiled() - before}")
        agree = [a == b for a, b in zip(hashes, expected[1], strict=True)]
        assert all(agree), f"logits differ first at token {agree.index(False)}; {sum(agree)} of {count} agree"
        assert tokens == expected[0]
        assert state.num_flushes >= 2
        assert drafted >= (20 if levels != "none" else 1)
        if which == "random" and gamma != "auto" and variant in VARIANTS:
            assert min(rejected["full"], rejected["retrieval"] if levels == "triforce" else 20) >= 20
        if state.hierarchy.view is not None and state.hierarchy.view.kind.renews and gamma != "auto":
            assert state.hierarchy.view.num_rebuilds >= 2
        if variant in VARIANTS:
            state.rewind(1000)
            assert bits(state, NEW, plan=AUTOREGRESSION)[:2] == plain
    assert (num_compiled() > before + 10) == (compile is True)
    assert any(plan.gamma > 0 for plan in eager_to_draft)  # by the variant with "auto"


@in_half_precision
@pytest.mark.parametrize("which", ["random", "tiny"])
def test_a_seed_says_the_same(which, dtype, eager_to_draft):
    """Coupled draws at temperature 1: tokens and logits of every hierarchy are those of no drafter, and of
    speculate=False; of steps as they are, and of compiled ones."""
    models, ids, vocab_size, compile = models_of(which, dtype)
    variants = VARIANTS + MORE if which == "random" else COMPILED
    common = {"compile": compile, "sampling": "coupled", "leaves": 1, "leaves_inner": 2}
    state = prepare(engine_for(models, levels="none", **common), ids, vocab_size, temperature=1.0)
    plain = bits(state, 300)[:2]
    for levels, budget, gamma, gamma_inner, options in variants:
        engine = engine_for(models, levels=levels, budget=budget, gamma=gamma, gamma_inner=gamma_inner,
                            **common, **options)
        state = prepare(engine, ids, vocab_size, temperature=1.0)
        tokens, hashes, rejected, _ = bits(state, 300)
        kept, drafted, by_leaves = state.hierarchy.outer.totals[0].tolist()
        print(f"coupled {which} {dtype} {levels} budget {budget} gamma {gamma} {options}: drafted {drafted}, kept "
              f"{kept}, by leaves {by_leaves}, rejected {rejected}, flushes {state.num_flushes}")
        assert (tokens, hashes) == plain
        assert drafted >= (20 if levels != "none" else 1)
        if levels == "triforce" and gamma != "auto":
            assert by_leaves >= 3 and kept >= 5 and min(rejected["full"], rejected["retrieval"]) >= 10
        state.rewind(1000)
        assert bits(state, 100, plan=AUTOREGRESSION)[:2] == (plain[0][:100], plain[1][:100])
    assert any(plan.gamma > 0 for plan in eager_to_draft)


@in_half_precision
@pytest.mark.parametrize("which,how", [("random", {}), ("random", {"offload": True, "num_resident_layers": 2}),
                                       ("tiny", {})], ids=["written", "offloaded", "compiled"])
def test_a_seed_says_the_same_on_trees(which, how, dtype):
    """The tokens and logits of speculate=False in the same step, where branches are kept."""
    models, ids, vocab_size, compile = models_of(which, dtype)
    engine = engine_for(models, gamma=10, compile=compile, sampling="coupled", block_size=24,
                        tree_size=512 if "offload" in how else 128, **how)  # so many rows take another kernel
    state = prepare(engine, ids, vocab_size, temperature=1.0)
    tokens, hashes, rejected, _ = bits(state, 300)
    kept, drafted, by_branches = state.hierarchy.outer.totals[0].tolist()
    steps = state.tape.nodes.steps
    print(f"trees {which} {dtype} {how}: {state.num_forwards} rounds, drafted {drafted}, kept {kept}, by branches "
          f"{by_branches}, rejected {rejected}, flushes {state.num_flushes}, {steps} steps a tree")
    assert by_branches >= 10 and rejected["full"] >= 10 and steps >= 3
    state.rewind(1000)
    assert bits(state, 300, plan=AUTOREGRESSION)[:2] == (tokens, hashes)


@in_half_precision
@pytest.mark.parametrize("how", [{}, {"offload": True, "num_resident_layers": 2}, {"gamma": "auto", "gamma_inner": 3},
                                 {"compile": True}, {"offload": True, "num_resident_layers": 2, "compile": True},
                                 {"compile": True, "model": WINDOWS}],
                         ids=["resident", "offloaded", "auto", "compiled", "offloaded and compiled", "windows"])
def test_greedy_bits_of_rows_over_a_shared_prefix(dtype, how, eager_to_draft):
    """Five questions about one document: the same tokens and logits with and without speculation, over many flushes,
    and the document's keys and values stay what they were."""
    document, how = random_prompt(CONTEXT, vocab_size=VOCAB), dict(how)
    engine = engine_for(random_models_in(dtype, **how.pop("model", {})), rebuild_interval=64,
                        flush_interval=128, **{"block_size": 8, **how})
    engine.buffers.vocab_size = VOCAB
    book = engine.prefill(document)
    ids = [book.ids(random_prompt(20 + 60 * i, seed=i, vocab_size=VOCAB)) for i in range(5)]
    before = [x.float().sum().item() for i in range(4) for x in book.store.layer(i, 0)]
    state = engine.prepare(ids, 2048, prefix=book, temperature=0.0, top_p=0.9, top_k=None, min_p=None, seed=[0] * 5)
    assert state.base == book.num_shared == CONTEXT
    on = bits_of_rows(state, 300)
    kept, drafted, _ = state.hierarchy.outer.totals.sum(0).tolist()
    print(f"{dtype} {how}: {len(ids)} rows, {state.num_forwards} rounds, drafted {drafted}, kept {kept}, flushes "
          f"{state.num_flushes}")
    assert kept > 10 and drafted - kept > 20 and state.num_flushes >= 10  # of random models some 25 are kept, by chance
    state.rewind(2048, AUTOREGRESSION)
    off = bits_of_rows(state, 300)
    agree = [[a == b for a, b in zip(*rows, strict=True)] for rows in zip(on, off, strict=True)]
    assert all(map(all, agree)), [(sum(row), row.index(False)) for row in agree if not all(row)]
    assert [x.float().sum().item() for i in range(4) for x in book.store.layer(i, 0)] == before


@in_half_precision
def test_a_saved_document_is_opened_by_a_gpu(dtype, tmp_path):
    """Bit for bit, through pinned memory, resident and offloaded."""
    engine = engine_for(random_models_in(dtype), levels="retrieval")
    engine.buffers.vocab_size = VOCAB
    book = engine.prefill(random_prompt(CONTEXT, vocab_size=VOCAB))
    book.save(tmp_path / "book.prefix")
    for how in ({}, {"offload": True, "num_resident_layers": 2}):
        other = engine_for(random_models_in(dtype), levels="retrieval", flush_interval=128, **how)
        opened = other.open(tmp_path / "book.prefix")
        assert (opened.store.offload is None) == (not how)
        for i in range(4):
            for one, more in zip(book.store.layer(i, 0), opened.store.layer(i, 0), strict=True):
                assert torch.equal(one[:, :CONTEXT].cpu(), more[:, :CONTEXT].cpu())
        for one, more in zip(book.store.chunk_keys, opened.store.chunk_keys, strict=True):
            assert torch.equal(one, more)


@in_half_precision
@pytest.mark.parametrize("compile", [None, True], ids=["written", "compiled"])
def test_bits_of_a_target_in_fp8(dtype, compile):
    """Products in fp8 near those of the widened weights, and bits with and without speculation; of layers whose weights
    are widened as they are used, too."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 matrix products")
    target, draft = random_models_in(dtype)
    scaled, ids = in_fp8(target), random_prompt(CONTEXT, vocab_size=VOCAB)
    x = torch.randn(1, 3000, 512, device="cuda", dtype=dtype)
    layer = scaled.layers[0].mlp.gate_up
    found, near = layer(x).float(), torch.nn.functional.linear(x, layer.widened(dtype)).float()
    assert layer.fits_products and 0.01 < (found - near).norm() / near.norm() < 0.06
    assert torch.equal(layer(x[:, :16]), layer(x[:, :16].flip(1)).flip(1))
    waits = compile is True  # half a minute for each engine: so fewer of them
    for products in (True,) if waits else (True, False):
        with mock.patch.object(fp8, "multiplies", lambda device, products=products: products):
            for sampling, temperature in (("rejection", 0.0), ("coupled", 1.0)):
                runs = []
                for levels in ("none", "triforce", "retrieval")[: 2 if waits else 3]:
                    leaves = {"leaves": 1, "leaves_inner": 2} if sampling == "coupled" else {}  # without drafts, too
                    engine = engine_for((scaled, draft), levels=levels, sampling=sampling,
                                        compile=compile if products else False, **leaves)
                    state = prepare(engine, ids, VOCAB, temperature=temperature)
                    runs.append(bits(state, 300))
                print(f"{dtype} products {products} {sampling}: rejected {[run[2] for run in runs]}")
                assert all(run[:2] == runs[0][:2] for run in runs)
                assert runs[1][2]["full"] >= 10


def test_graphs_are_captured_and_nothing_recompiles(random_models):
    """1,000 tokens more and another temperature compile nothing; a graph of the verify serves 512 tokens."""
    engine = engine_for(random_models, compile=True)
    state = prepare(engine, random_prompt(CONTEXT, vocab_size=VOCAB), VOCAB, temperature=0.8)
    start = state.lens[0]
    for _ in range(8):
        state.round()
    recorded_before, compiled_before = state.compiler.num_recorded, num_compiled()
    state.params.temperature.fill_(0.3)
    while state.lens[0] < start + 1300:
        state.round()
    anew = state.compiler.num_recorded - recorded_before
    assert num_compiled() == compiled_before > 10 and anew <= 2 * (1300 // STRIDE) + 8
    # The latter: a retrieval step, and those of its draft.
    steps = [state.hierarchy.outer.step, state.hierarchy.inner._drafting_round]
    print("graphs recorded:", [len(step.graphs) for step in steps])
    assert all(step.graphs for step in steps) and len(state.hierarchy.outer.step.graphs) <= 1300 // STRIDE + 3


@pytest.mark.parametrize("rows", [1, 16])
def test_attention_of_many_sequences(rows):
    """40 sequences of 8 heads are more than the kernel splits the keys of."""
    q = torch.randn(40, 8, rows, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(40, 8, 2100, 128, device="cuda", dtype=torch.bfloat16)[:, :, :2080] for _ in range(2))
    out, lse = attention.dense(q, k, v)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    scores = (q.double() @ k.double().transpose(-1, -2)) * 128**-0.5
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batch,heads,rows,dim,keys", [(1, 4, 1, 256, 2048), (1, 8, 64, 64, 1152), (1, 2, 24, 128, 128),
                                                       (3, 4, 16, 256, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_a_ring(batch, heads, rows, dim, keys, dtype):
    """Of one sequence as a state of parts, whose rows may see none of a part, or of all."""
    make = {"device": "cuda", "dtype": dtype}
    torch.manual_seed(0)
    q, near = torch.randn(2, batch, heads, rows, dim, **make)
    k, v = torch.randn(2, batch, heads, keys, dim, **make)
    for first, stop in ((0, keys), (keys // 2, keys), (keys // 3, keys // 2), (5, 6), (7, 7)):
        place = torch.arange(keys, device="cuda")
        seen = ((place >= first) & (place < stop)).expand(batch, rows, -1)
        bias = attention.fold_mask(seen, 1, dtype)
        found = attention.ring(q, k, v, bias)
        assert found[0].ndim == (5 if batch == 1 else 4)
        other = [torch.where(seen[0, 0, :, None], x, 30 * torch.randn_like(x)) for x in (k, v)]  # what nobody sees
        for one, same in zip(attention.merge_parts(*found), attention.merge_parts(*attention.ring(q, *other, bias)),
                             strict=True):
            assert stop == first or torch.equal(one, same)
        own = near, torch.full(q.shape[:3], -1.0, device="cuda")  # another state
        scores = (q.double() @ k.double().mT * dim**-0.5).masked_fill(~seen[:, None], float("-inf"))
        weights = torch.cat([scores, own[1][..., None].double()], -1).softmax(-1)
        expected = weights[..., :-1] @ v.double() + weights[..., -1:] * near.double()
        torch.testing.assert_close(attention.join([own, found]).double(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("batch,heads,rows,dim", [(1, 4, 1, 64), (1, 4, 8, 128), (1, 2, 64, 128), (1, 1, 5, 256),
                                                  (2, 2, 8, 64), (1, 32, 3, 96), (5, 4, 1, 64), (5, 8, 16, 128),
                                                  (40, 8, 4, 128), (3, 4, 70, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_up_to_lengths_on_the_device(batch, heads, rows, dim, dtype):
    """In one graph for all lengths: attention over each sequence's keys before its length, and over none behind it.
    The bits of a sequence follow from its own length alone. Of few KV heads in parts."""
    make = {"device": "cuda", "dtype": dtype}
    torch.manual_seed(0)
    q = torch.randn(batch, heads, rows, dim, **make)
    drawn = torch.randn(2, batch, heads, 4096, dim, **make)
    k, v = kv = drawn.clone()
    lengths, places = torch.full((batch,), 300, device="cuda", dtype=torch.int32), attention.places(k)

    def attend():
        parts = attention.parts_up_to(lengths, 2048, places, rows, fused=True)
        assert len(parts.lengths) == (attention.PARTS if batch * heads <= 4 else 1)
        spread = q.expand(len(parts.lengths), *q.shape).contiguous()
        return attention.merge_parts(*attention.up_to(spread, k, v, parts))

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend()
    said = {}
    for counts in ([1], [128], [1000, 1, 0], [1537], [2048, 0, 300, 128], [2048, 2048, 1000]):
        lengths.copy_(torch.tensor([counts[i % len(counts)] or int(batch == 1) for i in range(batch)]))
        kv.copy_(drawn)
        graph.replay()
        before = out.clone(), lse.clone()
        behind = torch.arange(4096, device="cuda") >= lengths[:, None]
        kv.masked_fill_(behind[:, None, :, None], float("nan"))
        graph.replay()
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
        for i, count in enumerate(lengths.tolist()):
            if count == 0:
                assert (lse[i] <= attention.EMPTY).all() and (out[i] == 0).all()
                continue
            bias = torch.zeros(1, 1, 1, count, device="cuda")
            here = slice(i, i + 1)
            expected, expected_lse = attention.masked(q[here].double(), k[here, :, :count].double(),
                                                      v[here, :, :count].double(), bias)
            torch.testing.assert_close(out[here].double(), expected, rtol=2e-2, atol=5e-3)
            torch.testing.assert_close(lse[here].double(), expected_lse, rtol=1e-3, atol=1e-3)
            kept = said.setdefault((i, count), (out[i].clone(), lse[i].clone()))
            assert torch.equal(kept[0], out[i]) and torch.equal(kept[1], lse[i])


def test_a_round_has_one_host_sync(random_models, monkeypatch):
    state = prepare(engine_for(random_models), random_prompt(CONTEXT, vocab_size=VOCAB), VOCAB, temperature=0.8)
    for _ in range(60):
        state.round()
    seen, read = [], Outbox.read

    def allowed(outbox):
        torch.cuda.set_sync_debug_mode("default")
        seen.append(read(outbox))
        torch.cuda.set_sync_debug_mode("error")
        return seen[-1]

    monkeypatch.setattr(Outbox, "read", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            state.round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 60


@in_half_precision
def test_a_draft_that_was_left_out_catches_up_by_a_graph(dtype):
    """It then drafts what one drafts that has just read all."""
    engine = engine_for(random_models_in(dtype), levels="draft", gamma=5, max_seq_len=1024)
    state = prepare(engine, random_prompt(100, vocab_size=VOCAB), VOCAB, temperature=0.8, new=200)
    outer, drafter, laws = state.hierarchy.outer, state.hierarchy.sources["model"], []
    for _ in range(4):  # two of them warm the step up
        for _ in range(7):
            state.round(AUTOREGRESSION)
        state.round(DraftPlan(3, "model"))
    for _ in range(20):
        state.round(AUTOREGRESSION)
    replayed = len(drafter._reading.graphs)
    with torch.inference_mode():
        for anew in (False, True):
            if anew:
                drafter.prefill(0, state.lens[0])
                drafter.open([1024])
            else:
                drafter.catch_up(state.lens)
            drafter.propose(outer.length, DraftPlan(3, "model"), outer.draft_probs)
            laws.append(outer.draft_probs[0, 0].float())
    assert replayed == len(drafter._reading.graphs) == 1
    torch.testing.assert_close(*laws, atol=2e-3, rtol=0.1)


@pytest.mark.parametrize("compile", [None, True], ids=["written", "compiled"])
def test_a_call_with_other_settings_has_its_own_law(random_models, compile):
    """What was recorded where no row has a bias leaves it out: a call with one has other graphs in the same buffers."""
    engine = engine_for(random_models, compile=compile)
    ids, said = random_prompt(2048, vocab_size=VOCAB), []
    for options in [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 1.0},
                    {"temperature": 1.0, "top_p": 1.0, "logit_bias": {7: 1e4}}] * 2:
        said.append(engine.generate(ids, 60, seed=1, ignore_eos=True, **options).tokens)
        graphs = engine.buffers.state.hierarchy.outer.step.graphs
    assert said[:3] == said[3:] and said[2] == [7] * 60 and said[0] != said[1] and len(set(said[1])) > 20
    assert len({key[0] for key in graphs}) == 3


@in_half_precision
def test_offsets_and_batches(dtype):
    """Rows of different lengths, side by side: tokens and logits hashes of each, with speculation and without."""
    models = random_models_in(dtype)
    prompts = [random_prompt(3000, vocab_size=VOCAB), random_prompt(1700, seed=2, vocab_size=VOCAB), [5]]
    engine = make_engine(models[0], models[1], budget=512, flush_interval=128, max_batch_size=3,
                         prefill_chunk_size=2048)
    state = engine.prepare(prompts, 1000, temperature=0.0, top_p=None, top_k=None, min_p=None, seed=[1, 2, 3])
    on = bits_of_rows(state, 300)
    assert state.hierarchy.outer.totals[:, 1].min() >= 300 and state.num_flushes >= 6  # drafted
    state.rewind(1000)
    assert bits_of_rows(state, 300, plan=AUTOREGRESSION) == on
    # Of rows that have ended, one key is read, and the others say what they said.
    state.rewind(1000)
    for _ in range(5):
        state.round()
    state.close_row(0)
    for keys in state.cache.prefix.k:
        keys[0, :, 1:] = float("nan")
    texts = [[]] * 3
    while min(map(len, texts[1:])) < 300:
        state.round()
        texts = [text[len(prompt) :] for text, prompt in zip(state.texts(), prompts, strict=True)]
    assert state.cache.prefix.own_len[0] == 1 and len(texts[0]) < 60
    for text, said in zip(texts, on, strict=True):
        assert text[:300] == [token for token, _ in said][: len(text)]
    assert len(state.hierarchy.outer.step.graphs) <= 4  # of each kind of plan, one for all lengths


@in_half_precision
@pytest.mark.parametrize("more", [{}, {"compile": True}, {"draft_cache": "query"},
                                  {"sampling": "coupled", "leaves": 1, "leaves_inner": 2}],
                         ids=["written", "compiled", "follows", "leaves"])
def test_long_views_are_read_as_the_prefix(dtype, more, monkeypatch):
    """By its kernel, apart from the tail. Of a text that fits its view all drafts are kept, of another as many as of a
    view before the tail, and no bits depend on them."""
    models, kept = random_models_in(dtype), {}
    prompts = [random_prompt(3000, vocab_size=VOCAB), random_prompt(800, seed=2, vocab_size=VOCAB), [5]]
    for long in (0, 16_384):
        monkeypatch.setattr(kv_cache, "LONG_VIEW", long)
        engine = make_engine(models[0], budget=2048, flush_interval=128, max_batch_size=3, gamma=4, gamma_inner=1,
                             **{"compile": None, **more})
        state = engine.prepare(prompts, 2000, temperature=1.0 if "sampling" in more else 0.0, top_p=None, top_k=None,
                               min_p=None, seed=[1, 2, 3])
        view = state.hierarchy.view
        assert view.joined == bool(long) and view.length_on_device == (not long)
        on = bits_of_rows(state, 300)
        kept[long], drafted = state.hierarchy.outer.totals[:, 0].tolist(), state.hierarchy.outer.totals[:, 1].tolist()
        print(f"views read {'with the tail' if long else 'as the prefix'}, {dtype} {more}: drafted {drafted}, kept "
              f"{kept[long]}, flushes {state.num_flushes}")
        assert min(drafted) >= 200 and state.num_flushes >= 6 and view.selected == [True, False, False]
        assert all(a >= 0.9 * b for a, b in zip(kept[long][1:], drafted[1:], strict=True))
        state.rewind(2000)
        assert bits_of_rows(state, 300, plan=AUTOREGRESSION) == on
    assert abs(kept[0][0] - kept[16_384][0]) <= 5 + 0.1 * kept[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_keys(dtype):
    """One kernel: nearly what plain products give, no weight for rows that see nothing, the same bits in any place."""
    torch.manual_seed(0)
    for kv_heads, group, rows, keys in ((8, 4, 4, 256), (32, 1, 8, 128), (4, 4, 2, 1024)):
        shape = [(4, kv_heads, n, 128) for n in (group * rows, 2048, 2048)]
        q, k, v = (torch.randn(one, device="cuda", dtype=dtype) for one in shape)
        k, v = k[:, :, 128 : 128 + keys], v[:, :, 128 : 128 + keys]
        seen = torch.arange(keys, device="cuda") < torch.tensor([0, 5, keys // 2, keys], device="cuda")[:, None]
        bias = attention.fold_mask(seen[:, None].expand(-1, rows, -1), group, dtype)
        out, lse = attention.masked(q, k, v, bias, long=True)
        expected = attention._plain(q.double(), k.double(), v.double(), False, bias.double())
        torch.testing.assert_close(out[1:].double(), expected[0][1:], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[1:].double(), expected[1][1:], atol=1e-4, rtol=1e-4)
        assert lse.isfinite().all() and (lse[0] < -60_000).all()
        own, other = (attention.dense(q, k[:, :, at], v[:, :, at]) for at in (slice(64), slice(64, None)))
        for one, mine in zip(attention.merge(own, (out, lse)), own, strict=True):
            assert torch.equal(one[0], mine[0].float())
        assert torch.equal(attention.join([own, other, (out, lse)])[0], attention.join([own, other])[0])
        alone = attention.masked(q[2:3, :, 1:2], k[2:3], v[2:3], bias[2:3, :, 1:2], long=True)
        assert torch.equal(alone[0][0, :, 0], out[2, :, 1]) and torch.equal(alone[1][0, :, 0], lse[2, :, 1])


@pytest.mark.parametrize("words", [32_000, 128_256])
def test_a_race_has_the_same_winners_on_a_gpu(words):
    """As it is written, and compiled: the noise is the CPU's, bit for bit."""
    law = (3 * torch.randn(2, 8, words, generator=torch.Generator().manual_seed(0))).softmax(-1)
    seed, position = torch.tensor([5, -(2**62)]), torch.arange(8).expand(2, -1)

    def race(law, seed, position):
        key = sampling.key_of(seed, position)[..., None]
        noise = gumbel.exponential(key, torch.arange(law.shape[-1], device=law.device))
        return noise, gumbel._first(noise / law.double(), 3)

    expected = race(law, seed, position)
    torch._dynamo.reset()
    for call in (race, torch.compile(race, dynamic=False, options=OPTIONS)):
        found = call(law.cuda(), seed.cuda(), position.cuda())
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(gumbel.draw(law, seed, position), expected[1][..., 0])


@pytest.mark.parametrize("rows", [1, 4])
def test_laws_and_draws_of_a_batch_over_a_large_vocabulary(rows):
    """As they are written and compiled, and in two steps where the vocabulary is summed up: what a CPU says of the
    same numbers."""
    batch, vocab_size = 16, 128_256
    logits = torch.randn(batch, rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    u = torch.rand(batch, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = []
    for device, compiled in (("cpu", False), ("cuda", False), ("cuda", True)):
        params = sampling.SamplingParams(batch, device)
        params.set(temperature=0.8, top_p=[0.5, 0.9, 1.0, 0.99] * 4, top_k=None, min_p=None, seed=0)

        def both(logits, u, params=params):
            law = sampling.probabilities(logits, params)
            return law, sampling.sample(law, u)

        call = torch.compile(both, dynamic=False) if compiled else both
        made.append([x.cpu() for x in call(logits.to(device), u.to(device))])
    law, tokens = made[0]
    for found_law, found_tokens in made[1:]:
        torch.testing.assert_close(found_law, law, rtol=1e-3, atol=1e-4)
        assert (found_tokens != tokens).float().mean() < 0.1  # a draw at a border may fall to the other side
        assert (found_law.gather(2, found_tokens[..., None]) > 0).all()


def offloading(models, resident=0, **kw):
    target, draft = models
    return make_engine(target, draft, gamma=6, gamma_inner=2, block_size=16, prefill_chunk_size=4096,
                       flush_interval=128, budget=512, max_seq_len=24_576, offload=True, num_resident_layers=resident,
                       **{"piece_tokens": 1024, "compile": None, **kw})


@in_half_precision
@pytest.mark.parametrize("resident,piece,more", [(0, 1024, {}), (2, 1024, {}), (0, 12_288, {}), (2, 12_288, {}),
                                                 (0, 1024, WINDOWS), (1, 12_288, WINDOWS)])
def test_offloaded_greedy_bits(dtype, resident, piece, more):
    """512 tokens at 16K, streamed from pinned memory: the same bits whatever drafts. In few pieces, as a graph. Layers
    with a window stay on the device."""
    ids, random_models = random_prompt(CONTEXT, vocab_size=VOCAB), random_models_in(dtype, **more)
    state = prepare(offloading(random_models, resident, piece_tokens=piece), ids, VOCAB)
    tokens, hashes, rejected, _ = bits(state, NEW)
    graphs = state.hierarchy.outer.step.graphs
    assert len(graphs) >= 3 if piece > 1024 else not graphs
    print(f"offloaded, {resident} resident layers: rejected {rejected}, flushes {state.num_flushes}, "
          f"rebuilds {state.hierarchy.view.num_rebuilds}")
    assert min(rejected.values()) >= 20 and state.num_flushes >= 2 and state.hierarchy.view.num_rebuilds >= 2
    host = state.cache.prefix.offload.host
    assert all(kv.is_pinned() for kv in host.values()) and list(host) == ([1, 3] if more else [0, 1, 2, 3])[resident:]
    state.rewind(1000)
    assert bits(state, NEW, plan=AUTOREGRESSION)[:2] == (tokens, hashes)
    # The same split points (one piece), on the device and streamed.
    alike = {"block_size": 16, "retrieval": False, "draft": "ngram", "piece_tokens": 24_576, "flush_interval": 128,
             "prefill_chunk_size": 4096, "max_seq_len": 24_576}
    engines = [make_engine(random_models[0], compile=None, offload=offload, **alike) for offload in (True, False)]
    streamed, device = (bits(prepare(engine, ids, VOCAB), 64, plan=AUTOREGRESSION)[:2] for engine in engines)
    print(f"one piece: tokens equal {streamed[0] == device[0]}, logits hashes equal {streamed[1] == device[1]}")
    assert streamed[0] == device[0]


def test_a_graph_waits_for_the_copies_before_it(random_models, monkeypatch):
    """However late they come."""
    ids, found, copy = random_prompt(CONTEXT, vocab_size=VOCAB), [], Offload.copy

    def late(self, *args):
        with torch.cuda.stream(self.copy_stream):
            torch.cuda._sleep(3_000_000)
        copy(self, *args)

    for slow in (False, True):
        monkeypatch.setattr(Offload, "copy", late if slow else copy)
        state = prepare(offloading(random_models, piece_tokens=12_288, compile=None), ids, VOCAB)
        found.append(bits(state, 40, plan=AUTOREGRESSION)[:2])
        assert state.hierarchy.outer.step.graphs
    assert found[0] == found[1]


def test_what_a_graph_gathers_is_what_a_step_gathers(random_models, monkeypatch):
    """One that is recorded, and one that is not: the same bits, and the same view, which holds what was selected."""
    ids, found = random_prompt(CONTEXT, vocab_size=VOCAB), []
    for few in (2, 0):
        monkeypatch.setattr("triforce.cache.offload.FEW_PIECES", few)
        engine = offloading(random_models, piece_tokens=12_288, compile=None)
        state = prepare(engine, ids, VOCAB)
        said = bits(state, 300)[:2]
        assert bool(state.hierarchy.outer.step.graphs) == (few > 0)
        state.hierarchy.view.choose(0)
        state.round(AUTOREGRESSION)
        view = state.hierarchy.view
        assert_view_holds_its_selection(view)
        found.append((said, [x.clone() for x in (*view.k, *view.v)]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_prefill_of_many_chunks_has_the_same_bits_compiled_or_not(random_models):
    """It runs as it is written; from host memory, its keys are summed up in other pieces."""
    ids, found = random_prompt(CONTEXT, vocab_size=VOCAB), []
    for compile, offload in ((True, False), (False, False), (False, True)):
        engine = make_engine(random_models[0], prefill_chunk_size=1024, flush_interval=128, retrieval=False,
                             compile=compile, max_seq_len=24_576, offload=offload)
        prefix = prepare(engine, ids, VOCAB).cache.prefix
        found.append([prefix.load(i, 0, 0, prefix.lens[0]).cpu() for i in range(4)])
    for compiled, written, offloaded in zip(*found, strict=True):
        assert torch.equal(compiled, written)
        assert (offloaded - written).float().norm() / written.float().norm() < 0.02


def test_a_closed_stream_leaves_no_copy_and_no_pinned_memory():
    engine = triforce.load("tiny", device="cuda", offload=True, max_seq_len=24_576)
    ids = engine.encode_prompt(default_document())[:CONTEXT]

    class Cut(Exception):
        pass

    def cut(share):
        if share > 0.5:
            raise Cut

    with pytest.raises(Cut):
        list(engine.stream(ids, 64, on_prefill=cut))
    offload = engine.buffers.state.cache.prefix.offload
    assert offload.copy_stream.query()
    expected = engine.generate(ids, 64, temperature=0).tokens
    stream = engine.stream(ids, 64, temperature=0)
    for _ in range(3):
        next(stream)
    stream.close()
    assert offload.copy_stream.query() and torch.cuda.current_stream().query()
    assert engine.generate(ids, 64, temperature=0).tokens == expected
    hosts = list(offload.host.values())
    del offload
    engine.release()
    assert not any(kv.is_pinned() for kv in hosts)


def test_pinning_refused_and_a_device_that_is_full(random_models, monkeypatch):
    ids = random_prompt(4096, vocab_size=VOCAB)
    engine = offloading(random_models)
    engine.buffers.vocab_size = VOCAB
    register, calls = torch.cuda.cudart().cudaHostRegister, []

    class Refuses:
        def __getattr__(self, name):
            return getattr(cudart, name)

        def cudaHostRegister(self, *args):  # noqa: N802
            calls.append(args)
            return register(*args) if len(calls) < 3 else 2

    cudart = torch.cuda.cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refuses())
    with pytest.raises(UserError, match="refuses .* GiB more .*--num-resident-layers"):
        engine.generate(ids, 16)
    monkeypatch.undo()
    assert len(engine.generate(ids, 16, temperature=0).tokens) == 16
    hog = torch.empty(int(torch.cuda.mem_get_info()[0]) - 2**26, dtype=torch.uint8, device="cuda")
    engine.buffers.placement = replace(engine.placement, max_seq_len=None)
    with pytest.raises(UserError, match="this needs|ran out of memory"):
        engine.generate(random_prompt(60_000, vocab_size=VOCAB), 16)
    del hog
    torch.cuda.empty_cache()
    assert len(engine.generate(ids, 16, temperature=0).tokens) == 16


def test_a_graph_gets_memory_that_the_allocator_keeps():
    """What was freed in this process is kept for others than a graph's own pool; under a cap there is nothing else."""
    device, size = torch.device("cuda"), 2**28
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 3 * size + 2**25
    out = torch.zeros(size, dtype=torch.uint8, device=device)
    level = Compiler(device, recorder=torch.cuda.Stream())
    step = level.step(lambda: out.copy_(torch.ones_like(out) + 1))
    try:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        for _ in range(3):
            step()  # first as it is written: its memory is kept from then on
        assert len(step.graphs) == 1 and int(out[-1]) == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_all_work_is_on_one_stream(tmp_path):
    """Or else all steps of the process are slower. A user's own stream takes its turn with that one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine = triforce.load("tiny", device="cuda", dtype="bfloat16", gamma=4)
        book = engine.prefill(TEXT)
        book.save(tmp_path / "book")
        answers = engine.generate(["And then", "So"], 64, seed=0, prefix=engine.open(tmp_path / "book"))
        assert engine.generate(TEXT, 64, seed=0).stats.block_efficiency > 1
        logits = engine.logits([answers[0].tokens])
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    streams = Counter(event["args"]["stream"] for event in events if event.get("cat") == "kernel")
    assert len(streams) == 1 and sum(streams.values()) > 1000, streams
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != engine.compute_stream.cuda
    expected = engine.logits([answers[0].tokens])
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):  # read by this stream as soon as they are there
            assert torch.equal(engine.logits([answers[0].tokens]), expected) and torch.equal(logits, expected)
