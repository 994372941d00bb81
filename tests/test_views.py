"""What a view chooses by: queries of kept tokens, each with its own heads; and that it holds what it chose."""

import pytest
import torch
from conftest import assert_view_holds_its_selection, make_state, positions, random_prompt, run_rounds

from triforce.cache.views import RetrievalView, chunk_scores
from triforce.decode.plan import DraftPlan


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
