"""Steps attend for fewer rows, once others have ended: where that pays, and to the same end.

What rows have for themselves: test_cache.py.
"""

from types import SimpleNamespace

import pytest
import torch
from conftest import make_state, random_prompt, run_rounds

from triforce import attention, narrowing
from triforce.kv import blocks
from triforce.kv.prefix import PrefixStore
from triforce.model import ModelConfig
from triforce.plan import PADDED, Padding

LLAMA_3_8B = ModelConfig(128_256, 4096, 32, 32, 8, 128, 14_336)
NO_BITS = Padding(plain=False, drafts=True, inner=True)


def test_rows_are_counted_by_tiles():
    """8 rows of 16 queries fill a tile of 128; a row of 48 leaves some of it empty; one of 256 fills two."""
    assert [narrowing.places(going, 16) for going in (1, 8, 9, 16, 31, 32)] == [8, 8, 16, 16, 32, 32]
    assert [narrowing.places(going, 48) for going in (1, 2, 3)] == [2, 2, 5]
    assert [narrowing.places(going, 256) for going in (1, 2, 3)] == [1, 2, 3]


def test_fewer_rows_pay_where_there_are_fewer_tiles_for_long():
    four, two = (narrowing.shared_ms(LLAMA_3_8B, 122_880, rows, 16) for rows in (32, 16))
    assert 7 < four - two < 9  # measured on an H200: 8.5
    assert 8 < narrowing.own_ms(LLAMA_3_8B, 8 * 32_768, 2) < 9  # the same: 8 of 15 ms
    assert narrowing.pays(8.0, 30, 32, True, False) and not narrowing.pays(8.0, 20, 32, True, False)
    assert narrowing.pays(8.0, 20, 32, False, False) and not narrowing.pays(8.0, 10, 32, False, False)
    assert narrowing.pays(8.0, 1, 32, True, True) and not narrowing.pays(0.0, 1000, 32, True, True)


def test_states_of_some_rows_among_all():
    q, k = torch.randn(3, 2, 5, 8), torch.randn(1, 2, 9, 8)
    whole = attention.over_shared(q, k, k)
    rows = torch.tensor([2, 0, 2])
    out, lse = attention.among_all(attention.over_shared(q[rows], k, k), rows, 3)
    for x, of_all in ((out, whole[0]), (lse, whole[1])):
        assert x.shape == of_all.shape and (x[1] == 0).all()
        torch.testing.assert_close(x[[0, 2]], of_all[[0, 2]])


@pytest.fixture
def shared_for(monkeypatch):
    """Rows and queries of each call over what is shared. A tile has two rows here, and recording takes no time."""
    seen, over_shared = [], attention.over_shared
    monkeypatch.setattr(attention, "over_shared", lambda q, *args, **more: (
        seen.append(tuple(q.shape[:3])), over_shared(q, *args, **more))[1])
    monkeypatch.setattr(PrefixStore, "can_narrow", property(lambda self: self.base > 0))
    monkeypatch.setattr(narrowing, "TILE", 2 * 8 * 2)  # of 8 rows of a block, for 2 heads each
    monkeypatch.setattr(narrowing, "PREPARING", 0.0)
    monkeypatch.setattr(narrowing, "PLAN", 0.0)
    return seen


def state_of(pair, padding=NO_BITS, rows=6):
    prompts = [random_prompt(96) + random_prompt(20 + row, seed=row) for row in range(rows)]
    # Without a view that all rows share, no row's text depends on another's.
    state = make_state(*pair, prompts, base=96, sampling={"temperature": 0.8}, retrieval=False, draft_cache="streaming")
    state.hierarchy._leaves_out = False  # as on a GPU
    state.rewind(200, padding=padding)
    return state


def test_rows_that_go_on_say_the_same(pair, shared_for):
    state = state_of(pair)
    texts = run_rounds(state, 60)
    state.rewind(200, padding=NO_BITS)
    del shared_for[:]
    run_rounds(state, 5)
    assert {call[0] for call in shared_for if call[2] == 16} == {6}
    for closed, attending in (([1], 6), ([4], 4), ([0], 4), ([5], 2)):
        for row in closed:
            state.close_row(row)
        del shared_for[:]
        state.round()
        assert {call[0] for call in shared_for if call[2] == 16} == {attending}, closed
    while min(len(state.texts(state.prompt_end[row] + 1)[row]) for row in (2, 3)) < 60:
        state.round()
    said = [state.texts(state.prompt_end[row] + 1)[row] for row in range(6)]
    assert all(len(said[row]) < 60 for row in (0, 1, 4, 5))
    for mine, text in zip(said, texts, strict=True):
        assert mine[:60] == text[: len(mine)]
    state.rewind(200, padding=NO_BITS)  # all rows again
    del shared_for[:]
    assert run_rounds(state, 60) == texts and {call[0] for call in shared_for if call[2] == 16} == {6}


