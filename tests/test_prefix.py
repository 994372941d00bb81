"""Rows that share a prefix: what they compute, and that they leave it as it is."""

import hashlib

import pytest
import torch
from conftest import (
    assert_view_holds_its_selection,
    bits_of_rows,
    make_engine,
    make_state,
    random_prompt,
    run_rounds,
    slow,
)

from triforce import attention
from triforce.attention import merge, merge_parts, partial, parts_of_keys
from triforce.kv import blocks
from triforce.packed import PackedPrefix
from triforce.plan import AUTOREGRESSION
from triforce.prefix import asked, common_length

DOCUMENT = random_prompt(200)
PROMPTS = [DOCUMENT + random_prompt(count, seed=seed) for seed, count in enumerate((3, 40, 12))]
BASE = 192  # of flush intervals of 16
KINDS = {"resident": {}, "offloaded": {"num_resident_layers": 1, "piece_tokens": 48}, "packed": {"pack": True},
         "packed in part": {"pack": True, "num_resident_layers": 1, "piece_tokens": 48},
         "snapkv": {"draft_cache": "snapkv"}, "draft alone": {"retrieval": False}}
FAST = ("packed", "offloaded", "packed in part")


def digest(store) -> str:
    found = hashlib.sha256()
    for _, tensor in store.tensors():
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def calls(monkeypatch):
    """How many queries each attention over a shared prefix had."""
    seen, function = [], blocks.over_shared

    def counted(prefix, i, q, *args, **more):
        seen.append(q.shape[0] * q.shape[2])
        return function(prefix, i, q, *args, **more)

    monkeypatch.setattr(blocks, "over_shared", counted)
    return seen


@pytest.mark.parametrize("kind", [*FAST, *slow(*sorted(KINDS.keys() - {*FAST}))])
def test_greedy_bits_of_rows_over_a_shared_prefix(pair, kind, calls, monkeypatch):
    """The same with speculation on and off; the tokens are those of rows that share nothing; the document's keys and
    values stay what they were. Rows flush, at different times."""
    monkeypatch.setattr("triforce.kv.prefix.MIN_TOKENS", 100)
    made = {"keep_logits": True, "max_new_tokens": 60, **KINDS[kind]}
    state = make_state(*pair, PROMPTS, base=BASE, **made)
    shared = state.cache.prefix.shared
    num_packed = None if shared.packed is None else len(shared.packed)
    assert num_packed == {"packed": 2, "packed in part": 1}.get(kind)
    assert (shared.offload is not None) == ("num_resident_layers" in KINDS[kind])
    before, state_before = digest(shared), state.num_flushes
    on = bits_of_rows(state, 36)
    assert calls and min(calls) >= len(PROMPTS) and state.num_flushes > state_before
    assert state.hierarchy.outer.totals[:, 0].sum() > 0 and digest(shared) == before
    state.rewind(60, AUTOREGRESSION)
    assert bits_of_rows(state, 36) == on
    alone = make_state(*pair, PROMPTS, **{**made, "num_resident_layers": None, "pack": False})
    assert run_rounds(alone, 36) == [[token for token, _ in row] for row in on]


def test_rows_are_prefilled_side_by_side(pair, calls):
    """In one pass over the shared prefix, or one after the other, where they do not fit a chunk: with the same K/V and
    last queries, but for rounding."""
    together = make_state(*pair, PROMPTS, base=BASE)
    assert len(calls) == together.target.config.n_layer - 1  # the last layer's attention is not needed
    calls.clear()
    apart = make_state(*pair, PROMPTS, base=BASE, prefill_chunk_size=50)
    assert len(calls) == 3 * (apart.target.config.n_layer - 1)
    for row, prompt in enumerate(PROMPTS):
        for i in range(2):
            one, other = (state.cache.load(i, row, 0, len(prompt) - 1) for state in (together, apart))
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(*(state.cache.queries[i][row] for state in (together, apart)), atol=1e-4,
                                       rtol=1e-4)
        assert torch.equal(*(state.cache.query_weight[row] for state in (together, apart)))
    assert together.lens == apart.lens == [len(prompt) - 1 for prompt in PROMPTS]


@pytest.mark.parametrize("many,packed", [(10_000, True), (3, False)])
def test_a_packed_prefix_is_for_few_queries_of_a_prefill(pair, many, packed, monkeypatch):
    """And for all of a round: see test_packed.py."""
    monkeypatch.setattr("triforce.kv.prefix.MIN_TOKENS", 100)
    monkeypatch.setattr(blocks, "MANY_ROWS", many)
    seen, partial, reads, read = [], PackedPrefix.partial, [], blocks.PrefillLayer.read
    monkeypatch.setattr(PackedPrefix, "partial", lambda prefix, q: seen.append(prefix) or partial(prefix, q))

    def counted(layer, q):
        before = len(seen)
        states = read(layer, q)
        reads.append(len(seen) - before)
        return states

    monkeypatch.setattr(blocks.PrefillLayer, "read", counted)
    state = make_state(*pair, PROMPTS, base=BASE, pack=True)
    assert reads and any(reads) == packed
    seen.clear()
    state.round(AUTOREGRESSION)
    assert seen == state.cache.prefix.shared.packed


