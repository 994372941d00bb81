"""What a view chooses by: queries of kept tokens, each with its own heads; and that it holds what it chose."""

import pytest
import torch
from conftest import (
    assert_view_holds_its_selection,
    bits_of_rows,
    make_engine,
    make_state,
    positions,
    random_prompt,
    run_rounds,
)

from triforce import attention
from triforce.cache import kv_cache
from triforce.cache.views import RetrievalView, chunk_scores
from triforce.decode.plan import AUTOREGRESSION, DraftPlan


def chosen(state, row: int = 0) -> list[list[set[int]]]:
    """Positions of a row's view, by layer and head."""
    state.hierarchy.view.catch_up(range(state.batch))
    return [[set(head) for head in positions(state.hierarchy.view, row, i).tolist()]
            for i in range(state.target.config.n_layer)]


@pytest.mark.parametrize("kind", ["retrieval", "snapkv"])
def test_the_prompts_end_chooses_however_it_is_cut(pair, kind):
    prompt = random_prompt(400)
    views = [chosen(make_state(pair[0], None, [prompt], prefill_chunk_size=size, draft_cache=kind))
             for size in (1000, 64, 37)]
    assert views[0] == views[1] == views[2]
    other = make_state(pair[0], None, [prompt[:-8] + random_prompt(8, seed=9)], draft_cache=kind)
    assert chosen(other) != views[0]


def test_queries_of_the_last_conversation_do_not_choose(pair):
    """The last chunk of this prompt has three tokens, fewer than there is room for."""
    prompt, made = random_prompt(400), {"prefill_chunk_size": 132}
    fresh = make_state(pair[0], None, [prompt], **made)
    used = make_state(pair[0], None, [random_prompt(333, seed=1)], **made)
    run_rounds(used, 30)
    used.reset()
    used.prefill(0, prompt)
    used.begin(100)
    assert chosen(used) == chosen(fresh)


def test_a_view_is_chosen_when_a_round_first_reads_it(pair, watched):
    """A text that never drafts from its views chooses none. One that begins to, much later, goes by its newest
    tokens."""
    made = watched(RetrievalView, "_select_and_copy", lambda view: int(view._row))
    state = make_state(*pair, [random_prompt(300), random_prompt(40, seed=1)], sampling={"temperature": 0.9})
    view, without, drafts = state.hierarchy.view, DraftPlan(3, "model"), DraftPlan(4, "model", True, 2, 2)
    for _ in range(2):  # once more after a return to the prompts' ends
        # Until both have outgrown the budget, and no flush is near.
        while min(state.cache.lens) <= 64 or max(map(int.__sub__, state.lens, state.cache.lens)) > 8:
            state.round(without)
        assert not made and all(view.selected)
        state.round(drafts)
        assert made[:2] == [0, 1] and view.num_rebuilds == len(made[2:])
        for row in range(2):
            assert_view_holds_its_selection(state.hierarchy.view, row)
        state.rewind(512)
        made.clear()


def test_chunks_are_scored_where_products_leave_the_range_of_float16():
    torch.manual_seed(0)
    queries, keys = 60 + torch.randn(4, 8, 64), 60 + 4 * torch.randn(2, 20, 64)
    scores = chunk_scores(queries.half(), keys.half(), torch.ones(8), torch.zeros(20))
    exact = chunk_scores(queries.double(), keys.double(), torch.ones(8), torch.zeros(20))
    assert (queries @ keys.transpose(1, 2).repeat_interleave(2, 0)).min() > 65_504
    assert torch.isfinite(scores).all() and torch.equal(scores.argmax(1), exact.argmax(1))


def up_to_by_loops(q, k, v, parts):
    """`attention.up_to` on a CPU: a key at a time that a part's place and length name, a row at a time."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("inf"))
    tokens = sum((n - 1) * (x // k.stride(2)) for n, x in zip(k.shape[:3], k.stride(), strict=False)) + 1
    k, v = (x.as_strided((tokens, q.shape[-1]), (x.stride(2), 1)) for x in (k, v))
    flat = zip(q.flatten(0, 2), out.flatten(0, 2), lse.flatten(0, 2), parts.keys.tolist(),
               parts.lengths.flatten().tolist(), strict=False)
    for rows, outs, sums, first, length in flat:
        for i in range(len(rows) * (length > 0)):
            scores = (k[first : first + length] * rows[i]).sum(-1) * q.shape[-1] ** -0.5
            sums[i], outs[i] = scores.logsumexp(0), scores.softmax(0) @ v[first : first + length]
    return out, lse


@pytest.mark.parametrize("more", [{}, {"draft_cache": "query"},
                                  {"sampling": "coupled", "leaves": 1, "leaves_inner": 2}])
def test_long_views_are_read_as_the_prefix(pair, more, monkeypatch):
    """Up to a length on the device, apart from the tail: bits stay, and as many drafts are kept as of views before the
    tail; of rows that fit their view all."""
    monkeypatch.setattr(attention, "spans", lambda *_: True)
    monkeypatch.setattr(attention, "up_to", up_to_by_loops)
    prompts, kept = [random_prompt(500), random_prompt(300, seed=2), [5]], {}
    for long in (0, 4096):
        monkeypatch.setattr(kv_cache, "LONG_VIEW", long)
        engine = make_engine(pair[0], budget=384, flush_interval=32, max_batch_size=3, gamma=4, gamma_inner=1, **more)
        state = engine.prepare(prompts, 300, temperature=1.0 if "sampling" in more else 0.0, seed=[1, 2, 3])
        view = state.hierarchy.view
        assert (view.joined, view.length_on_device) == (long > 0, long == 0)
        said = bits_of_rows(state, 40)
        kept[long] = state.hierarchy.outer.totals[:, :2].tolist()
        assert view.selected == [True, False, False] and state.num_flushes >= 3
        state.rewind(300)
        assert bits_of_rows(state, 40, plan=AUTOREGRESSION) == said
    assert kept[0] == kept[4096] and all(a == b for a, b in kept[0][1:]) and kept[0][0][0] < kept[0][0][1]


def test_views_of_two_heads_are_long_at_twice_the_tokens(pair, monkeypatch):
    monkeypatch.setattr(attention, "spans", lambda *_: True)
    assert pair[0].config.n_kv_head == 2
    for limit, joins in ((192, True), (191, False)):
        monkeypatch.setattr(kv_cache, "LONG_VIEW", limit)
        engine = make_engine(pair[0], budget=384, flush_interval=32)
        assert engine.prepare([random_prompt(64)], 9, temperature=0.0, seed=[0]).cache.joins_view == joins
