"""Buffers against a slow twin: one growing cache, or a loop over positions. Of triforce/cache as a whole."""

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, kept, make_state, positions_in_view, random_pair, random_prompt, run_rounds, slow
from reference import dense_logits

from triforce import attention
from triforce.attention import dense, rotate
from triforce.cache import prefix as prefix_module
from triforce.cache.streaming import StreamingBlock, StreamingCache
from triforce.cache.views import RetrievalView
from triforce.decode.drafters import model
from triforce.decode.pilot import Pilot
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.engine.logprobs import logits_of
from triforce.model import ModelConfig, Transformer
from triforce.runtime.graphs import Compiler


def assert_the_dense_twin_says(target, prompt: list[int], tokens: list[int]) -> None:
    """Greedy tokens are those of one dense forward pass."""
    logits = dense_logits(target, torch.tensor([prompt + tokens]))
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("growth", [prefix_module.GROWTH, 16])
def test_ragged_rows_equal_the_dense_twin(pair, growth, monkeypatch):
    """Also where what a batch adds is attended to in several steps."""
    monkeypatch.setattr(prefix_module, "GROWTH", growth)
    prompts = [random_prompt(100), random_prompt(33, seed=1), [7], random_prompt(64, seed=2)]
    for prompt, tokens in zip(prompts, run_rounds(make_state(*pair, prompts), 40), strict=True):
        assert_the_dense_twin_says(pair[0], prompt, tokens)


def test_where_nothing_has_flushed_no_kernel_reads_lengths():
    """Of a batch over a shared prefix, each row of which has 64 tokens to come; afterwards one bound serves all."""
    config = ModelConfig(64, 32, 2, 4, 2, 8, 64)
    common = prefix_module.PrefixStore(config, 1, 128, "cpu", torch.float32)
    common.truncate(0, 128)
    store = prefix_module.PrefixStore(config, 2, 512, "cpu", torch.float32, length_on_device=True, shared=common)
    store.open([192, 192])
    assert store.extent == (0, 0)
    store.truncate(1, 160)
    assert store.extent == (384, 384)


@pytest.fixture
def lengths_on_device(monkeypatch):
    """The flash kernel of a GPU that has few processors. For each step: lengths, their bound, and how many parts; and
    for each call how many sequences."""
    given, calls, parts_up_to = [], [], attention.parts_up_to

    def kernel(q, k, v, queries, keys, max_q, max_k, *_, seqused_k):
        lens = seqused_k.tolist()
        calls.append(len(q))
        assert q.is_contiguous() and queries.tolist() == list(range(len(q) + 1)) and len(keys) == len(q) + 1
        assert max_q == 1 and max(lens) <= max_k and q.shape[1] > k.shape[1] == 1
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q))
        for i, (place, n) in enumerate(zip(keys.tolist(), lens, strict=False)):
            out[i], lse[:, i] = (x[0, 0] for x in dense(q[i][None, None], *(x[None, None, place : place + n, 0]
                                                                            for x in (k, v))))
            lse[:, i] = lse[:, i] if n else float("inf")  # as the kernel says
        return out, lse

    def recorded(lengths, bound, *args, **kw):
        parts = parts_up_to(lengths, bound, *args, **kw)
        given.append((lengths.tolist(), bound, len(parts.lengths)))
        return parts

    monkeypatch.setattr(attention, "spans", lambda device, dtype, head_dim: True)
    monkeypatch.setattr(attention, "parts_up_to", recorded)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    return given, calls


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("base", [0, 96])
@pytest.mark.parametrize("own,expected", [((100, 33, 1, 64), {160}), ((60, 60, 33, 40), {128}), ((40,), {32, 64})])
def test_rows_whose_lengths_are_on_the_device_equal_the_dense_twin(pair, base, own, expected, fused,
                                                                   lengths_on_device, monkeypatch):
    """Several rows with one bound from the first round to the last, some at a time; or all in parts, if what merges
    them is compiled."""
    if fused:
        monkeypatch.setattr(Compiler, "__call__", lambda self, function: partial(function))
    for module, name, value in ((prefix_module, "STRIDE", 32), (attention, "PARTS", 4), (attention, "FEW_BLOCKS", 99),
                                (attention, "LONG", 48), (attention, "UNIT", 1)):
        monkeypatch.setattr(module, name, value)
    prompts = [random_prompt(base) + random_prompt(n, seed=n) for n in own]
    state = make_state(*pair, prompts, base=base, max_new_tokens=60)
    texts = run_rounds(state, 40)
    assert state.num_flushes >= 2 * len(own)
    for prompt, tokens in zip(prompts, texts, strict=True):
        assert_the_dense_twin_says(pair[0], prompt, tokens)
    lens, bounds, counts = zip(*lengths_on_device[0], strict=True)
    assert set(counts) == {4 if fused else 1} and (max(lengths_on_device[1]) == 3) == (len(own) > 1 and not fused)
    assert {bound for bound in bounds if bound} == expected
    assert all(len(set(column)) >= 3 for column in zip(*lens, strict=True))  # each row's grow


