"""Trees of any shape: which is the best, their tables, how a check walks down one, and how branches grow."""

from random import Random

import pytest
import torch
from conftest import make_engine, make_state, parent_of, random_pair, random_prompt, rank_of

from triforce import UserError
from triforce.cache import views
from triforce.config import Settings
from triforce.decode.acceptance import match_nodes
from triforce.decode.controller import Controller, Costs
from triforce.decode.drafters.model import ModelDrafter
from triforce.decode.nodes import Nodes
from triforce.decode.plan import BRANCH, DraftPlan
from triforce.decode.tape import ACCEPTED
from triforce.decode.verifier import RowRound
from triforce.engine.session import levels_of
from triforce.tree import CHANCES, Shape, TokenTree, likeliest


def followers_in(shape: Shape) -> list[list[int]]:
    """Of each row, those that follow it."""
    found = [[] for _ in range(shape.rows)]
    for row in range(1, shape.rows):
        found[parent_of(shape, row)].append(row)
    return found


def kept(shape: Shape, chances: tuple[float, ...]) -> float:
    """Expected tokens of a round: one, and the chance of each row's path."""
    paths = [1.0]
    for row in range(1, shape.rows):
        paths.append(paths[parent_of(shape, row)] * chances[rank_of(shape, row)])
    return sum(paths)


def places(shape: Shape) -> list[tuple[int, int]]:
    """How deep each row is, and how far from the spine."""
    places = [(row, 0) for row in range(shape.spine + 1)]
    for row in range(shape.spine + 1, shape.rows):
        depth, distance = places[parent_of(shape, row)]
        places.append((depth + 1, distance + 1))
    return places


def all_trees(spine: int, rows: int, length: int, depth: int, width: int):
    """Every tree of so many rows in which each row is another's next follower."""
    def rest(parents: tuple):
        if 1 + spine + len(parents) == rows:
            yield parents
        else:
            for parent in range(1 + spine + len(parents)):
                yield from rest((*parents, parent))

    for parents in rest(()):
        followers, ranks = [int(row < spine) for row in range(rows)], []
        for parent in parents:
            ranks.append(followers[parent])
            followers[parent] += 1
        shape = Shape(spine, parents, tuple(ranks))
        if max(followers) > 3 or parents and spine in parents:  # nothing is known of what follows the last of the spine
            continue
        at = places(shape)
        drafting = [at[row][1] for row in range(rows) if at[row][1] and followers[row]]
        if max(d for d, _ in at) <= depth and max(d for _, d in at) <= length:
            if all(drafting.count(d) <= width for d in drafting):
                yield shape


@pytest.mark.parametrize("chances", [(0.9, 0.05, 0.02), (0.5, 0.3, 0.1), (0.35, 0.33, 0.3)])
@pytest.mark.parametrize("length,depth,width", [(4, 9, 4), (2, 9, 4), (4, 3, 4), (4, 9, 1)])
def test_the_best_tree_is_found(chances, length, depth, width):
    for spine, rows in ((1, 4), (2, 6), (3, 7)):
        shape, tokens = likeliest(chances, spine, length, rows=rows, depth=depth, width=width)
        assert tokens == pytest.approx(kept(shape, chances)) and shape in set(
            all_trees(spine, shape.rows, length, depth, width))
        best = max((kept(tree, chances) for tree in all_trees(spine, rows, length, depth, width)),
                   default=None)
        if best is None:  # so many rows do not fit
            assert shape.rows < rows
        elif width > 1:
            assert shape.rows == rows and tokens == pytest.approx(best)
        else:  # which rows to draft after is not searched through
            assert tokens >= 0.95 * best


def test_a_large_tree_keeps_its_limits():
    shape, tokens = likeliest((0.92, 0.05, 0.01, 0.005), 40, 8, rows=512, depth=44, width=32)
    at = places(shape)
    assert shape.rows == 512 and max(depth for depth, _ in at) <= 44 and max(distance for _, distance in at) == 8
    drafting = [at[row][1] for row, followers in enumerate(followers_in(shape)) if followers and at[row][1]]
    assert max(map(drafting.count, range(1, 9))) == 32
    assert max(map(len, followers_in(shape))) == 4 and tokens > 1.3 * sum(0.92**row for row in range(41))
    assert likeliest((0.92, 0.0, 0.0, 0.0), 40, 8, rows=512, depth=44, width=32)[0] == Shape(40)


