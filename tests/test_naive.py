"""The library says what the naive method says, token for token. So the naive method has the library's distribution. A
promise of the whole library, not of one module."""

import itertools
from dataclasses import replace

import pytest
import torch
from conftest import assert_view_holds_its_selection, make_state, positions, random_prompt, slow

from triforce import naive
from triforce.model import ModelConfig, Transformer
from triforce.naive import TriForce

VOCAB, PROMPT, NEW = 20, 100, 40  # tokens; 40 new ones cross two flushes at least
SIZES = {"budget": 48, "chunk_size": 4, "gamma": 5}
LEVELS = {"hierarchy": (True, True), "retrieval": (True, False), "draft": (False, True)}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.8}, "cut": {"temperature": 1.2, "top_p": 0.8},
        "coupled": {"temperature": 0.8, "coupled": True}}


@pytest.fixture(scope="module")
def models():
    return make_pair()


def make_pair(**more):
    """A target with grouped queries, and its first layer as the draft. Their vocabularies are padded."""
    config = ModelConfig(VOCAB + 3, 32, 2, 4, 2, 8, 48, qk_norm=True, qkv_bias=True, **more)
    target = Transformer.random(config, seed=0, dtype=torch.float64, std=0.25)
    draft = Transformer.random(replace(config, n_layer=1), dtype=torch.float64)
    draft.load_state_dict({name: target.state_dict()[name] for name in draft.state_dict()})
    for linear in (target.layers[1].attention.out, target.layers[1].mlp.down):
        linear.weight *= 0.5  # so that the draft is often right
    return target, draft


def both(models, levels: str, sampling: dict, seed: int, sink: int, window: int):
    """A DecodeBatch with a fixed plan, and the naive method with the same."""
    retrieval, drafts = LEVELS[levels]
    target, draft = models[0], models[1] if drafts else None
    prompt, sampling = random_prompt(PROMPT, seed, VOCAB), dict(sampling)
    coupled = sampling.pop("coupled", False)
    state = make_state(target, draft, [prompt], vocab_size=VOCAB, rule="coupled" if coupled else "rejection",
                       sampling={**sampling, "seed": [seed]}, retrieval=retrieval, flush_interval=16,
                       rebuild_interval=1, draft_sink=sink, draft_window=window, **SIZES)
    same = TriForce(target, draft, VOCAB, rounds=state.pilot.default.rounds, retrieval=retrieval, window=16,
                    interval=16, newest=8, draft_sink=sink, draft_window=window, coupled=coupled, seed=seed,
                    **{"top_p": 1.0, **sampling, **SIZES})
    return state, same, prompt


def counts(check: naive.Check, emitted: int) -> torch.Tensor:
    """Accepted and drafted tokens, as the library counts: what was checked beyond a cut is drafted again."""
    is_cut = check.num_accepted >= emitted
    return torch.tensor([emitted, emitted] if is_cut else [check.num_accepted, len(check.drafted)])


def inner_counts(brought: naive.Brought, gamma: int) -> torch.Tensor:
    """The same of all rounds of the retrieval level, which ends at gamma tokens."""
    total, left = torch.zeros(2, dtype=torch.int64), gamma
    for check in brought.inner:
        emitted = min(len(check.tokens), left)
        total, left = total + counts(check, emitted), left - emitted
    return total


def assert_same_view(state, same: TriForce, text: list[int], first: int) -> None:
    """Each layer and head of the library's view holds the tokens that the naive method chooses."""
    state.hierarchy.view.catch_up([0])
    assert_view_holds_its_selection(state.hierarchy.view)
    for i, seen in enumerate(same.choose_view(text, first)):
        if i not in state.hierarchy.view.layers:  # it has a window, and reads its newest keys
            continue
        held = positions(state.hierarchy.view, 0, i)
        assert held.shape[1] == same.budget == int(seen[0].sum())
        assert seen.gather(1, held).all()


# A draft's window of the newest tokens, or all of the text. A sink beside a window is not compared: in the library the
# distance to it depends on the tokens that a step of the draft takes in.
SEEN = {"newest": (0, 24), "all": (4, 256)}
QUICK = [("newest", "hierarchy", "greedy", 0), ("newest", "hierarchy", "coupled", 0),
         ("newest", "retrieval", "drawn", 0), ("newest", "draft", "drawn", 0), ("all", "hierarchy", "cut", 0)]
CASES = list(itertools.product(SEEN, LEVELS, SAMPLINGS, (0, 1)))


@pytest.mark.parametrize("seen,levels,sampling,seed,more", [
    *((*case, {}) for case in QUICK), *slow(*((*case, {}) for case in CASES if case not in QUICK)),
    *(("newest", "hierarchy", "drawn", 0, more) for more in ({"nope_layers": (0,)},  # without rotation; with a window
                                                             {"sliding_layers": (0,), "sliding_window": 48}))])
@torch.inference_mode()
def test_the_library_says_what_the_naive_method_says(models, seen, levels, sampling, seed, more):
    models = make_pair(**more) if more else models
    state, same, prompt = both(models, levels, SAMPLINGS[sampling], seed, *SEEN[seen])
    text, first, outer, inner = list(prompt), len(prompt) - 1 - same.newest, torch.zeros(2), torch.zeros(2)
    for brought in same.generate(prompt):
        if same.retrieval:
            assert_same_view(state, same, text, first)
        assert state.round() == [brought.tokens]
        outer += counts(brought.outer, len(brought.tokens))
        inner += inner_counts(brought, same.gamma)
        assert state.hierarchy.outer.totals[0, :2].tolist() == outer.tolist()
        if same.retrieval:
            assert state.hierarchy.inner.totals[0, :2].tolist() == inner.tolist()
        first = len(text) - 1
        text += brought.tokens
        if len(text) >= PROMPT + NEW:
            break
    assert state.num_flushes >= 2
    assert 5 <= outer[0] <= outer[1] - 5
    assert levels != "hierarchy" or 5 <= inner[0] <= inner[1] - 5
    if sampling in ("greedy", "coupled"):
        assert same.plain(prompt, len(text) - PROMPT) == text[PROMPT:]


def test_the_demonstration(capsys):
    """In 80 columns: each kind of token occurs, and the text is that of plain decoding."""
    naive.main()
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert [f"Round {number}" in said for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "PojVuxXab" in said.partition("passes of the full level brought")[2]
    assert all(said.count(word) >= 2 for word in ("keeps none", "keeps all", "(bonus)", "(recovered)"))
    assert said.endswith("the same text.\n")
