"""With coupled sampling a seed gives the same text and the same logits, whatever drafts: those of no speculation.

A promise of the whole library, not of one module.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import bits, bits_of_rows, hashes_of, make_engine, make_state, random_pair, random_prompt

import triforce
from triforce import UserError
from triforce.controller import Controller
from triforce.costs import Costs
from triforce.hf.checkpoint import TINY
from triforce.plan import AUTOREGRESSION
from triforce.tape import ACCEPTED, MISSED, Tape

CONTEXT, NEW = 500, 64  # flushes after 12 and 44 tokens
SEED = 1  # one with rejections at every depth
COMMON = {"flush_interval": 32, "chunk_size": 4, "capacity": 1024, "budget": 256, "gamma": 4, "gamma_inner": 2,
          "keep_logits": True, "rule": "coupled"}
LAWS = {"greedy": {"temperature": 0.0}, "usual": {"temperature": 0.6, "top_p": 0.9},
        "own": {"temperature": 1.0, "top_p": 1.0}, "hot": {"temperature": 1.3, "top_k": 30, "min_p": 0.01},
        "biased": {"temperature": 1.0, "logit_bias": {3: 2.0, 5: float("-inf")}}}


@pytest.fixture(scope="module")
def models():
    return random_pair(std=0.15)


@pytest.fixture(scope="module")
def plain(models):
    """What is said without any drafter, in the same padded step, by law."""
    said = {}

    def of(law: str, **stores):
        key = law, *stores
        if key not in said:
            state = make_state(models[0], None, [random_prompt(CONTEXT)], sampling={**LAWS[law], "seed": [SEED]},
                               **COMMON, **stores, retrieval=False)
            said[key] = bits(state, NEW)[:2]
        return said[key]

    return of


def depths(state, count):
    """`bits`, and how often so many drafted tokens were kept before one was rejected."""
    seen, tokens, hashes = Counter(), [], []
    while len(tokens) < count:
        new = state.round()[0]
        hashes += hashes_of(state, 0, len(new))
        tokens += new
        [row] = state.last_round.rows
        if row.num_accepted < row.num_drafted:
            seen[row.num_accepted] += 1
        else:
            seen["all"] += 1
    return tokens[:count], hashes[:count], seen


STREAMED = {"num_resident_layers": 1, "piece_tokens": 48}
DRAFTERS = {
    "triforce": {}, "retrieval": {"draft": False}, "draft": {"retrieval": False},
    "snapkv": {"draft_cache": "snapkv"}, "streaming": {"draft_cache": "streaming"},
    "draft, full": {"retrieval": False, "draft_cache": "full"},
    "ngram": {"draft": False, "ngram": True}, "ngram only": {"draft": False, "retrieval": False, "ngram": True},
    "offloaded": STREAMED,
    "wide": {"block_size": 8, "gamma": 7, "gamma_inner": 3},
}


@pytest.mark.parametrize("law,drafter", [("own", name) for name in DRAFTERS] + [(law, "triforce") for law in LAWS])
def test_a_seed_says_the_same_whatever_drafts(models, plain, law, drafter):
    target, draft = models
    more = dict(DRAFTERS[drafter])
    draft = draft if more.pop("draft", True) else None
    state = make_state(target, draft, [random_prompt(CONTEXT)], sampling={**LAWS[law], "seed": [SEED]},
                       **{**COMMON, **more})
    tokens, hashes, seen = depths(state, NEW)
    assert (tokens, hashes) == (plain(law, **STREAMED) if drafter == "offloaded" else plain(law))
    assert tokens == plain(law)[0]
    assert state.num_flushes == 2 and seen[0] >= 2
    if law == "own" and drafter in ("triforce", "retrieval", "draft", "offloaded"):
        assert all(seen[depth] for depth in (0, 1, 2, "all")), seen
    if state.hierarchy.inner is not None and state.hierarchy.sources:
        kept, drafted = state.hierarchy.inner.totals[0].tolist()
        assert drafted - kept >= 10  # rejections at the inner level, too
    assert state.hierarchy.outer.draft_probs is None  # no laws are kept, nor passed


def test_greedy_is_the_case_without_noise(models, plain):
    """The same tokens as by the other rule, whatever the seed."""
    state = make_state(*models, [random_prompt(CONTEXT)], sampling={"temperature": 0.0, "seed": [8]},
                       **{**COMMON, "rule": "rejection"})
    assert bits(state, NEW)[:2] == plain("greedy")
    assert plain("own") != plain("greedy")


@pytest.mark.parametrize("law", ["usual", "hot"])
def test_a_seed_says_the_same_whatever_the_plans(models, plain, law):
    """Every plan that a controller may choose, in random order, with a draft model and n-grams at once."""
    costs = Costs({8: 1.0}, {4: 1.0}, {"model": (0.1, 0.1), "ngram": (0.1, 0.1)})
    plans, dice = [AUTOREGRESSION, *Controller(costs, 7, 3).plans], Random(0)
    ways = [[plan for plan in plans if plan.drafter == name] for name in (None, "model", "ngram", "retrieval")]
    state = make_state(*models, [random_prompt(CONTEXT)], sampling={**LAWS[law], "seed": [SEED]},
                       **{**COMMON, "ngram": True, "gamma": 7, "gamma_inner": 3})
    for _ in range(2):
        tokens, hashes, used = [], [], set()
        while len(tokens) < NEW:
            plan = dice.choice(dice.choice(ways))
            used.add(plan.drafter)
            new = state.round(plan)[0]
            hashes += hashes_of(state, 0, len(new))
            tokens += new
        assert (tokens[:NEW], hashes[:NEW]) == plain(law) and used == {None, "model", "ngram", "retrieval"}
        state.rewind(400)


def test_rows_say_what_each_says_alone(models):
    """Of different lengths, seeds and laws, side by side, over a shared prefix, and when one has ended."""
    prompts = [random_prompt(256) + random_prompt(n, seed=n) for n in (20, 60, 41)]
    laws = {"temperature": [1.0, 0.7, 0.0], "top_p": [1.0, 0.9, 1.0], "seed": [3, 3, 9]}
    own = [{name: [values[row]] for name, values in laws.items()} for row in range(3)]
    alone = [bits(make_state(models[0], None, [prompt], sampling=law, **COMMON, retrieval=False), 40)[0]
             for prompt, law in zip(prompts, own, strict=True)]
    for base in (0, 256):
        off = make_state(models[0], None, prompts, sampling=laws, **COMMON, base=base, retrieval=False)
        said = bits_of_rows(off, 40)
        assert bits_of_rows(make_state(*models, prompts, sampling=laws, **COMMON, base=base), 40) == said
        assert [[token for token, _ in row] for row in said] == alone
    ended = make_state(*models, prompts, sampling=laws, **COMMON)
    ended.close_row(1)
    rows = [[], []]
    while min(map(len, rows)) < 40:
        first, nothing, last = ended.round()
        rows[0] += first
        rows[1] += last
        assert nothing == []
    assert [row[:40] for row in rows] == [alone[0], alone[2]]


def test_the_engine_with_auto(models, eager_to_draft):
    """Plans follow measured times: the text does not."""
    engine = make_engine(*models, gamma="auto", sampling="coupled", block_size=8, flush_interval=32, budget=256)
    prompt, law = random_prompt(CONTEXT), {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 60, "seed": 11}
    runs = [engine.generate(prompt, **law).tokens for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] == engine.generate(prompt, speculate=False, **law).tokens
    assert sum(plan.gamma > 0 for plan in eager_to_draft) >= 20  # it did draft
    assert all(plan.padded for plan in eager_to_draft)
    assert engine.generate(prompt, **{**law, "seed": 12}).tokens != runs[0]
    samples = engine.generate(prompt, num_samples=3, **law)
    assert samples[0].tokens == runs[0] and samples[1].tokens != runs[0]
    both = engine.generate([prompt, prompt[:300]], **law)
    assert both[0].tokens == runs[0] and both[0].stats.shared_tokens == 0


def test_where_drafted_tokens_came_from_is_told(models):
    """The controller learns the draft's acceptance at the inner level by it."""
    state = make_state(*models, [random_prompt(CONTEXT)], sampling={**LAWS["own"], "seed": [SEED]}, **COMMON)
    origins = []
    while len(origins) < 60:
        state.round()
        [row] = state.last_round.rows
        origins += row.origins[: row.num_drafted]
    assert min(origins.count(kind) for kind in (ACCEPTED, MISSED)) >= 8


