"""The joint law of the next three tokens, enumerated through the production code, is the target's. A promise of the
whole library, not of one module."""

from dataclasses import replace

import pytest
import torch
from conftest import in_fp8, make_state, slow
from enumeration import joint_laws, target_law, total_variation
from reference import dense_logits, reference_filter

from triforce import fp8
from triforce.cache.views import RetrievalView
from triforce.decode.batch import DecodeBatch
from triforce.decode.controller import Controller, Costs, Rate
from triforce.decode.drafters.ngram import NgramDrafter, NgramMeter
from triforce.decode.plan import ONE_ROW, DraftPlan
from triforce.decode.verifier import Verifier
from triforce.fp8 import fp8_copy
from triforce.model import ModelConfig, Transformer

VOCAB = 3  # of the tokenizer; the models' own vocabularies are padded, differently
PROMPTS = [[0, 2, 1, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1, 2], [1, 0, 0, 2, 1, 2, 0, 1, 1, 0, 2, 2, 0, 1, 2, 1, 0, 0]]
PLAIN = {"temperature": 0.9, "top_p": 1.0, "top_k": None, "min_p": None}


@pytest.fixture(scope="module")
def models():
    target = ModelConfig(5, 16, 2, 4, 2, 8, 24)
    draft = ModelConfig(7, 16, 1, 2, 2, 8, 24)
    return (Transformer.random(target, seed=0, std=0.5, dtype=torch.float64),
            Transformer.random(draft, seed=1, std=0.5, dtype=torch.float64))


def reference_law(target, sampling):
    def next_law(tokens):
        logits = dense_logits(target, torch.tensor([tokens]))[0, -1, :VOCAB]
        for token, bias in sampling.get("logit_bias", {}).items():
            logits[token] += bias
        if sampling["temperature"] == 0:
            return [float(i == int(logits.argmax())) for i in range(VOCAB)]
        return reference_filter((logits / sampling["temperature"]).softmax(-1).tolist(), sampling)

    return next_law


def assert_lossless(models, *, levels="triforce", sampling=None, batch=64, prompts=PROMPTS, prepare=None, horizon=3,
                    drafting=None, together=False, **settings) -> None:
    """The law of what is said is the target's.

    together: rows depend on each other; the law is that of all prompts' tokens.
    """
    target, draft = models
    sampling = {**PLAIN, **(sampling or {})}
    rows = [prompts[r % len(prompts)] for r in range(batch)]
    state = make_state(target, draft if levels in ("triforce", "draft") else None, rows,
                       vocab_size=VOCAB, budget=8, capacity=48, max_new_tokens=8, sampling=sampling, drafting=drafting,
                       **{"flush_interval": 4, "chunk_size": 2, "rebuild_interval": 2, "block_size": 4,
                          "draft_window": 6, "draft_sink": 2, "retrieval": levels in ("triforce", "retrieval"),
                          **settings})
    view = state.hierarchy.view and (state.hierarchy.view.shared or state.hierarchy.view)
    assert view is None or all(view.selected)  # a true selection, not the whole prefix
    if prepare is not None:
        prepare(state)
    shared = models if drafting is None else (*models, drafting)
    laws, count = joint_laws(state, shared, prompts, horizon, together=together)
    exact = [target_law(reference_law(target, sampling), prompt, VOCAB, horizon) for prompt in prompts]
    if together:
        exact = [{(*a, *b): p * q for a, p in exact[0].items() for b, q in exact[1].items()}]
    found = [total_variation(law, other) for law, other in zip(laws, exact, strict=True)]
    assert max(found) < 1e-6, f"total variation {found} over {count} branches"
    assert all(abs(sum(law.values()) - 1) < 1e-9 for law in laws)


def name_of(case: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in case.items() if name != "prompts")


