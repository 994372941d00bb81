"""How much is drafted, in how many rows it is checked, and by which law: seen from outside, by what models are run."""

import copy

import pytest
from conftest import make_state, random_prompt, run_rounds

from triforce.decode.plan import AUTOREGRESSION, ONE_ROW, PADDED, Padding


def rows_of_passes(model, rounds) -> list[int]:
    """Rows of each forward pass of a model in some rounds."""
    rows = []
    hook = model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    rounds()
    hook.remove()
    return rows


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_view_of_everything_drafts_by_the_targets_law(pair, temperature):
    state = make_state(*pair, [random_prompt(100)], budget=512, sampling={"temperature": temperature})
    run_rounds(state, 100)
    assert state.hierarchy.acceptance_rates()[0]["full"] > 0.99


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_a_draft_takes_a_step_for_each_token_that_it_proposes(pair, gamma):
    target, draft = pair
    state = make_state(target, draft, [random_prompt(100)], retrieval=False, gamma=gamma)
    rows = rows_of_passes(draft, lambda: [state.round() for _ in range(5)])
    assert rows == ([4] + [1] * (gamma - 1)) * 5


@pytest.mark.parametrize("gamma, gamma_inner", [(3, 2), (5, 1), (6, 3), (7, 7)])
def test_what_is_always_right_is_drafted_and_kept_up_to_gamma(pair, gamma, gamma_inner):
    """The target as its own draft, and a view of everything: rounds emit gamma tokens and one, but before flushes."""
    target, _ = pair
    state = make_state(target, target, [random_prompt(96)], budget=512, gamma=gamma, gamma_inner=gamma_inner)
    for _ in range(18):  # as far as the draft's window holds all there is
        room = 16 - state.lens[0] % 16  # no round emits past a flush position
        assert len(state.round()[0]) == min(gamma + 1, room)


def test_where_rows_cost_steps_have_those_that_are_needed(pair):
    """As on a CPU, where nothing is greedy: a verify of gamma tokens and one, and of one where nothing is drafted."""
    target, draft = copy.deepcopy(pair[0]), pair[1]
    for gamma, gamma_inner in ((3, 1), (5, 2)):
        state = make_state(target, draft, [random_prompt(100)], drafting=pair[0], gamma=gamma, gamma_inner=gamma_inner,
                           sampling={"temperature": 0.8})
        state.rewind(500, padding=Padding(plain=False, drafts=False))
        assert rows_of_passes(target, lambda state=state: state.round()) == [gamma + 1]
        state.rewind(500, padding=PADDED)
        for plan, rows in ((None, 4 if gamma == 3 else 8), (AUTOREGRESSION, 4), (ONE_ROW, 1)):
            assert rows_of_passes(target, lambda state=state, plan=plan: state.round(plan)) == [rows]