def test_what_the_kernel_says_lies_alike_in_one_call_and_in_several(lengths_on_device, monkeypatch):
    """Compiled code, which reads it, knows the strides."""
    q, k, v, states = torch.randn(1, 3, 2, 5, 8), torch.randn(3, 2, 96, 8), torch.randn(3, 2, 96, 8), []
    for long in (97, 96):
        monkeypatch.setattr(attention, "LONG", long)
        lengths = torch.tensor([96, 0, 7], dtype=torch.int32)
        parts = attention.parts_up_to(lengths, 96, attention.places(k), 5, fused=False)
        states.append(attention.up_to(q, k, v, parts))
    assert lengths_on_device[1] == [6, 3, 3]
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*states, strict=True))


def test_snapkv_is_sink_window_and_best_tokens(pair):
    """Single tokens, by smoothed attention from the prompt's end, chosen once."""
    state = make_state(pair[0], None, [random_prompt(400)], draft_cache="snapkv")
    cache, view = state.cache, state.hierarchy.view
    prefix = cache.prefix.lens[0]
    first, last = 4, prefix - view.window_size
    chosen = []
    for layer in range(2):
        q = cache.queries[layer][0].unflatten(0, (-1, cache.group))  # [K, G, M, D]
        for head, held in enumerate(positions_in_view(state, layer)):
            keys = cache.prefix.k[layer][0, head, first:last]
            attended = sum((q[head, g, m] @ keys.T * 8**-0.5).softmax(-1) for g in range(cache.group) for m in range(8))
            padded = torch.cat([torch.zeros(3), attended, torch.zeros(3)])
            best = padded.unfold(0, 7, 1).mean(-1).topk(view.num_selected).indices
            assert set(held) == set(range(first)) | set(range(last, prefix)) | {int(p) + first for p in best}
            chosen.append(set((best + first).tolist()))
    run_rounds(state, 40)
    assert view.num_rebuilds == 0 and state.num_flushes >= 2
    assert all(chosen[2 * layer + head] <= set(held) for layer in range(2)
               for head, held in enumerate(positions_in_view(state, layer)))


@pytest.mark.parametrize("base, own", [(0, (400,)), (0, (400, 30)), (192, (90, 110))],
                         ids=["one row", "one is short", "a shared prefix"])
def test_a_view_that_follows_holds_what_a_steps_queries_attend_to(pair, base, own, monkeypatch):
    """In each step and layer the best chunk of each residue class for the pending token by mean key, softmax and sum
    over heads, and over the rows that share the view; sink and window too. A row whose prefix fits keeps it whole."""
    seen, follow = [], RetrievalView.follow

    def recorded(view, i, q):
        follow(view, i, q)
        seen.append((view, i, q.clone(), view.k[i].clone(), view.v[i].clone(), list(view.source.own_lens)))

    monkeypatch.setattr(RetrievalView, "follow", recorded)
    prompts = [random_prompt(base + n, seed=0)[:base] + random_prompt(n, seed=n) for n in own]
    state = make_state(*pair, prompts, base=base, draft_cache="query", gamma=4, rebuild_interval=10**6)
    run_rounds(state, 30)
    assert state.num_flushes and len({tuple(one[2].flatten().tolist()) for one in seen}) > 20
    differ, size = 0, 4
    for (view, i, q, k, v, lens), before in zip(seen[4:], seen, strict=False):
        source = view.source
        for row, head in itertools.product(range(len(k)), range(k.shape[1])):
            pending = q.unflatten(2, (pair[0].config.query_group, -1))[:, :, :, 0]  # [B, K, G, D]
            queries = pending[:, head].flatten(0, 1) if view.of_shared else pending[row, head]
            keys, values = source.k[i][row, head], source.v[i][row, head]
            if lens[row] <= view.budget:
                assert torch.equal(k[row, head, : lens[row]], keys[: lens[row]])
                continue
            first, last = 1, (lens[row] - view.window_size) // size
            means = torch.stack([keys[c * size : (c + 1) * size].mean(0) for c in range(first, last)])
            mass = sum((query @ means.T * 8**-0.5).softmax(-1) for query in queries)
            best = [max(range(first + (kind - first) % view.num_selected, last, view.num_selected),
                        key=lambda c: mass[c - first]) for kind in range(view.num_selected)]
            held = [size * c + j for c in best for j in range(size)]
            rest = [*range(size), *range(lens[row] - view.window_size, lens[row])]
            for mine, theirs in ((k, keys), (v, values)):
                mine = {tuple(x) for x in mine[row, head, : view.held].tolist()}
                assert mine == {tuple(theirs[p].tolist()) for p in held + rest}
            differ += before[0] is view and not torch.equal(before[3][row], k[row])
    assert differ > 20