def test_another_process_says_the_same():
    flags = ["--max-new-tokens", "24", "--prompt", "It was the best of times,", "--temperature", "1", "--seed", "5",
             "--sampling", "coupled", "--device", "cpu"]
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "generate.py", *flags], cwd=root, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(root)}, timeout=120)
    engine = triforce.load(TINY / "target", draft=False, device="cpu", sampling="coupled", block_size=8)
    alone = engine.generate("It was the best of times,", 24, temperature=1.0, seed=5, speculate=False)
    assert done.returncode == 0 and done.stdout.rstrip("\n") == alone.text.rstrip("\n") != ""


@pytest.mark.parametrize("wrong", ["level", "row"])
def test_noise_that_depends_on_more_is_noticed(models, plain, monkeypatch, wrong):
    """The tests above can fail: here the noise depends on the level, or on the place in the block."""
    exact = Tape.draw

    def other(self, law, position, level):
        shift = level if wrong == "level" else torch.arange(position.shape[1])
        return exact(self, law, position + 1000 * shift, level)

    monkeypatch.setattr(Tape, "draw", other)
    state = make_state(*models, [random_prompt(CONTEXT)], sampling={**LAWS["own"], "seed": [SEED]}, **COMMON)
    if wrong == "level":  # the text is another, and next to nothing is accepted
        assert bits(state, NEW)[0] != plain("own")[0]
        kept, drafted = state.hierarchy.outer.totals[0].tolist()
        assert kept < 0.2 * drafted
    else:
        assert bits(state, NEW)[0] != bits(make_state(
            models[0], None, [random_prompt(CONTEXT)], sampling={**LAWS["own"], "seed": [SEED]}, **COMMON,
            retrieval=False), NEW)[0]


def test_an_unknown_rule_is_refused(models):
    with pytest.raises(UserError, match="sampling .'gumbel'. must be 'rejection' or 'coupled'"):
        make_engine(*models, sampling="gumbel")