# Those that branch most have one prompt each; rows of different lengths side by side are met by the others.
CASES = [
    {"gamma": 2, "gamma_inner": 1, "prompts": PROMPTS[:1]},
    *slow({"gamma": 3, "gamma_inner": 1, "prompts": PROMPTS[:1]},
          {"gamma": 2, "gamma_inner": 2, "prompts": PROMPTS[1:]},
          {"gamma": 1, "gamma_inner": 1, "prompts": PROMPTS[1:]}),
    *slow({"gamma": 3, "gamma_inner": 2, "sampling": {"top_p": 0.9}}),
    {"gamma": 2, "gamma_inner": 1, "sampling": {"top_k": 2}},
    {"gamma": 2, "gamma_inner": 1, "sampling": {"min_p": 0.2}},
    *slow({"gamma": 2, "gamma_inner": 1, "sampling": {"logit_bias": {0: 1.5, 2: -0.7}, "top_p": 0.9}}),
    *slow({"gamma": 3, "gamma_inner": 1, "sampling": {"logit_bias": {1: float("-inf")}}}),
    {"gamma": 3, "gamma_inner": 1, "sampling": {"logit_bias": {2: -4.0}, "temperature": 0.0}},
    *slow({"levels": "draft", "gamma": 3, "sampling": {"logit_bias": {0: -2.0, 1: 0.5}}},
          {"levels": "retrieval", "gamma": 3}),
    {"levels": "draft", "gamma": 2},
    {"levels": "retrieval", "gamma": 2, "draft_cache": "snapkv", "sampling": {"top_k": 2}},
    *slow({"gamma": 3, "gamma_inner": 1, "draft_cache": "query", "sampling": {"top_k": 2}}),
    {"gamma": 2, "gamma_inner": 1, "draft_cache": "streaming", "sampling": {"top_k": 2}},
    {"levels": "draft", "gamma": 3, "sampling": {"top_p": 0.8, "temperature": 1.3}},
]
SHARED = [PROMPTS[0][:8] + PROMPTS[1][:7], PROMPTS[0][:8] + PROMPTS[1][3:14]]  # with own prefixes of 4 and 8 tokens


@pytest.mark.parametrize("case", [
    *slow({"gamma": 3, "gamma_inner": 1, "sampling": {"top_k": 2}}, {"levels": "draft", "gamma": 3},
          {"levels": "retrieval", "gamma": 2, "sampling": {"top_k": 2}}),
    {"gamma": 2, "gamma_inner": 1, "draft_cache": "query", "sampling": {"top_k": 2}},
    {"gamma": 2, "gamma_inner": 1, "sampling": {"top_k": 2}, "num_resident_layers": 1, "piece_tokens": 4},
], ids=name_of)
def test_joint_law_of_rows_that_share_a_prefix(models, case, watched):
    """Where they have a view in common, what one of them says may decide what the other drafts from."""
    flushed = watched(DecodeBatch, "_flush", lambda self, row: row)
    lengths, together = [], case.get("levels") != "draft"
    assert_lossless(
        models, **case, prompts=SHARED, base=8, together=together, **{"batch": 2, "horizon": 2} if together else {},
        prepare=lambda state: lengths.extend(state.cache.prefix.own_lens[:2]))
    assert lengths == [4, 8] and flushed  # rows with own prefixes of different lengths; one of them grew


@pytest.mark.parametrize("case", [{"gamma": 2, "gamma_inner": 1}, *slow({"levels": "retrieval", "gamma": 3},
                                                                        {"levels": "draft", "gamma": 3})], ids=name_of)
def test_joint_law_where_a_layer_has_a_window(models, case, monkeypatch):
    """The prompts go around its ring. Each branch goes back to them."""
    monkeypatch.setattr("triforce.cache.prefix.BACK", 0)
    monkeypatch.setattr("triforce.attention.RING", 4)
    target, draft = models
    windowed = Transformer.random(replace(target.config, sliding_layers=(0,), sliding_window=3), std=0.5,
                                  dtype=torch.float64)
    rings = []
    assert_lossless((windowed, draft), **case, sampling={"top_k": 2},
                    prepare=lambda state: rings.append(state.cache.prefix.ring))
    assert rings == [12] and min(map(len, PROMPTS)) > 12


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_joint_law_is_the_targets(models, case):
    assert_lossless(models, **case)