def random_shape(dice: Random, nodes: Nodes) -> Shape:
    first = dice.random()
    others = sorted((dice.random() * (1 - first) for _ in range(3)), reverse=True)
    return likeliest((first, *others), dice.randint(1, nodes.tree.spine - 1), dice.randint(1, 4),
                     rows=dice.randint(8, nodes.rows), depth=nodes.tree.spine - 1, width=nodes.width)[0]


def walk(shape: Shape, tokens: list[int], num_drafted: int, drawn: list[int]) -> list[int]:
    """The rows that are kept, one after the other."""
    rows = [0]
    while True:
        here = rows[-1]
        if here <= shape.spine and here >= num_drafted:  # the spine ends here
            return rows
        follows = [row for row in followers_in(shape)[here] if tokens[row] == drawn[here]]
        if not follows:
            return rows
        rows.append(follows[0])


def test_a_check_walks_down_a_tree_of_any_shape():
    dice, seen = Random(0), set()
    nodes = Nodes(TokenTree(6, 0, 24), 4, 40, "cpu")
    for _ in range(40):
        shape = random_shape(dice, nodes)
        nodes.set(shape)
        for row in range(1, shape.rows):  # tokens of rows that follow the same one differ, as a draft's choices do
            nodes.tokens[:, row] = (7 * parent_of(shape, row) + rank_of(shape, row)) % 4
        drawn, num_drafted = torch.randint(4, (40, 24)), torch.randint(shape.spine + 1, (40,))
        verdict = match_nodes(nodes, num_drafted, drawn)
        for b in range(40):
            rows = walk(shape, nodes.tokens[b].tolist(), int(num_drafted[b]), drawn[b].tolist())
            beside = sum(row > shape.spine for row in rows)
            assert (int(verdict.num_accepted[b]), int(verdict.beside[b])) == (len(rows) - 1 - beside, beside)
            assert verdict.rows[b, : len(rows)].tolist() == rows
            assert verdict.tokens[b, : len(rows)].tolist() == drawn[b][rows].tolist()
            seen.add((len(rows) - 1 - beside, beside))
    assert seen >= {(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)}


def test_branches_see_what_the_levels_see():
    """In a step that grows them, and in the one that checks: the keys and values of the same tokens, over the same
    cache, give nearly the same hidden states."""
    pair = random_pair(std=0.15)
    state = make_state(*pair, [random_prompt(40)], rule="coupled", block_size=8, tree_size=32, gamma=7, budget=64,
                       sampling={"temperature": 1.0, "seed": [3]})
    inner, grown = state.hierarchy.inner, []
    growing, nodes = inner.model.output.forward, state.tape.nodes

    def listen(hidden):
        if hidden.shape[1] == nodes.width:
            grown.append((nodes.here().tolist(), hidden.clone()))
        return growing(hidden)

    inner.model.output.forward = listen
    state.round()
    inner.model.output.forward = growing
    assert len(grown) == nodes.steps >= 3
    for here, hidden in grown:  # a view of the whole prompt: so both levels see the same
        torch.testing.assert_close(hidden[0], state.hierarchy.outer.hidden[0, here], rtol=1e-3, atol=1e-3)


def test_views_are_chosen_by_the_queries_of_what_was_kept(monkeypatch):
    """A tree has many more rows: the others' weigh nothing, and are left out."""
    state = make_state(*random_pair(std=0.15), [random_prompt(300)], rule="coupled", block_size=16, tree_size=64,
                       gamma=8, budget=48, flush_interval=32, sampling={"temperature": 1.0, "seed": [1]})
    view, beside = state.hierarchy.view, 0
    prompt, weight = view._newest()
    assert prompt.shape == (1, 16) and weight.tolist() == [1 / 16] * 16
    for _ in range(10):
        state.round()
        [row] = state.last_round.rows
        beside += row.beside
        [kept], weight = view._newest()
        assert len(kept) == 16 and int((weight > 0).sum()) == len(row.tokens)
        path = state.hierarchy.outer.drawn_from[0, : len(row.tokens)].tolist()
        assert set(path) <= set(kept[weight > 0].tolist())
        with monkeypatch.context() as patch:
            patch.setattr(views, "chunk_scores", lambda queries, *how: queries)
            asked = view._scores()
        assert all(torch.equal(one, of[0][:, kept]) for one, of in zip(asked, state.cache.queries, strict=True))
    assert beside >= 5


