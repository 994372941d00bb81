"""Steps compute fewer rows, once others have ended: where that pays, and to the same end.

What rows have for themselves: test_cache.py.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import make_state, random_prompt, run_rounds

from triforce import attention, narrowing
from triforce.costs import to_json
from triforce.kv import blocks
from triforce.kv.prefix import PrefixStore
from triforce.kv.store import runs
from triforce.model import ModelConfig
from triforce.plan import Plan
from triforce.speculator import Speculator

LLAMA_3_8B = ModelConfig(128_256, 4096, 32, 32, 8, 128, 14_336)


def test_steps_have_a_power_of_two_of_rows():
    assert [narrowing.widths(going, 8) for going in (1, 2, 3, 4, 5, 7)] == [[1, 2, 4], [2, 4], [4], [4], [], []]
    assert narrowing.widths(3, 6) == [4] and narrowing.widths(1, 2) == [1] and narrowing.widths(9, 32) == [16]


def saved(before: int, after: int, shared: int = 122_880, own: float = 64.0) -> float:
    """By a step of 4 tokens a row."""
    return narrowing.saved_ms(LLAMA_3_8B, before, after, 4, shared=shared, own=own, itemsize=2)


def test_fewer_rows_take_less():
    """As measured on an H200."""
    four, two = (narrowing.shared_ms(LLAMA_3_8B, 122_880, rows * 16) for rows in (32, 16))
    assert 7 < four - two < 9  # 8.5
    assert 8 < narrowing.own_ms(LLAMA_3_8B, 8 * 32_768, 2) < 9  # 8 of 15 ms
    assert 0.5 < saved(8, 1) < 0.8 and 0.1 < saved(8, 2) < 0.4 and -0.3 < saved(8, 4) < 0  # of one tile
    assert 11 < saved(32, 8) < 17  # of four: 11.1
    assert 3.5 < saved(8, 1, shared=0, own=32_768.0) < 6.5  # of texts of their own


def test_fewer_rows_pay_where_they_take_less_for_long():
    assert narrowing.pays(8.0, 30, 32, True) and not narrowing.pays(8.0, 20, 32, True)
    assert narrowing.pays(8.0, 20, 32, False) and not narrowing.pays(8.0, 10, 32, False)


@pytest.fixture
def shared_for(monkeypatch):
    """Rows and queries of each call over what is shared. Recording takes no time."""
    seen, over_shared = [], attention.over_shared
    monkeypatch.setattr(attention, "over_shared", lambda q, *args, of=None, **more: (
        seen.append((len(q if of is None else of), *q.shape[1:3])), over_shared(q, *args, of=of, **more))[1])
    monkeypatch.setattr(PrefixStore, "can_narrow", property(lambda self: self.base > 0))
    monkeypatch.setattr(narrowing, "PREPARING", 0.0)
    monkeypatch.setattr(narrowing, "PLAN", 0.0)
    monkeypatch.setattr(narrowing, "APART", 0.0)
    return seen


def state_of(pair, temperature=0.8, rows=6):
    prompts = [random_prompt(96) + random_prompt(20 + row, seed=row) for row in range(rows)]
    # Without a view that all rows share, no row's text depends on another's.
    state = make_state(*pair, prompts, base=96, sampling={"temperature": temperature}, retrieval=False,
                       draft_cache="streaming")
    state._on_cpu = False
    state.rewind(200)
    return state


def test_rows_that_go_on_say_the_same(pair, shared_for):
    state = state_of(pair)
    texts = run_rounds(state, 60)
    state.rewind(200)
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
    state.rewind(200)  # all rows again
    del shared_for[:]
    assert run_rounds(state, 60) == texts and {call[0] for call in shared_for if call[2] == 16} == {6}


def test_places_that_are_left_over_are_of_a_row_that_has_ended(pair, shared_for):
    state = state_of(pair)
    outer = state.hierarchy.outer
    for rows, places, of in (([1, 4, 5], 4, [1, 4, 5, 0]), ([0, 4], 2, [0, 4]), ([3], 0, [3])):
        outer.compute_for(rows, places)
        assert outer._chosen[: outer.num_computed].tolist() == of
    outer.compute_for(None)
    assert outer.num_computed is None


def test_rows_that_are_left_out_say_nothing(pair, shared_for):
    """Nor is a view chosen by their queries."""
    state = state_of(pair)
    state.round()
    kept = state.cache.query_weight.sum(1)
    assert (kept > 0).all()
    state.hierarchy.compute_for([1, 4])
    assert (state.cache.query_weight.sum(1) > 0).tolist() == [False, True, False, False, True, False]
    rows, _ = state.hierarchy.outer.outbox.read()
    assert [bool(row.tokens) for row in rows] == [False, True, False, False, True, False]


def close_all_but(state, going: int) -> None:
    for row in range(going, state.batch):
        state.close_row(row)
    state.round()


@pytest.mark.parametrize("how", ["bits are promised", "nothing is shared", "recording takes long", "begun just now"])
def test_all_rows_stay(pair, shared_for, monkeypatch, how):
    """Where the bits of a row must not depend on its neighbours, and where it does not pay."""
    if how == "nothing is shared":
        monkeypatch.setattr(PrefixStore, "can_narrow", property(lambda self: False))
    if how == "recording takes long":
        monkeypatch.setattr(narrowing, "PREPARING", 1e6)
    state = state_of(pair, temperature=0.0 if how == "bits are promised" else 0.8)
    if how != "begun just now":
        run_rounds(state, 5)
    close_all_but(state, 1)
    assert state.hierarchy.outer.num_computed is None


@pytest.fixture
def small_tiles(monkeypatch):
    """Of two rows. To split keys alike takes no time."""
    monkeypatch.setattr(narrowing, "TILE", 32)
    monkeypatch.setattr(narrowing, "LONG", 96)
    monkeypatch.setattr(narrowing, "MERGED", 0.0)
    monkeypatch.setattr(narrowing, "SPREAD", 0.0)


def test_keys_are_split_alike_where_a_tile_takes_longer_than_that():
    """As measured on an H200. And where parts take little memory."""
    pays = partial(narrowing.pays_to_split_alike, LLAMA_3_8B)
    assert pays(122_880, 32, 4) and pays(32_768, 32, 4) and not pays(16_384, 32, 4)
    assert not pays(122_880, 8, 4) and pays(122_880, 9, 4)  # of 16 queries each: 8 have one tile
    assert pays(122_880, 64, 4) and not pays(122_880, 65, 4) and not pays(122_880, 1, 64)
    share = replace(LLAMA_3_8B, n_head=4, n_kv_head=1)  # of one of 8 ranks
    assert not narrowing.pays_to_split_alike(share, 122_880, 32, 4)
    assert not narrowing.pays_to_split_alike(replace(LLAMA_3_8B, n_kv_head=32, head_dim=1024), 2000, 64, 4)


@pytest.mark.parametrize("keeps_bits", [True, False])
def test_where_bits_are_promised_all_rows_are_computed_and_fewer_attend(pair, shared_for, small_tiles, monkeypatch,
                                                                        keeps_bits):
    """To what they share, in tiles: the widest step of as few tiles. If that is seen to change bits, all attend."""
    asked = []
    monkeypatch.setattr(narrowing.Narrower, "_keeps_bits",
                        lambda self, width, plan: (asked.append(width), keeps_bits)[1])
    state = state_of(pair, temperature=0.0)
    texts = run_rounds(state, 60)
    state.rewind(200)
    outer = state.hierarchy.outer
    assert outer.num_attending == 6
    run_rounds(state, 5)
    for closed, attending in (([1], 6), ([4], 4), ([0], 4), ([5], 2), ([2], 2)):
        for row in closed:
            state.close_row(row)
        del shared_for[:]
        state.round()
        attending = attending if keeps_bits else 6
        assert {call[0] for call in shared_for if call[2] == 16} == {attending}, closed
        assert outer.num_computed is None and outer.num_attending == attending
    assert set(asked) == ({4, 2} if keeps_bits else {4, 2, 1})
    while len(state.texts(state.prompt_end[3] + 1)[3]) < 60:
        state.round()
    for mine, text in zip([state.texts(end + 1)[row] for row, end in enumerate(state.prompt_end)], texts, strict=True):
        assert len(mine) > 4 and mine[:60] == text[: len(mine)]
    state.rewind(200)
    assert outer.num_attending == 6 and run_rounds(state, 60) == texts


def test_where_bits_are_promised_what_is_recorded_is_tried_too(pair, shared_for, small_tiles, monkeypatch):
    monkeypatch.setattr(narrowing.Narrower, "_keeps_bits", lambda self, width, plan: width != 2)
    monkeypatch.setattr(narrowing, "PREPARING", 1e6)
    monkeypatch.setattr(Speculator, "has_recorded", lambda self, plan, width: width in (2, 4))
    state = state_of(pair, temperature=0.0)
    close_all_but(state, 2)
    assert state.hierarchy.outer.num_attending == 4


def test_after_few_have_attended_few_may_be_computed(pair, shared_for):
    """A batch may be answered greedily, and then with drawn tokens."""
    outer = state_of(pair).hierarchy.outer
    outer.attend_for([1, 4], 2)
    assert (outer.num_computed, outer.num_attending) == (None, 2)
    outer.compute_for([1, 4], 2)
    assert (outer.num_computed, outer.num_attending) == (2, None) and not outer.outbox.buffer[0].any()
    outer.attend_for([1, 4], 2)
    assert (outer.num_computed, outer.num_attending) == (None, 2)
    outer.compute_for(None)
    outer.attend_for(None)
    assert (outer.num_computed, outer.num_attending) == (None, 6)
    outer.compute_for(None)
    assert (outer.num_computed, outer.num_attending) == (None, None)


def test_rows_of_one_tile_all_attend(pair, shared_for):
    """Fewer would take as long, and there the steps are those of drawn tokens."""
    state = state_of(pair, temperature=0.0)
    assert state.hierarchy.outer.num_attending is None
    state.narrower._choose = None  # nothing to choose
    close_all_but(state, 1)
    assert state.hierarchy.outer.num_attending is None and state.narrower.promises_bits


def test_a_plan_serves_as_many_tiles():
    """A tile has 16 rows of the 7B in blocks of 8, and half a tile has 8. Of the 8B it has 5 in blocks of 6."""
    small, large = ModelConfig(512, 64, 1, 32, 8, 128, 128), ModelConfig(512, 64, 1, 32, 32, 128, 128)
    assert not any(narrowing.is_planned(large, 122_880, 8, rows, 8) for rows in (1, 2, 4))
    assert narrowing.is_planned(large, 122_880, 16, 8, 8)
    assert not narrowing.is_planned(small, 122_880, 5, 4, 6) and narrowing.is_planned(small, 122_880, 6, 4, 6)
    assert narrowing.is_planned(small, 122_880, 32, 16, 4) and narrowing.is_planned(small, 122_880, 32, 8, 4)
    assert not narrowing.is_planned(small, 122_880, 32, 4, 4)  # another kernel serves so few
    assert not narrowing.is_planned(small, 0, 32, 16, 4)


def test_tiles_are_compared_with_those_that_are_computed_now(pair, shared_for, monkeypatch):
    """Of six rows, where four go on."""
    narrower, asked = state_of(pair, temperature=0.8).narrower, []
    monkeypatch.setattr(narrowing, "is_planned", lambda config, base, before, after, block: asked.append(
        (before, after)) or True)
    narrower.outer.compute_for([0, 2, 3, 5], 4)
    assert narrower.record(Plan(3, "model"), float("inf")) == 0 and asked == [(4, 2), (4, 1)]


def test_where_bits_are_promised_steps_are_tried_before_they_are_recorded(pair, shared_for):
    """Which takes long, so no such step is a short one, to be recorded for what it might save."""
    for temperature, planned in ((0.8, False), (0.0, True)):
        narrower = state_of(pair, temperature=temperature).narrower
        assert narrower._is_planned(6, 1, Plan(3, "model")) == planned


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("what", ["kept", "output", "sum", "other ranks"])
def test_whether_bits_are_kept_is_tried(pair, shared_for, monkeypatch, what, is_split):
    """Once for each size of a step, of one tile or of parts. A kernel for few rows may give other bits."""
    state, calls = state_of(pair, temperature=0.0), []
    parts = (2,) if is_split else ()

    def over_shared(q, k, v, merged, even, of):
        assert even
        calls.append(6 if of is None else of.tolist())
        out, lse = (x.expand(*parts, *x.shape).clone() for x in (q.float() * 2, q.float().sum(-1)))
        if of is not None:
            out[..., 0, :, :, :] = lse[..., 0, :, :] = 7.0  # a row that does not attend
            out[..., 2, :, :, :] += 1e-6 if what == "output" else 0.0
            lse[..., 2, :, :] += 1e-6 if what == "sum" else 0.0
        return merged(out, lse)

    monkeypatch.setattr(narrowing, "over_shared", over_shared)
    if what == "other ranks":
        monkeypatch.setattr(state.target, "group", SimpleNamespace(common=lambda names: set()))
    for _ in range(2):
        assert state.narrower._keeps_bits(2, Plan(3, "model")) == (what == "kept")
    assert calls == [6, [5, 2]]
    state.narrower.promises_bits = False
    assert state.narrower._keeps_bits(2, Plan(3, "model")) and calls == [6, [5, 2]]


@pytest.mark.parametrize("off", [0.0, 1e-3])
def test_the_kernel_itself_is_tried(pair, shared_for, monkeypatch, off):
    """Here one that takes row by row, and one whose bits depend on the number of rows."""
    one_row = attention.partial

    def kernel(q, k, v):
        out, lse = (torch.cat(x, 2) for x in zip(*(one_row(row, k, v) for row in q.split(1, 2)), strict=True))
        return out + off * q.shape[2], lse

    monkeypatch.setattr(attention, "partial", kernel)
    narrower = state_of(pair, temperature=0.0).narrower
    assert narrower._keeps_bits(4, Plan(3, "model")) == (off == 0.0)


def test_what_is_recorded_costs_nothing(pair, shared_for, monkeypatch):
    """The narrowest step of those that are, unless recording a narrower one pays."""
    monkeypatch.setattr(narrowing, "PREPARING", 1e6)
    recorded = set()
    monkeypatch.setattr(Speculator, "has_recorded", lambda self, plan, width: width in recorded)
    state = state_of(pair)
    run_rounds(state, 5)
    close_all_but(state, 1)
    for more, computed in (((), None), ((4,), 4), ((2,), 2)):
        recorded.update(more)
        state.round()
        assert state.hierarchy.outer.num_computed == computed
    monkeypatch.setattr(narrowing, "PREPARING", 0.0)
    state.round()
    assert state.hierarchy.outer.num_computed == 1


def test_times_of_fewer_rows_are_not_kept_as_those_of_all(pair, monkeypatch):
    prompts, kept = [random_prompt(60, seed=row) for row in range(4)], []
    state = make_state(*pair, prompts, gamma="auto", sampling={"temperature": 0.8})
    monkeypatch.setattr(state.pilot.shelf, "put", lambda name, learned: kept.append(to_json(learned)))
    for closed in ([], [1, 2, 3]):
        for row in closed:
            state.close_row(row)
        run_rounds(state, 0 if closed else 12)
        for _ in range(12 if closed else 0):
            state.round()
        state.pilot.keep()
        now = to_json(state.pilot.controller.learned)
        assert (kept.pop() == now) == (not closed)


def test_one_part_of_a_document_is_laid_out_as_several(monkeypatch):
    """In the dtype of their union. The keys of many heads and rows are not parted."""
    monkeypatch.setattr(attention, "_can_split", lambda rows: True)
    monkeypatch.setattr(attention, "_cudnn", lambda q, *_: (q.new_zeros(q.shape), torch.zeros(q.shape[:3])))
    monkeypatch.setattr(attention, "pays_to_plan", lambda *_: True)
    q, k = torch.zeros(8, 8, 4, 16, dtype=torch.bfloat16), torch.zeros(1, 8, 4096, 16, dtype=torch.bfloat16)
    view = SimpleNamespace(shared=SimpleNamespace(k=[k], packed=None), base=4096, before=lambda i: (k, k))
    for parts in (1, 2):
        monkeypatch.setattr(attention, "parts_of_keys", lambda *_, parts=parts: parts)
        assert blocks.over_shared(view, 0, q)[0][0].dtype == torch.float32


def test_runs_of_sequences():
    q, k, v = (torch.randn(6, 2, n, 8) for n in (3, 5, 5))
    whole = attention.partial(q, k, v)
    of = [4, 5, 1, 0]
    some = attention.of_runs(attention.partial, runs(of), q[of], k, v)
    for x, y in zip(some, whole, strict=True):
        assert torch.equal(x, y[of])