@pytest.mark.parametrize("kind", ["retrieval", "streaming", *slow("snapkv")])
def test_newest_tokens_stay_in_the_view_across_flushes(pair, kind, monkeypatch):
    """After each flush the window, a ring of several intervals, has lost its oldest one, and nothing else has changed,
    in keys and values. With streaming, it is as wide as the budget allows, and there is nothing else but the sink."""
    monkeypatch.setattr(Pilot, "is_due", lambda *seen: False)  # or a new selection would hide it
    state = make_state(*pair, [random_prompt(400), random_prompt(310, seed=1)], budget=256, draft_cache=kind)
    view, full = state.hierarchy.view, state.cache.prefix
    assert view.window_size >= 4 * 16
    before = [[positions_in_view(state, layer, row) for layer in range(2)] for row in range(2)]
    for row, layers in enumerate(before if kind == "streaming" else []):
        sink_and_window = {*range(4), *range(full.lens[row] - 240, full.lens[row])}
        assert view.lens[row] == 244 and all(set(held) == sink_and_window for layer in layers for held in layer)
    while state.num_flushes < 14:
        flushed = list(full.lens)
        state.round()
        for row, layer in itertools.product(range(2), range(2)):
            start, held = flushed[row], positions_in_view(state, layer, row)
            oldest = set(range(start - view.window_size, full.lens[row] - view.window_size))
            for now, then in zip(held, before[row][layer], strict=True):
                assert set(now) == set(then) - oldest | set(range(start, full.lens[row]))
                assert len(set(now)) == len(now)
            at = torch.tensor(held)[..., None].expand(-1, -1, 8)
            assert torch.equal(view.v[layer][row, :, : view.held], full.v[layer][row].gather(1, at))
            before[row][layer] = held
    assert view.num_rebuilds == 0


def test_short_prefix_is_taken_whole_and_outgrows_the_budget(pair):
    target, draft = pair
    state = make_state(target, draft, [random_prompt(20)])
    sizes = set()
    while state.cache.prefix.lens[0] < 100:
        state.round()
        prefix = state.cache.prefix.lens[0]
        assert state.hierarchy.view.lens[0] == min(prefix, 64)
        sizes.add(state.hierarchy.view.lens[0])
        if prefix <= 64:
            assert positions_in_view(state)[0] == list(range(prefix)) or prefix == 0
    assert {16, 32, 48, 64} <= sizes and state.hierarchy.view.selected == [True]


def test_streaming_cache_equals_a_loop_over_positions():
    """Each query sees the sinks and the last `window` tokens, with rotary angles by rank among them."""
    draft = random_pair(torch.float64)[1]
    cache = StreamingCache(draft.config, draft.rope, batch=2, num_sink=3, window_size=10, slack=8, device="cpu",
                           dtype=torch.float64)
    assert cache.k[0].shape[2] % (8 * attention.SPLIT) == 0  # or else a GPU splits no product over all keys
    torch.manual_seed(0)
    length = 60
    keys, values, queries = (torch.randn(2, 2, length, 8, dtype=torch.float64) for _ in range(3))
    done = [0, 0]
    while max(done) < length - 4:
        rows = int(torch.randint(1, 5, ()))
        ahead = [int(torch.randint(0, 3, ())) for _ in range(2)]  # some of the rows are wrong and taken back
        start = torch.tensor(done)
        take = [torch.stack([x[b, :, done[b] : done[b] + rows] for b in range(2)]) for x in (queries, keys, values)]
        out = StreamingBlock(cache, start, rows).layer(0).write(torch.cat(take, 1))[1][0][0]
        for b in range(2):
            oldest = max(done[b] - 10 + 1, 3)
            rank = [p if p < 3 else 3 + p - oldest for p in range(length)]
            for i in range(rows):
                position = done[b] + i
                seen = [p for p in range(position + 1) if p < 3 or p > position - 10]
                turned = [rotate(keys[b, :, p], *draft.rope(torch.tensor(rank[p]))) for p in seen]
                q = rotate(queries[b, :, position], *draft.rope(torch.tensor(rank[position])))
                weights = torch.stack([(q * k).sum(-1) * 8**-0.5 for k in turned]).softmax(0)
                expected = sum(w[:, None] * values[b, :, p] for w, p in zip(weights, seen, strict=True))
                torch.testing.assert_close(out[b, :, i], expected, rtol=1e-6, atol=1e-6)
        done = [d + max(rows - a, 0) for d, a in zip(done, ahead, strict=True)]