@pytest.mark.parametrize("case,plan", [
    ({"levels": "ngram", "gamma": 3}, None),
    ({"levels": "retrieval", "gamma": 2, "gamma_inner": 2}, None),
    ({"levels": "draft", "gamma": 3}, DraftPlan(3, "ngram")),
    *slow(({"gamma": 2, "gamma_inner": 2}, DraftPlan(2, "ngram", True, 2, 2))),
])
def test_joint_law_is_the_targets_where_ngrams_draft(models, monkeypatch, case, plan):
    """Where nothing else may propose to the level that checks them, without laws; else with laws, all on one token."""
    drafted, propose = [], NgramDrafter.propose

    def counted(self, start, n, probs):
        assert (probs is not None) == (plan is not None)
        count = propose(self, start, n, probs)
        drafted.append(int(count.sum()))
        return count

    monkeypatch.setattr(NgramDrafter, "propose", counted)
    assert_lossless(models, **case, ngram=True, prepare=lambda state: setattr(
        state.pilot, "default", plan or state.pilot.default))
    assert sum(drafted) >= 100


def test_fp8_drafting_does_not_bias(models):
    """A row's draft may depend on no other row of its block: with one scale a block it did, by 4e-4."""
    assert_lossless(models, gamma=3, gamma_inner=1, drafting=fp8_copy(models[0]), prompts=PROMPTS[:1],
                    sampling={"top_k": 2})


@pytest.mark.parametrize("multiplied", [True, *slow(False)])
def test_a_target_in_fp8_is_followed_exactly(models, monkeypatch, multiplied):
    """Its own law, of widened weights and of products in fp8, whose inputs are scaled row by row."""
    monkeypatch.setattr(fp8, "multiplies", lambda device: multiplied)
    monkeypatch.setattr(fp8.ScaledLinear, "fits_products", True)  # of any size, on a CPU
    target = in_fp8(models[0])
    assert_lossless((target, models[1]), gamma=2, gamma_inner=1, prompts=PROMPTS[:1], sampling={"top_k": 2})


@pytest.mark.parametrize("shared", [False, *slow(True)])
def test_gathering_from_a_streamed_prefix_does_not_bias(models, watched, shared):
    """What is selected, a verify late, may follow from kept tokens' queries only: if it follows from all that the last
    verify computed, enumeration sees it."""
    gathered = watched(RetrievalView, "gather", lambda self, *args: self.awaiting)

    def at_once(state):  # its first round drafts, whatever from: so the second follows a choice
        if shared:
            state.hierarchy.view.shared.is_stale = False

    assert_lossless(models, gamma=3, gamma_inner=1, num_resident_layers=1, piece_tokens=4, rebuild_interval=1,
                    prepare=at_once, sampling={"top_k": 2, "temperature": 2.0},
                    **{"prompts": SHARED, "base": 8, "batch": 2, "horizon": 2, "together": True} if shared else
                    {"prompts": [[0, 2, 2, 1, 2, 0, 1, 0, 2, 0, 1, 0, 1, 2, 0, 0, 2]]})
    assert len(gathered) > 50 and all(gathered)


def steered(monkeypatch, choose=None, max_inner: int = 1, costs: Costs | None = None):
    """(a function that gives a batch a controller, the set of plans that are chosen). choose: in place of its own.
    Times that vary would lead each run elsewhere: it is told none."""
    choose, seen = choose or Controller.choose, set()
    monkeypatch.setattr(Controller, "choose", lambda self, **known: seen.add(plan := choose(self, **known)) or plan)
    monkeypatch.setattr(Controller, "timed", lambda *args: None)
    costs = costs or Costs({4: 3.0}, {3: 0.3}, {"model": (0.2, 0.2)}, plain=2.0)
    return lambda state: setattr(state.pilot, "controller", Controller(costs, max_gamma=3, max_inner=max_inner)), seen


