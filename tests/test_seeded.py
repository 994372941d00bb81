"""With coupled sampling a seed gives the same text and the same logits, whatever drafts: those of no speculation. A
promise of the whole library, not of one module."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from conftest import (
    bits,
    bits_of_rows,
    hashes_of,
    make_engine,
    make_state,
    random_pair,
    random_prompt,
    rank_of,
    slow,
)

from triforce.decode.controller import Controller, Costs
from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.tree import likeliest

CONTEXT, NEW = 500, 64  # flushes after 12 and 44 tokens
SEED = 1  # one with rejections at every depth
COMMON = {"flush_interval": 32, "chunk_size": 4, "capacity": 1024, "budget": 256, "gamma": 4, "gamma_inner": 2,
          "rule": "coupled"}
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
        key = law, *stores.items()
        if key not in said:
            state = make_state(models[0], None, [random_prompt(CONTEXT)], sampling={**LAWS[law], "seed": [SEED]},
                               **COMMON, **stores, retrieval=False)
            said[key] = bits(state, NEW)[:2]
        return said[key]

    return of


def rounds(state, plans=None) -> tuple[list, list, Counter]:
    """Tokens, hashes, and what was seen: how many drafted tokens were kept before one was rejected, and what was kept
    at the side of them. plans: chooses the plan of each round."""
    tokens, hashes, seen = [], [], Counter()
    while len(tokens) < NEW:
        new = state.round(None if plans is None else plans(state))[0]
        hashes += hashes_of(state, 0, len(new))
        tokens += new
        [row], plan = state.last_round.rows, state.last_round.plan
        assert len(new) <= row.num_accepted + row.beside + 1
        rejected = row.num_accepted < row.num_drafted
        seen["spine", row.num_accepted if rejected else "all"] += 1
        seen["branch", row.beside] += row.beside > 0
        seen["beside"] += row.beside
        seen["rejected"] += rejected and not row.beside
        seen["plan", plan.drafter] += 1
        if plan.branches:
            seen["trees"] += 1
            path = state.hierarchy.outer.drawn_from[0, : len(row.tokens)].tolist()
            for place in path[row.num_accepted + 1 :]:
                seen["rank", rank_of(state.tape.nodes.shape, place)] += 1
    return tokens[:NEW], hashes[:NEW], seen


def made(models, law: str, drafter: str, **more):
    """A DecodeBatch that is about to say `law`, and what its prefix lies in."""
    settings = {**COMMON, **DRAFTERS[drafter], **more}
    draft = models[1] if settings.pop("draft", True) else None
    state = make_state(models[0], draft, [random_prompt(CONTEXT)], sampling={**LAWS[law], "seed": [SEED]}, **settings)
    return state, STREAMED if drafter == "offloaded" else {}


STREAMED = {"num_resident_layers": 1, "piece_tokens": 48}
DRAFTERS = {
    "triforce": {}, "retrieval": {"draft": False}, "draft": {"retrieval": False},
    "snapkv": {"draft_cache": "snapkv"}, "streaming": {"draft_cache": "streaming"},
    "ngram": {"draft": False, "ngram": True}, "ngram only": {"draft": False, "retrieval": False, "ngram": True},
    "offloaded": STREAMED,
    "wide": {"block_size": 8, "gamma": 7, "gamma_inner": 3},
}
ALIKE = {"draft", "snapkv", "streaming", "ngram only", "hot"}  # laws and drafters that are slow cases
CASES = [*(("own", name) for name in DRAFTERS if name not in ALIKE),
         *((law, "triforce") for law in LAWS if law not in ALIKE | {"own"}),
         *slow(*(("own", name) for name in DRAFTERS if name in ALIKE),
               *((law, "triforce") for law in LAWS if law in ALIKE))]
LEAVES = {"leaves": 1, "leaves_inner": 2}


@pytest.mark.parametrize("law,drafter", CASES)
@pytest.mark.parametrize("shape", [{}, {**LEAVES, "block_size": 8}], ids=["chains", "leaves"])
def test_a_seed_says_the_same_whatever_drafts(models, plain, law, drafter, shape):
    """The same tokens and logits as without speculation, also where a leaf at the side of the drafted tokens was what
    the full level drew, and its keys and values moved to its position."""
    state, stores = made(models, law, drafter, **shape)
    tokens, hashes, seen = rounds(state)
    outer, inner, least = state.hierarchy.outer, state.hierarchy.inner, 1 if law == "greedy" else 2
    assert (tokens, hashes) == plain(law, **({"leaves": 1, "block_size": 8} if shape else {}), **stores)
    assert tokens == plain(law)[0]  # the shape of the block is not heard in the text
    assert int(outer.totals[0, 2]) == seen["beside"] and outer.draft_probs is None  # no laws are kept, nor passed
    assert state.num_flushes == 2 or "ngram" in drafter and shape
    inner = None if inner is None or not state.hierarchy.sources else inner.totals[0].tolist()
    if not shape:
        assert seen["spine", 0] >= 2 and (inner is None or inner[1] - inner[0] >= 10)  # rejections at that level, too
        if law == "own" and drafter in ("triforce", "retrieval", "draft", "offloaded"):
            assert all(seen["spine", depth] for depth in (0, 1, 2, "all")), seen
    elif "ngram" not in drafter:  # the most probable word of a random draft is seldom that of the target
        assert seen["beside"] >= least and seen["rejected"] >= 1 and (inner is None or inner[2] >= least)


TREE = {"block_size": 16, "tree_size": 64, "gamma": 8, "leaves_inner": 2}


@pytest.mark.parametrize("law,drafter", [*((law, "triforce") for law in ("greedy", "usual", "own")),
                                         *(("own", name) for name in ("streaming", "offloaded")),
                                         *slow(("hot", "triforce"), ("biased", "triforce"), ("own", "retrieval"),
                                               ("own", "snapkv"), ("own", "ngram"), ("hot", "offloaded"))])
def test_a_seed_says_the_same_on_trees(models, plain, law, drafter):
    """The same tokens and logits as without speculation in the same step, with branches kept that begin and end at
    several depths."""
    state, _ = made(models, law, drafter, **TREE)
    tokens, hashes, seen = rounds(state)
    state.rewind(400)
    assert (tokens, hashes) == rounds(state, lambda _: AUTOREGRESSION)[:2]
    assert tokens == plain(law)[0]  # the shape of the block is not heard in the text
    assert state.num_flushes == 2 and seen["trees"] >= 8
    kept = [sum(seen[what, at] > 0 for at in range(16)) for what in ("spine", "branch")]
    if law != "greedy":  # of random models the most probable words are others
        assert min(kept) >= 2 and seen["rank", 0] >= 4 and seen["rank", 1] >= 1, seen


def ways_of(plans: list[DraftPlan]) -> list[list[DraftPlan]]:
    return [[plan for plan in (AUTOREGRESSION, *plans) if plan.drafter == way]
            for way in (None, "model", "ngram", "retrieval")]


@pytest.mark.parametrize("law", ["hot", *slow("usual")])
def test_a_seed_says_the_same_on_trees_and_chains(models, plain, law):
    """Chains by all drafters and trees of random shapes, in random order, in blocks of one size."""
    costs = Costs({16: 1.0}, {4: 1.0}, {"model": (0.1, 0.1), "ngram": (0.1, 0.1)}, growth=1.0)
    ways, dice = ways_of(Controller(costs, 9, 3).plans), Random(0)
    state, _ = made(models, law, "triforce", **TREE, ngram=True, gamma_inner=3)

    def choose(state) -> DraftPlan:
        plan = dice.choice(dice.choice(ways))
        return replace(plan, branches=dice.randint(1, 6)) if plan.retrieval else plan

    def shape_for(spine: int, length: int) -> tuple:
        chances = (dice.random(), *sorted((dice.random() / 2 for _ in range(3)), reverse=True))
        return likeliest(chances, spine, length, rows=dice.randint(20, 64), depth=15, width=8)

    state.tape.nodes.shape_for = shape_for
    expected, branches = rounds(state, lambda _: AUTOREGRESSION)[:2], Counter()
    assert expected[0] == plain(law)[0]
    for _ in range(3):
        state.rewind(400)
        *said, seen = rounds(state, choose)
        branches += seen
        assert tuple(said) == expected
    assert branches["trees"] >= 9 and branches["rank", 0] >= 1, branches


@pytest.fixture(scope="module")
def rows_alone(models):
    """Prompts of different lengths, seeds and laws, and what each says alone."""
    prompts = [random_prompt(256) + random_prompt(n, seed=n) for n in (20, 60, 41)]
    laws = {"temperature": [1.0, 0.7, 0.0], "top_p": [1.0, 0.9, 1.0], "seed": [3, 3, 9]}
    own = [{name: [values[row]] for name, values in laws.items()} for row in range(3)]
    return prompts, laws, [bits(make_state(models[0], None, [prompt], sampling=law, **COMMON, retrieval=False), 40)[0]
                           for prompt, law in zip(prompts, own, strict=True)]


@pytest.mark.parametrize("base", slow(256, 0))
def test_rows_on_trees_say_what_each_says_alone(models, rows_alone, base):
    prompts, laws, alone = rows_alone
    state = make_state(*models, prompts, sampling=laws, **{**COMMON, **TREE}, base=base)
    on = bits_of_rows(state, 40)
    assert state.hierarchy.outer.totals[:, 0].min() >= 10
    state.rewind(400)
    assert on == bits_of_rows(state, 40, plan=AUTOREGRESSION)
    assert [[token for token, _ in row] for row in on] == alone


@pytest.mark.parametrize("shape", [*slow({}), LEAVES], ids=["chains", "leaves"])
def test_rows_say_what_each_says_alone(models, rows_alone, shape):
    """Side by side, over a shared prefix, and when one has ended."""
    prompts, laws, alone = rows_alone
    for base in (0, 256):
        off = make_state(models[0], None, prompts, sampling=laws, **COMMON, **shape, base=base, retrieval=False)
        said = bits_of_rows(off, 40)
        on = make_state(*models, prompts, sampling=laws, **COMMON, **shape, base=base)
        assert bits_of_rows(on, 40) == said and bool(on.hierarchy.outer.totals[:2, 2].min() > 0) == bool(shape)
        assert [[token for token, _ in row] for row in said] == alone
    ended = make_state(*models, prompts, sampling=laws, **COMMON, **shape)
    ended.close_row(1)
    rows = [[], [], []]
    while min(len(rows[0]), len(rows[2])) < 40:
        for row, new in zip(rows, ended.round(), strict=True):
            row += new
    assert [row[:40] for row in rows] == [alone[0], [], alone[2]]


@pytest.mark.parametrize("law,shape", [("usual", {}), ("hot", {}), ("hot", LEAVES), ("usual", {"retrieval": False})])
def test_a_seed_says_the_same_whatever_the_plans(models, plain, law, shape):
    """Every plan that a controller may choose, in random order, with a draft model and n-grams at once."""
    costs = Costs({8: 1.0}, {4: 1.0} if "retrieval" not in shape else {}, {"model": (0.1, 0.1), "ngram": (0.1, 0.1)})
    ways, dice = [way for way in ways_of(Controller(costs, 7, 3).plans) if way], Random(0)
    state, _ = made(models, law, "triforce", ngram=True, gamma=7, gamma_inner=3, **shape)
    for _ in range(2):
        *said, seen = rounds(state, lambda _: dice.choice(dice.choice(ways)))
        assert tuple(said) == plain(law, leaves=shape.get("leaves", 0))
        assert sum(seen["plan", way] > 0 for way in (None, "model", "ngram", "retrieval")) == len(ways) >= 3
        state.rewind(400)


@pytest.mark.parametrize("size", [0, *slow(32)])
def test_the_engine_with_auto(models, eager_to_draft, size):
    """Plans follow measured times: the text does not."""
    engine = make_engine(*models, gamma="auto", sampling="coupled", block_size=8, flush_interval=32, budget=256,
                         tree_size=size)
    prompt, law = random_prompt(CONTEXT), {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 60, "seed": 11}
    runs = [engine.generate(prompt, **law).tokens for _ in range(2)]
    assert runs[0] == runs[1] == engine.generate(prompt, speculate=False, **law).tokens
    assert sum(plan.gamma > 0 for plan in eager_to_draft) >= 20  # it did draft
    assert all(plan.padded for plan in eager_to_draft)
    samples = engine.generate(prompt, num_samples=2, **law)
    assert samples[0].tokens == runs[0] != samples[1].tokens
    both = engine.generate([prompt, prompt[:300]], **law)
    assert both[0].tokens == runs[0] and both[0].stats.shared_tokens == 0