@pytest.mark.parametrize("positions, window", [(1024, 256), (16384, 2048), (131072, 4096)])
def test_a_drafts_window_by_the_positions_of_its_checkpoint(pair, positions, window):
    draft = Transformer.random(replace(pair[1].config, max_position_embeddings=positions), dtype=torch.float32)
    state = make_state(pair[0], draft, [random_prompt(100)], capacity=8000, retrieval=False)
    assert state.hierarchy.sources["model"].cache.window_size == window


def test_a_draft_that_was_left_out_catches_up(pair):
    """It takes in what each row missed only, and drafts what one that has seen all drafts."""
    draft, prompts = pair[1], [random_prompt(700), random_prompt(650, seed=1)]
    state = make_state(*pair, prompts, draft_window=64, retrieval=False)
    drafter, probs = state.hierarchy.sources["model"], state.hierarchy.outer.draft_probs
    laws = []
    # Nothing; the last 59 tokens; so far back that it begins anew.
    for known, computed in (((699, 649), 0), ((640, 590), 2 * 59), ((30, 20), 4 + 64)):
        for row in range(2):
            drafter.prefill(row, known[row])
        drafter.open([1024] * 2)
        drafter.leave_out()
        seen = []
        hook = draft.embedding.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape[1]))
        drafter.catch_up([699, 649])
        hook.remove()
        assert sum(seen) == computed
        drafter.propose(state.hierarchy.outer.length, DraftPlan(3, "model"), probs)
        laws.append(probs[:, :3].clone())
    torch.testing.assert_close(laws[1], laws[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(laws[2], laws[0])


def test_a_packed_prefix_changes_nothing(monkeypatch, pair):
    """Tokens and logits over packed prompt, flushes and tail are those of the prefix as it is; appending unpacks."""
    monkeypatch.setattr("triforce.cache.prefix.MIN_TOKENS", 100)
    prompt, states = random_prompt(300), []
    for pack in (True, False):
        states.append(make_state(*pair, [prompt], pack=pack))
        assert (states[-1].cache.prefix.packed is not None) == pack
    said = [run_rounds(state, 40) for state in states]
    assert said[0] == said[1] and states[0].num_flushes >= 2
    logits = [logits_of(state.hierarchy.outer) for state in states]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
    for state in states:
        state.rewind(512)
        assert run_rounds(state, 20, plan=AUTOREGRESSION) == [said[0][0][:20]]
        state.prefill(0, random_prompt(50, seed=3))
        assert state.cache.prefix.packed is None
        state.begin(100)
    assert run_rounds(states[0], 10) == run_rounds(states[1], 10)


def test_positions_are_read_across_the_border_of_the_tail(pair):
    state = make_state(*pair, [random_prompt(150), random_prompt(90, seed=1)], sampling={"temperature": 0.8})
    run_rounds(state, 40)
    cache = state.cache  # rows have flushed, and their tails are partly filled
    for row, border in enumerate(cache.lens):
        for start, stop in ((0, 8), (border - 8, border), (border - 5, border + 7), (border, border + 9),
                            (border + 3, border + 9)):
            here = [cache.prefix.k[1][row, :, at] if at < border else cache.tail.kv[1][0, row, :, at - border]
                    for at in range(start, stop)]
            assert torch.equal(torch.stack(here, 1), kept(cache, 1, row, start, stop)[0])


@pytest.mark.parametrize("length", [20, 250])
def test_a_used_window_drafts_as_a_fresh_one(pair, length):
    """Where the new prompt is shorter than what the window held, and where it is longer; whatever the window held."""
    draft, laws = Transformer.random(ModelConfig(VOCAB, 16, 6, 2, 2, 8, 32), seed=1, std=0.3), []
    for used in (False, True):
        prompt = random_prompt(length)
        state = make_state(pair[0], draft, [random_prompt(300, seed=1) if used else prompt], retrieval=False, gamma=3,
                           sampling={"temperature": 0.8}, draft_window=32)
        if used:
            state.round()
            for tensor in state.hierarchy.sources["model"].cache.tensors():
                tensor[:, :, 40:] = float("nan")  # as of a text whose values overflowed
            state.reset()
            state.prefill(0, prompt)
            state.begin(100)
        state.round()
        laws.append(state.hierarchy.outer.draft_probs[:, :3].tolist())
    assert laws[0] == laws[1]


def test_a_reading_that_is_broken_off_begins_anew(pair, monkeypatch):
    """What it has written by then may lie where older tokens did."""
    state = make_state(*pair, [random_prompt(300)], retrieval=False, draft_window=32)
    drafter, begun = state.hierarchy.sources["model"], []

    def broken(cache, start, rows):
        begun.append(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "StreamingBlock", broken)
    drafter.prefill(0, 320, fresh=False)
    with pytest.raises(KeyboardInterrupt):
        drafter.open([1024])
    assert begun == [21] and drafter._seen == [0]