@pytest.mark.parametrize("horizon", [3, *slow(4)])
def test_choosing_plans_does_not_bias(models, monkeypatch, horizon):
    """The controller, made so nervous that single tokens change its mind, and both kinds of drafter to choose from."""
    monkeypatch.setattr(Rate, "WEIGHT", 0.5)
    costs = Costs({4: 3.0}, {3: 0.3}, {"model": (0.2, 0.2), "ngram": (0.4, 0.0)})
    steer, seen = steered(monkeypatch, None, 2, costs)

    def prepare(state):
        steer(state)
        state.pilot.meters = [NgramMeter(state.tape.tokens[0, : len(state.texts()[0])].tolist())]

    assert_lossless(models, gamma=3, gamma_inner=2, ngram=True, batch=1, prompts=PROMPTS[:1], prepare=prepare,
                    horizon=horizon, sampling={"top_k": 2})
    assert len(seen) >= horizon - 1, seen  # it did change its mind


def test_choosing_by_time_does_not_bias(models, monkeypatch):
    """Rounds take as long as they have rows, and each changes the controller's mind. How many tokens were drafted, with
    those that are then discarded, must not show in that: if it does, enumeration sees it."""
    work, step = [], Verifier._step
    monkeypatch.setattr(Verifier, "_step", lambda self, *args: (work.append(args[2]), step(self, *args))[1])
    plans = [DraftPlan(3, "model", True, 1, 2, False, False), DraftPlan(1, "model", padded=False),
             DraftPlan(2, None, True, 0, 2, False, False)]

    def timed(self, plan, drafting, checking):
        self.turn = getattr(self, "turn", 0) + sum(work)

    def chosen(self, **known):
        work.clear()
        return plans[getattr(self, "turn", 0) % 3]

    steer, seen = steered(monkeypatch, chosen)
    monkeypatch.setattr(Controller, "timed", timed)
    assert_lossless(models, gamma=3, gamma_inner=1, batch=1, prompts=PROMPTS[1:], prepare=steer, horizon=3,
                    sampling={"top_k": 2})
    assert len(seen) == 3


@pytest.mark.parametrize("horizon", [2, *slow(3, 4)])
def test_choosing_by_acceptance_does_not_bias(models, monkeypatch, horizon):
    """Each count that the controller is told changes its mind. How the draft fared with tokens that were then discarded
    must not be counted: if it is, enumeration sees it."""
    plans = [DraftPlan(3, "model", True, 1, 2), DraftPlan(2, "model"), DraftPlan(3, "model", True, 2, 2)]

    def told(self, num_tokens, **observed):
        self.turn = getattr(self, "turn", 0) + sum(hits + tests for hits, tests in observed.values())

    monkeypatch.setattr(Controller, "update", told)
    steer, seen = steered(monkeypatch, lambda self, **known: plans[getattr(self, "turn", 0) % 3], 2)
    assert_lossless(models, gamma=3, gamma_inner=2, batch=1, prompts=PROMPTS[1:], prepare=steer,
                    horizon=horizon, sampling={"top_k": 2})
    assert len(seen) >= min(horizon, 3)


def test_rounds_of_one_row_do_not_bias(models, monkeypatch):
    """Where the controller does not draft, the step is not padded; and the view is rebuilt by what it asked."""
    def chosen(self, **known):
        self.turn = getattr(self, "turn", 0) + 1
        return ONE_ROW if self.turn % 2 == 0 else DraftPlan(2, "model", True, 1, 1)

    steer, _ = steered(monkeypatch, chosen)
    assert_lossless(models, gamma=3, gamma_inner=1, batch=1, prompts=PROMPTS[:1], prepare=steer, horizon=3,
                    rebuild_interval=1, sampling={"top_k": 2})