def test_a_view_is_chosen_from_all_of_the_prefix(pair):
    """Its sink and most of its chunks lie in what is shared, its window in what is the row's own."""
    alone, over = (make_state(pair[0], None, PROMPTS[1:2], base=base, budget=64) for base in (0, BASE))
    for state in (alone, over):
        view, full = state.hierarchy.view, state.cache.prefix
        view.catch_up(range(state.batch))
        for i in range(2):
            at = view.positions(0, i)
            assert at.min() == 0 and at.max() == full.lens[0] - 1 and (at < BASE).any() and (at >= BASE).any()
            whole = full.load(i, 0, 0, full.lens[0])
            for half, held in zip(whole, (view.k, view.v), strict=True):
                rows = at[..., None].expand(-1, -1, held[i].shape[-1])
                assert torch.equal(held[i][0][:, : view.held], half.gather(1, rows))
    chosen = [state.hierarchy.view.positions(0, 1).sort().values for state in (alone, over)]
    assert torch.equal(*chosen)


def test_what_streams_past_is_gathered_for_all_rows(pair):
    """The views of an offloaded document are empty until the first verify streams it past; then they hold what they
    say."""
    prompts = PROMPTS[::2]  # neither fills a flush interval with its next token
    state = make_state(*pair, prompts, base=BASE, num_resident_layers=1, piece_tokens=48)
    assert state.hierarchy.view.awaits_pieces
    with pytest.raises(AssertionError):
        assert_view_holds_its_selection(state, 0)
    state.round(AUTOREGRESSION)
    assert not state.hierarchy.view.awaits_pieces
    for row in range(len(prompts)):
        assert_view_holds_its_selection(state, row)


@pytest.mark.parametrize("rows,interval", [(1, 1), (2, 32)])
def test_views_of_what_streams_past_are_renewed_now_and_then(pair, rows, interval):
    """Of one row with every verify, which takes no time beside the copies. Of several rows gathering would."""
    state = make_state(*pair, PROMPTS[:rows], base=BASE, num_resident_layers=0, piece_tokens=48, rebuild_interval=None,
                       flush_interval=16, max_new_tokens=200)
    assert {policy.interval for policy in state.pilot.rebuilds} == {interval}


def test_parts_of_the_keys_merge_to_the_whole():
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 64, 64))
    whole = partial(q, k, v)
    parts = [x[0].unflatten(1, (4, -1)).transpose(0, 1) for x in (k, v)]
    out, lse = merge_parts(*attention._plain(q.expand(4, -1, -1, -1), *parts, None))
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
    halves = merge(partial(q, k[:, :, :32], v[:, :, :32]), partial(q, k[:, :, 32:], v[:, :, 32:]))
    torch.testing.assert_close(halves[0], out)
    assert parts_of_keys(8, 64, 122_880) == 16 and parts_of_keys(32, 512, 122_880) == 1
    assert parts_of_keys(4, 1, 40) == 8  # as many as divide the keys


def test_over_shared_is_attention_of_each_row():
    q, k, v = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
    out, lse = attention.over_shared(q, k, v)
    for row in range(3):
        expected = partial(q[row, None], k, v)
        torch.testing.assert_close(out[row, None], expected[0])
        torch.testing.assert_close(lse[row, None], expected[1])


def test_common_length():
    assert common_length([1, 2, 3]) == 3
    assert common_length([1, 2, 3], [1, 2, 4], [1, 2]) == 2
    assert common_length([1], [2]) == 0 and common_length([], [2]) == 0
    for count in range(9):
        assert common_length(list(range(8)), [*range(count), *[99] * (8 - count)][:8]) == min(count, 8)


def test_a_question_ends_the_last_message_of_the_user():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "d"}
    assert asked([system], "q") == [system, {"role": "user", "content": "q"}]
    assert asked([system, user], "q") == [system, {"role": "user", "content": "d\n\nq"}]
    assert user["content"] == "d"


@pytest.mark.quick
@pytest.mark.parametrize("length", [16, 47, 48, 64])
def test_a_document_of_whole_intervals_is_continued_without_a_question(pair, length):
    """Its last token is pending, and no part of what is shared."""
    engine = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64, max_batch_size=3)
    document, law = random_prompt(length), {"temperature": 0.0, "ignore_eos": True}
    book = engine.prefill(document)
    assert book.num_shared == length // 16 * 16
    expected = make_engine(*pair, flush_interval=16, chunk_size=4, budget=64, reuse=False).generate(document, 8, **law)
    question = random_prompt(5, seed=1)
    alone = engine.generate(question, 8, prefix=book, **law)
    samples = engine.generate("", 8, prefix=book, num_samples=3, **law)
    assert [one.tokens for one in samples] == [expected.tokens] * 3
    assert engine.generate("", 8, prefix=book, **law).tokens == expected.tokens
    assert [one.tokens for one in engine.generate(["", question], 8, prefix=book, **law)] == [expected.tokens,
                                                                                             alone.tokens]
