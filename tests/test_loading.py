"""What `load` makes of what it was not told, and of what does not go together."""

import pytest

import triforce
from triforce import memory
from triforce.errors import UserError


def test_defaults_on_a_cpu():
    engine = triforce.load("tiny", device="cpu", max_batch_size=3)
    settings = engine.settings
    assert settings.auto and (settings.gamma, settings.gamma_inner, settings.block_size) == (7, 3, 8)
    assert settings.prefill_chunk_size == 1024 and settings.flush_interval == 128
    assert str(engine.target.dtype) == str(engine.draft.dtype) == "torch.float32" and not engine.placement.compile
    assert engine.placement.max_batch_size == 3
    assert engine.eos_ids == (engine.tokenizer.eos_id,) == (2,)
    fixed = triforce.load("tiny", device="cpu", gamma=6).settings
    assert not fixed.auto and (fixed.gamma, fixed.gamma_inner) == (6, 2)


def test_a_text_ends_where_the_model_ends_it(monkeypatch):
    engine = triforce.load("tiny", device="cpu", gamma=3)
    whole = engine.generate("Once upon a time", 12, temperature=0.0, ignore_eos=True).tokens
    monkeypatch.setattr("triforce.hf.checkpoint.eos_token_ids", lambda folder: (whole[5],))
    engine = triforce.load("tiny", device="cpu", gamma=3)
    assert engine.generate("Once upon a time", 12, temperature=0.0).tokens == whole[: whole.index(whole[5]) + 1]
    assert engine.generate("Once upon a time", 12, temperature=0.0, ignore_eos=True).tokens == whole


@pytest.mark.parametrize("options, looks_up", [({}, True), ({"gamma": 6}, False), ({"draft": False}, False),
                                               ({"draft": "ngram", "gamma": 6}, True), ({"retrieval": False}, True)])
def test_what_looks_up(options, looks_up):
    assert triforce.load("tiny", device="cpu", **options).settings.ngram == looks_up


def test_all_layers_may_be_resident():
    engine = triforce.load("tiny", device="cpu", offload=True, num_resident_layers=8, gamma=3)
    assert len(engine.generate([5] * 100, 4, ignore_eos=True).tokens) == 4


def test_snapkv_wants_its_cache_on_the_device():
    with pytest.raises(UserError, match="'snapkv' chooses from a cache on the device"):
        triforce.load("tiny", device="cpu", offload=True, draft_cache="snapkv")
    triforce.load("tiny", device="cpu", offload=True, draft_cache="snapkv", retrieval=False)  # the draft's own


def test_weights_are_planned_before_they_are_read(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    with pytest.raises(UserError, match=r"target weights .* GiB \(--dtype\), draft weights .* GiB \(--draft none\)"):
        triforce.load("tiny", device="cpu")
    with pytest.raises(UserError) as error:
        triforce.load("tiny", device="cpu", draft=False)
    assert "draft weights" not in str(error.value)
