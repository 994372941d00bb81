"""Which level proposed each token: of rounds that are written down by hand, and of rounds that were run."""

import pytest
from conftest import slow

import triforce
from triforce.decode.batch import DecodeBatch
from triforce.decode.plan import DraftPlan
from triforce.decode.tape import ACCEPTED, BONUS, LEAF, MISSED
from triforce.decode.verifier import RowRound
from triforce.engine.session import levels_of
from triforce.render import COLOURS

TEXT = "one two three four five six seven eight nine ten. " * 8


@pytest.mark.parametrize("plan, origins, num_accepted, count, levels", [
    (DraftPlan(), [], 0, 1, ["target"]),
    (DraftPlan(3, "model"), [ACCEPTED] * 3, 2, 3, ["draft", "draft", "target"]),
    (DraftPlan(3, "model"), [MISSED] * 3, 3, 4, ["draft"] * 3 + ["target"]),  # origins of another round
    (DraftPlan(2, "ngram"), [BONUS] * 2, 2, 2, ["ngram"] * 2),  # cut at a limit: no token of the target's own
    (DraftPlan(3, "custom"), [0] * 3, 1, 2, ["custom", "target"]),
    (DraftPlan(4, "model", True, 2, 2), [ACCEPTED, MISSED, ACCEPTED, BONUS], 4, 5,
     ["draft", "retrieval", "draft", "retrieval", "target"]),
    (DraftPlan(4, "ngram", True, 2, 2), [ACCEPTED, ACCEPTED, MISSED, ACCEPTED], 1, 2, ["ngram", "target"]),
    (DraftPlan(3, None, True, 0, 3), [BONUS] * 3, 3, 4, ["retrieval"] * 3 + ["target"]),
    (DraftPlan(3, "model"), [], 0, 0, []),
    (DraftPlan(4, "model", True, 2, 2), [ACCEPTED, LEAF, BONUS, ACCEPTED], 4, 5, ["draft"] * 2 + ["retrieval", "draft",
                                                                                             "target"]),
])
def test_levels_of_a_round(plan, origins, num_accepted, count, levels):
    row = RowRound(list(range(count)), origins, num_accepted, len(origins), False)
    assert levels_of(plan, row) == levels


@pytest.mark.parametrize("options, drafts", [
    ({}, {"draft", "retrieval"}), ({"draft": "ngram"}, {"ngram", "retrieval"}), *slow(
        ({"retrieval": False}, {"draft"}), ({"draft": False}, {"retrieval"}),
        ({"draft": "ngram", "retrieval": False}, {"ngram"}))])
def test_levels_of_generations(watched, options, drafts):
    """By the counts of all rounds, as the device reports them: how many tokens, and how many of them were accepted."""
    seen = watched(DecodeBatch, "_settle", lambda self, result, *more: [
        (len(row.tokens), row.num_accepted) for row in result.rows])
    engine = triforce.load("tiny", device="cpu", gamma=6, **options)
    out = engine.generate(TEXT, 90, temperature=0.0, ignore_eos=True)
    assert len(out.levels) == len(out.tokens) == len(out.pieces) == 90
    assert set(out.levels) == drafts | {"target"} and drafts < set(COLOURS)
    assert "".join(out.pieces) == out.text
    expected = [kept for [(count, accepted)] in seen for kept in [True] * accepted + [False] * (count - accepted)]
    assert [level != "target" for level in out.levels] == expected[:90]
    off = engine.generate(TEXT, 9, temperature=0.0, ignore_eos=True, speculate=False)
    assert off.levels == ["target"] * 9