def test_trees_are_chosen_where_a_verify_is_dear():
    """As many tokens are expected of one as a round brings where chances are those that it was made for."""
    nodes, dice = Nodes(TokenTree(48, 0, 128), 16, 1, "cpu"), Random(0)

    def chosen(verify: float, growth: float) -> tuple[DraftPlan, Controller]:
        controller = Controller(Costs({48: verify}, {1: 5.0}, growth=growth), 47, 0,
                                gains=lambda gamma: nodes.shape_for(gamma, BRANCH)[1])
        return controller.choose(), controller

    plan, controller = chosen(1000.0, 6.0)
    assert plan.branches == BRANCH and plan.gamma >= 12
    assert chosen(1000.0, 900.0)[0].branches == 0 == chosen(12.0, 6.0)[0].branches
    shape, _ = nodes.shape_for(plan.gamma, BRANCH)
    assert shape.rows == 128 and max(distance for _, distance in places(shape)) == BRANCH

    def play() -> int:
        row, count = 0, 1
        while row is not None:
            drawn = dice.choices(range(5), [*CHANCES, 1 - sum(CHANCES)])[0]
            row = next((i for i in followers_in(shape)[row] if rank_of(shape, i) == drawn), None)
            count += row is not None
        return count

    took = plan.gamma * 5.0 + (BRANCH - 1) * 6.0 + 1000.0
    times = controller.times_per_token({"retrieval": CHANCES[0]})
    hoped = took / times[controller.plans.index(plan)]
    assert hoped == pytest.approx(sum(play() for _ in range(400)) / 400, rel=0.1)


@pytest.mark.parametrize("more,message", [
    ({"sampling": "rejection"}, "tree_size .64. need sampling 'coupled', and it is 'rejection'"),
    ({"retrieval": False}, "tree_size .64. needs a retrieval level"),
    ({"leaves": 1}, "tree_size .64. and leaves .1. are two kinds of trees"),
    ({"tree_size": 12}, "tree_size .12. must be at least twice block_size .8.*try a tree_size of 32"),
    ({"tree_size": 512, "block_size": 512, "flush_interval": 512},
     "tree_size .512. must be at least twice block_size .512.*try a block_size of 64"),
    ({"tree_size": 513}, "tree_size .513. must be a whole number from 0 to 512; try 128"),
    ({"tree_size": -1}, "tree_size .-1. must be a whole number from 0 to 512")])
def test_what_does_not_fit_a_tree_is_refused(more, message):
    with pytest.raises(UserError, match=message):
        Settings(**{"tree_size": 64, "sampling": "coupled", **more}).resolve()


def test_a_tree_takes_the_place_of_leaves():
    made = Settings(tree_size=62, sampling="coupled").resolve("cuda")
    assert (made.tree, made.leaves_inner) == (TokenTree(16, 0, 64), 3)


def test_tokens_of_a_tree_say_who_proposed_them():
    engine = make_engine(*random_pair(std=0.15), sampling="coupled", tree_size=32, flush_interval=32, budget=64,
                         draft_cache="streaming", gamma=7)
    out = engine.generate(random_prompt(300), 60, temperature=1.0, seed=2)
    by_branches = int(engine.buffers.state.hierarchy.outer.totals[0, 2])
    assert set(out.levels) == {"draft", "retrieval", "target"} and by_branches >= 3
    assert 0 < out.levels.count("target") <= out.stats.target_forwards
    row = RowRound([1, 2, 3, 4], [ACCEPTED] * 7, 1, 7, False, 2)
    plan = DraftPlan(7, "model", True, 2, 4, branches=8)
    assert levels_of(plan, row) == ["draft", "retrieval", "retrieval", "target"]


def test_a_draft_knows_the_text_that_left_its_own():
    """After branches were kept, its cache is that of a state which was given the text."""
    made = {"rule": "coupled", "block_size": 16, "tree_size": 64, "gamma": 8, "budget": 48, "flush_interval": 32,
            "draft_cache": "streaming", "sampling": {"temperature": 1.0, "seed": [2]}}
    pair = random_pair(std=0.15)
    state, departed = make_state(*pair, [random_prompt(120)], **made), 0
    draft = state.hierarchy.sources["model"]
    for _ in range(14):
        state.round()
        departed += state.last_round.rows[0].beside >= ModelDrafter.CATCH_UP_ROWS
        draft.catch_up(state.lens)
        length = int(draft.length[0])
        assert state.lens[0] - ModelDrafter.CATCH_UP_ROWS < length <= state.lens[0]
        [tokens] = state.texts()
        fresh = make_state(*pair, [tokens], **made).hierarchy.sources["model"]
        for mine, other in zip(draft.cache.k, fresh.cache.k, strict=True):
            torch.testing.assert_close(mine[:, :, :length], other[:, :, :length], rtol=1e-3, atol=1e-3)
    assert departed >= 1 and state.lens[0] < 250  # all within its window