def test_places_that_are_left_over_are_of_a_row_that_has_ended(pair, shared_for):
    state = state_of(pair)
    outer = state.hierarchy.outer
    outer.attend_for([1, 4, 5], 4)
    assert outer._attended[:4].tolist() == [1, 4, 5, 0] and outer.num_attended == 4
    outer.attend_for([0, 4])
    assert outer._attended[:2].tolist() == [0, 4] and outer.num_attended == 2


def test_what_was_recorded_once_pays_again(pair, shared_for, monkeypatch):
    state = state_of(pair)
    for preparing in (0.0, 1e6):
        monkeypatch.setattr(narrowing, "PREPARING", preparing)
        state.rewind(200, padding=NO_BITS)
        run_rounds(state, 5)
        assert state.hierarchy.outer.num_attended is None
        for row in range(1, 6):
            state.close_row(row)
        state.round()
        assert state.hierarchy.outer.num_attended == 2
    # Not for other lengths.
    state.rewind(20, padding=NO_BITS)
    run_rounds(state, 5)
    for row in range(1, 6):
        state.close_row(row)
    state.round()
    assert state.hierarchy.outer.num_attended is None


@pytest.mark.parametrize("queries", [4, 16])
def test_what_few_rows_see_is_laid_out_as_what_all_see(monkeypatch, queries):
    """In the dtype of the same kernel: a compiled piece takes one alone."""
    def kernel(q, *_):  # as a GPU's say it
        return q.new_zeros(q.shape), torch.zeros(q.shape[:3])

    monkeypatch.setattr(attention, "_can_split", lambda rows: True)
    monkeypatch.setattr(attention, "_cudnn", kernel)
    monkeypatch.setattr(attention, "partial", kernel)
    q, k = torch.zeros(32, 8, queries, 16, dtype=torch.bfloat16), torch.zeros(1, 8, 4096, 16, dtype=torch.bfloat16)
    whole, rows = attention.over_shared(q, k, k), torch.arange(8)
    some = attention.among_all(attention.over_shared(q[rows], k, k, batch=32), rows, 32)
    assert [(x.dtype, x.shape, x.stride()) for x in some] == [(x.dtype, x.shape, x.stride()) for x in whole]
    assert whole[0].dtype == torch.float32
    # A step's layer asks for it like this. The keys of many heads and rows are not parted.
    monkeypatch.setattr(attention, "parts_of_keys", lambda *_: 1)
    view = SimpleNamespace(shared=SimpleNamespace(k=[k], packed=None), base=4096, before=lambda i: (k, k))
    monkeypatch.setattr(attention, "pays_to_plan", lambda *_: True)
    assert blocks.over_shared(view, 0, q[rows], batch=32)[0][0].dtype == torch.float32


@pytest.mark.parametrize("how", ["bits are promised", "nothing is shared", "recording takes long", "begun just now"])
def test_all_rows_stay(pair, shared_for, monkeypatch, how):
    """Where the bits of a row must not depend on its neighbours, and where it does not pay."""
    if how == "nothing is shared":
        monkeypatch.setattr(PrefixStore, "can_narrow", property(lambda self: False))
    if how == "recording takes long":
        monkeypatch.setattr(narrowing, "PREPARING", 1e6)
    state = state_of(pair, PADDED if how == "bits are promised" else NO_BITS)
    if how != "begun just now":
        run_rounds(state, 5)
    for row in range(5):
        state.close_row(row)
    state.round()
    assert state.hierarchy.outer.num_attended is None
    if how == "recording takes long":
        # What was recorded once costs nothing.
        state._narrowed.add((2, state.hierarchy.outer.num_rows, state.cache.prefix.extent, state.compiler.made_of))
        state.round()
        assert state.hierarchy.outer.num_attended == 2
