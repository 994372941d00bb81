"""Rows that share a prefix: what they compute, and that they leave it as it is."""

import hashlib

import pytest
import torch
from conftest import (
    assert_view_holds_its_selection,
    bits_of_rows,
    make_state,
    positions,
    random_prompt,
    run_rounds,
    slow,
)

from triforce import attention
from triforce.attention import dense, merge, merge_parts, parts_of_keys
from triforce.cache import blocks
from triforce.cache.views import COMMON, RetrievalView
from triforce.decode.plan import AUTOREGRESSION, DraftPlan

DOCUMENT = random_prompt(200)
PROMPTS = [DOCUMENT + random_prompt(count, seed=seed) for seed, count in enumerate((3, 40, 12))]
BASE = 192  # of flush intervals of 16
KINDS = {"resident": {}, "offloaded": {"num_resident_layers": 1, "piece_tokens": 48}, "packed": {"pack": True},
         "packed in part": {"pack": True, "num_resident_layers": 1, "piece_tokens": 48},
         "snapkv": {"draft_cache": "snapkv"}, "draft alone": {"retrieval": False, "prefill_chunk_size": 50}}
FAST = ("packed", "offloaded", "packed in part")


def digest(store) -> str:
    found = hashlib.sha256()
    for tensor in store.tensors():
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("kind", [*FAST, *slow(*sorted(KINDS.keys() - {*FAST}))])
def test_greedy_bits_of_rows_over_a_shared_prefix(pair, kind, monkeypatch, watched):
    """The same with speculation on and off; the tokens are those of rows that share nothing; the document's keys and
    values stay what they were. Rows flush, at different times."""
    # How many queries each attention over the document had.
    queries = watched(blocks, "over_shared", lambda prefix, i, q, *args, **more: q.shape[0] * q.shape[2])
    monkeypatch.setattr("triforce.cache.prefix.MIN_TOKENS", 100)
    made = {"max_new_tokens": 60, **KINDS[kind]}
    state = make_state(*pair, PROMPTS, base=BASE, **made)
    shared = state.cache.prefix.shared
    num_packed = None if shared.packed is None else len(shared.packed)
    assert num_packed == {"packed": 2, "packed in part": 1}.get(kind)
    assert (shared.offload is not None) == ("num_resident_layers" in KINDS[kind])
    before, state_before = digest(shared), state.num_flushes
    on = bits_of_rows(state, 36)
    assert queries and min(queries) >= len(PROMPTS) and state.num_flushes > state_before
    assert state.hierarchy.outer.totals[:, 0].sum() > 0 and digest(shared) == before
    state.rewind(60, AUTOREGRESSION)
    assert bits_of_rows(state, 36) == on
    alone = make_state(*pair, PROMPTS, **{**made, "num_resident_layers": None, "pack": False})
    assert run_rounds(alone, 36) == [[token for token, _ in row] for row in on]


@pytest.mark.parametrize("made", [{}, {"tree_size": 16, "sampling": {"temperature": 0.9}, "rule": "coupled"}],
                         ids=["chains", "trees"])
def test_rows_choose_together_what_they_read_of_what_they_share(pair, made):
    """The sink, a window, and the chunks that the kept queries of all rows attend to most. What is a row's own lies in
    a view of its own, whole."""
    state = make_state(*pair, PROMPTS, base=BASE, budget=128, recent=0.5, **made)
    view, cache = state.hierarchy.view, state.cache
    common, window = view.shared, view.shared.window_size
    assert window == 12 and common.budget == 64  # of 60 without a sink, half of the share `recent`
    while state.num_flushes < 2:
        rows = state.round(DraftPlan(4, "model", True, 2, 2))
        common.choose(0)
        assert_view_holds_its_selection(state.hierarchy.view.shared)
        for i in range(2):
            scores = 0
            for row, new in enumerate(rows):
                kept = cache.query_weight[row] > 0
                assert int(kept.sum()) == len(new) > 0
                queries = cache.queries[i][row][:, kept].unflatten(0, (state.target.config.n_kv_head, -1)).flatten(1, 2)
                keys = cache.prefix.shared.k[i][0, :, 4 : BASE - window].unflatten(1, (-1, 4)).mean(2)
                products = queries @ keys.transpose(1, 2) * keys.shape[-1] ** -0.5
                scores = scores + products.softmax(-1).sum(1) / len(new)
            best = 1 + scores.topk(common.num_selected).indices
            tokens = (best[..., None] * 4 + torch.arange(4)).flatten(1)
            ends = torch.cat([torch.arange(4), torch.arange(BASE - window, BASE)]).expand(len(best), -1)
            expected = torch.cat([tokens, ends], 1).sort(-1).values
            assert torch.equal(positions(common, 0, i).sort(-1).values, expected)
        for row, length in enumerate(cache.prefix.own_lens):
            assert view.lens[row] == length and not view.selected[row]
            for i in range(2):
                expected = cache.prefix.load(i, row, BASE, BASE + length)
                assert torch.equal(view.load(i, row, 0, length), expected)
    assert max(cache.prefix.own_lens) > 0


