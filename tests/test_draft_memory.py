"""A draft's long memory: what it chooses by, and how much it computes anew."""

import pytest
from conftest import make_state, random_prompt


def state_of(pair, prompt, kind, budget=64):
    return make_state(*pair, [prompt], retrieval=False, draft_cache=kind, budget=budget, gamma=3)


def test_a_snapkv_draft_chooses_by_the_prompts_end(pair):
    """Another choice for another end, and for each head."""
    prompt = random_prompt(400)
    ends = [prompt, prompt[:-9] + random_prompt(9, seed=5)]
    views = [state_of(pair, text, "snapkv").sources["model"].memory.choice.positions(0, 0).sort().values.tolist()
             for text in ends]
    assert views[0] != views[1] and views[0][0] != views[0][1]


@pytest.mark.parametrize("kind", ["full", "snapkv"])
def test_at_a_flush_no_more_than_the_interval_is_computed_anew(pair, kind):
    state = state_of(pair, random_prompt(400), kind)
    sizes = []
    hook = pair[1].embedding.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    while state.num_flushes < 4:
        state.round()
    hook.remove()
    assert sizes.count(16) == 4 and max(sizes) == 16


def test_a_used_window_drafts_as_a_fresh_one(pair):
    """Also where the new prompt is shorter than what the window held."""
    laws = []
    for used in (False, True):
        state = make_state(*pair, [random_prompt(300, seed=1) if used else random_prompt(20)], retrieval=False, gamma=3,
                           sampling={"temperature": 0.8}, draft_window=32)
        if used:
            state.round()
            state.reset()
            state.prefill(0, random_prompt(20))
            state.begin(100)
        state.round()
        laws.append(state.outer.draft_probs[:, :3].tolist())
    assert laws[0] == laws[1]
