"""What a DecodeBatch keeps of its rounds, rewinding, plans; when a selection is renewed; how much is drafted and in how
many rows it is checked."""

import copy

import pytest
import torch
from conftest import make_engine, make_state, random_pair, random_prompt, run_rounds

from triforce.decode.plan import AUTOREGRESSION, ONE_ROW, PADDED, DraftPlan, Padding
from triforce.decode.verifier import RowRound


@pytest.mark.parametrize("plan", [None, AUTOREGRESSION, ONE_ROW])
def test_kept_queries_are_those_of_a_fresh_prefill(pair, plan):
    """After each round, for the tokens that it added and with weight for no others: a selection goes by these."""
    target, draft = pair
    texts = [random_prompt(90), random_prompt(70, seed=1)]
    state = make_state(target, draft, texts, sampling={"temperature": 0.6}, gamma=6, gamma_inner=2)
    counts = set()
    for _ in range(12):
        for row, tokens in enumerate(state.round(plan)):
            texts[row], count = texts[row] + tokens, len(tokens)
            counts.add(count)
            fresh, weight = make_state(target, None, [texts[row]]), state.cache.query_weight[row]
            assert weight.tolist() == [1.0] * count + [0.0] * (len(weight) - count)
            for kept, expected in zip(state.cache.queries, fresh.cache.queries, strict=True):
                torch.testing.assert_close(kept[row, :, :count], expected[0, :, -count:], rtol=1e-4, atol=1e-5)
    assert state.num_flushes >= 1 and (counts == {1}) == (plan is not None)


class Steady:
    """In place of a controller: one plan, and a record of what it is told."""

    def __init__(self, plan: DraftPlan):
        self.plan, self.told, self.rounds = plan, {}, 0

    def choose(self, **known) -> DraftPlan:
        return self.plan

    def timed(self, plan, drafting, checking): ...

    def update(self, num_tokens, **observed):
        self.rounds += 1
        for name, (hits, tests) in observed.items():
            assert 0 <= hits <= tests and num_tokens >= 1
            before = self.told.get(name, (0, 0))
            self.told[name] = before[0] + hits, before[1] + tests


@pytest.mark.parametrize("temperature,top_p", [(0.5, 1.0), (1.2, 0.9)])
def test_levels_of_one_law_reject_nothing(temperature, top_p):
    """The target drafts for itself, and both its memory and the view hold all there is: every level applies the same
    temperature once, and a bonus token of the level in between is no miss of the draft."""
    target, _ = random_pair(torch.float64)
    state = make_state(target, target, [random_prompt(100)], budget=512, draft_window=512, gamma=5, gamma_inner=2,
                       flush_interval=64, sampling={"temperature": temperature, "top_p": top_p})
    state.pilot.controller = Steady(DraftPlan(5, "model", True, 2, 2))
    run_rounds(state, 100)
    (rates,), told = state.hierarchy.acceptance_rates(), state.pilot.controller.told
    assert rates["full"] > 0.99 and rates["retrieval"] > 0.99
    assert told["retrieval"][0] == told["retrieval"][1] >= 80
    # Of 5 tokens the draft made 4: one is the bonus of the first of the two rounds in between.
    assert told["model"][0] == told["model"][1] > 3.5 * state.pilot.controller.rounds


def test_a_view_is_renewed_every_so_many_tokens(pair):
    def brought(*counts: int) -> list[RowRound]:
        return [RowRound([5] * count, [], 0, 0, False, 0) for count in counts]

    pilot, due = make_state(*pair, [random_prompt(200)], rebuild_interval=16).pilot, []
    pilot.since = {0: 0.0, 1: 12.0}
    for _ in range(20):
        due.append(pilot.is_due(0, brought(3)))
        if due[-1]:
            pilot.rebuilt([0])
    assert due == [i % 6 == 5 for i in range(20)]
    # In the mean of the rows that go on. Where all have ended, nothing is due.
    assert [pilot.is_due(1, brought(*one)) for one in ((3, 2), (0, 0), (0, 2), (0, 0))] == [False, False, True, False]


@pytest.mark.parametrize("settings", [{}, {"retrieval": False}])
def test_rewinding_a_batch_repeats_it(pair, settings):
    """To the bit, what is drafted included, also after rounds without the draft."""
    prompts = [random_prompt(150), random_prompt(77, seed=1), random_prompt(40, seed=2)]
    state = make_state(*pair, prompts, sampling={"temperature": 0.8}, **settings)

    def rounds():
        state.hierarchy.outer.draft_probs.zero_()  # rows beyond what is drafted hold anything
        said = [(state.round(), state.hierarchy.outer.draft_probs.tolist()) for _ in range(30)]
        return said, state.hierarchy.acceptance_rates()

    first = rounds()
    for left_out in (0, 5, 50):
        for _ in range(left_out):
            state.round(AUTOREGRESSION)
        state.rewind(512)
        assert state.hierarchy.acceptance_rates() == [{}, {}, {}]  # of this answer alone
        assert state.hierarchy.view is None or state.hierarchy.view.num_rebuilds == 0
        assert rounds() == first


def test_acceptance_is_that_of_the_level_that_checked(pair):
    """A view of everything drafts what the full level says; a random draft does not."""
    state = make_state(*pair, [random_prompt(100)], budget=512, sampling={"temperature": 0.8})
    run_rounds(state, 60)
    rates = state.hierarchy.acceptance_rates()[0]
    assert rates["full"] > 0.99 > 0.9 > rates["retrieval"] > 0


def rows_of_passes(model, rounds) -> list[int]:
    """Rows of each forward pass of a model in some rounds."""
    rows = []
    hook = model.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    rounds()
    hook.remove()
    return rows


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


@pytest.mark.parametrize("count, temperature, plain", [(1, 1.0, 4), (3, 1.0, 1), (3, 0.0, 4)])
def test_a_compiled_step_of_several_texts_that_checks_nothing_has_one_row(count, temperature, plain, pair, monkeypatch):
    """Compiled with the others, before the first text; greedy steps keep the bits of those that check drafts."""
    monkeypatch.setattr("triforce.runtime.graphs.compiled", lambda function: function)
    target, states = copy.deepcopy(pair[0]), []
    engine = make_engine(target, pair[1], gamma=3, block_size=4, budget=64, flush_interval=16, chunk_size=4,
                         compile=True, max_batch_size=3)
    prompts = [random_prompt(60, seed=i) for i in range(count)]
    seen = rows_of_passes(target, lambda: states.append(engine.prepare(
        prompts, 20, temperature=temperature, top_p=0.9, top_k=None, min_p=None, seed=[0] * count)))
    assert (1 in seen) == (count > 1)
    [state] = states
    assert rows_of_passes(target, lambda: state.round(DraftPlan(padded=state.pilot.padding.plain))) == [plain]