@pytest.mark.parametrize("kind", ["retrieval", "snapkv", "streaming"])
def test_what_rows_share_and_what_is_their_own_outgrow_their_views(pair, kind):
    """Each view holds what it says, also once rows have many more tokens of their own than it has room for."""
    prompts = [DOCUMENT + random_prompt(count, seed=count) for count in (150, 120)]
    state = make_state(*pair, prompts, base=BASE, max_new_tokens=100, capacity=512, draft_cache=kind)
    view = state.hierarchy.view
    while min(state.lens) < max(map(len, prompts)) + 40:
        state.round(DraftPlan(4, "model", True, 2, 2))
    assert view.selected == [True, True] and state.num_flushes >= 4
    assert 0 <= view.shared.budget - view.shared.held < view.shared.chunk_size
    assert (view.num_rebuilds > 2) == view.kind.renews
    assert_view_holds_its_selection(state.hierarchy.view.shared)
    for row in range(2):
        if view.kind.renews:
            view.choose(row)
            assert_view_holds_its_selection(view, row)
    if kind == "streaming":
        common = view.shared
        expected = [*range(4), *range(BASE - common.held + 4, BASE)]
        assert positions(common, 0, 0)[0].sort().values.tolist() == expected


def test_what_rows_share_is_chosen_anew_once_for_all(pair, watched):
    made = watched(RetrievalView, "_select_and_copy", lambda view: view)
    state = make_state(*pair, PROMPTS, base=BASE, rebuild_interval=8, budget=160, recent=0.5, capacity=320)
    state.round(AUTOREGRESSION)
    assert not made
    for count in range(1, 4):
        while state.hierarchy.view.num_rebuilds < count:
            state.round(DraftPlan(4, "model", True, 2, 2))
        assert made == [state.hierarchy.view.shared] * (count + 1)  # as first read, and since
        assert set(state.pilot.since) == {0, 1, 2, COMMON} and state.pilot.since[COMMON] == 0


def test_a_number_repeats_a_text_over_what_streams_past(pair):
    """What an earlier call selected drafts for nobody: until a view is gathered, rounds draft nothing. It is
    empty until the first verify streams the document past; then it holds what it says."""
    state = make_state(*pair, PROMPTS, base=BASE, num_resident_layers=0, piece_tokens=48, gamma=4,
                       sampling={"temperature": 1.0, "seed": [3, 4, 5]})
    view, texts, first = state.hierarchy.view.shared, [], []
    with pytest.raises(AssertionError):
        assert_view_holds_its_selection(view)
    for _ in range(3):
        assert view.awaiting
        first.append([len(new) for new in state.round()])
        assert state.last_round.plan.gamma == 0 and not view.is_stale and not view.awaiting
        assert_view_holds_its_selection(view)
        texts.append(run_rounds(state, 40))
        assert state.last_round.plan.retrieval
        state.rewind(60)
    assert first == [[1, 1, 1]] * 3 and texts[0] == texts[1] == texts[2]


def test_parts_of_the_keys_merge_to_the_whole():
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 64, 64))
    whole = dense(q, k, v)
    parts = [x[0].unflatten(1, (4, -1)).transpose(0, 1) for x in (k, v)]
    states = [x[:, None] for x in attention._plain(q.expand(4, -1, -1, -1), *parts, False)]  # [P, B, K, R, D]
    out, lse = merge_parts(*states)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
    for garbage in (0.0, 0.37):  # of a part whose keys are hidden, first
        hidden = [torch.cat([torch.full_like(x[:1], value), x]).float() for x, value in zip(
            states, (9.0, attention.HIDDEN + garbage), strict=True)]
        for one, same in zip(merge_parts(*hidden), (out, lse), strict=True):
            torch.testing.assert_close(one, same.float(), atol=1e-6, rtol=1e-6)
    halves = merge(dense(q, k[:, :, :32], v[:, :, :32]), dense(q, k[:, :, 32:], v[:, :, 32:]))
    torch.testing.assert_close(halves[0], out)
    assert parts_of_keys(8, 64, 122_880) == 16 and parts_of_keys(32, 512, 122_880) == 1
    assert parts_of_keys(4, 1, 40) == 8  # as many as divide the keys
