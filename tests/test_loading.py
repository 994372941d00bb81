"""What `load` makes of what it was not told, what does not go together, and what an engine plans for a call."""

from dataclasses import replace

import pytest
from conftest import make_engine, random_prompt, refused

import triforce
from triforce.config import Placement, Settings, split_view
from triforce.decode.batch import Sizes
from triforce.engine import memory
from triforce.engine.engine import Engine
from triforce.engine.memory import MemoryPlan, for_views
from triforce.model import ModelConfig, Transformer


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


def test_weights_are_planned_before_they_are_read(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    refused(r"target weights .* GiB \(--dtype, --weights fp8\), draft weights .* GiB \(--draft none\)",
            triforce.load, "tiny", device="cpu")
    assert "draft weights" not in refused("target weights", triforce.load, "tiny", device="cpu", draft=False)


def test_settings_are_resolved_by_device():
    cpu, gpu = Settings().resolve("cpu"), Settings().resolve("cuda")
    assert (cpu.gamma, cpu.gamma_inner, cpu.block_size, cpu.prefill_chunk_size) == (7, 3, 8, 1024)
    assert (gpu.gamma, gpu.gamma_inner, gpu.block_size, gpu.prefill_chunk_size) == (15, 4, 16, 8192)
    intervals = [Settings(budget=budget).resolve("cuda").flush_interval for budget in (None, 1.0, 0.1, 4096, 256)]
    assert intervals == [256, 256, 256, 256, 128]
    blocks = [Settings().resolve("cuda", max_batch_size=rows).block_size for rows in (1, 4, 5, 8, 100)]
    assert blocks == [16, 16, 12, 8, 4]
    assert Settings(gamma=9).resolve("cuda", max_batch_size=100).block_size == 10
    groups = [Settings().resolve("cuda", query_group=group).block_size for group in (1, 4, 5, 8, 32)]
    assert groups == [16, 16, 12, 8, 4]  # at most 64 queries of a KV head, of 4 tokens at least
    shared = {group: [Settings().resolve("cuda", max_batch_size=rows, query_group=group, shared=True).block_size
                      for rows in (1, 4, 8, 16, 32)] for group in (1, 4, 8)}
    assert shared == {1: [16, 16, 8, 4, 4], 4: [16, 8, 4, 4, 2], 8: [8, 4, 4, 2, 2]}  # 128 queries at a time
    assert [Settings(gamma=1, block_size=asked).resolve().block_size for asked in (2, 8, 9)] == [4, 8, 12]  # in fours
    assert Settings(block_size=1, retrieval=False).resolve(has_model=False).block_size == 1
    for given in ({"gamma": 5}, {"gamma_inner": 5}):
        assert Settings(**given).resolve("cuda", max_batch_size=32, query_group=4, shared=True).block_size == 6
    assert Settings().resolve("cpu", max_batch_size=32, query_group=4, shared=True).block_size == 8
    short = [Settings(sampling="coupled", flush_interval=8).resolve("cuda", query_group=4, max_batch_size=rows)
             for rows in (1, 3)]
    assert [one.block_size for one in short] == [8, 8]  # without leaves it might have 10
    assert Settings().resolve("cuda", query_group=8, offload=True).block_size == 64
    assert Settings().resolve("cpu", query_group=8).block_size == 8
    found = {(device, offload): Settings().resolve(device, offload=offload) for device in ("cpu", "cuda")
             for offload in (False, True)}
    assert {key: (one.block_size, one.flush_interval) for key, one in found.items()} == {
        ("cpu", False): (8, 128), ("cpu", True): (8, 128), ("cuda", False): (16, 256), ("cuda", True): (64, 256)}
    for draft, rows in (("ngram", 16), (None, 1)):
        assert Settings(retrieval=False, draft=draft).resolve("cuda", has_model=False).block_size == rows


def test_questions_have_wider_blocks_the_fewer_there_are(pair, monkeypatch):
    """Whatever number may run side by side."""
    for most in (1, 8):
        buffers = make_engine(*pair, max_batch_size=most, block_size=None).buffers
        monkeypatch.setattr(buffers, "device", "cuda")  # a CPU has the same for any number
        found = [buffers.settings_for(rows, shared=True).block_size for rows in (1, 2, 4, 8, 32)]
        assert found == sorted(found, reverse=True) and found[0] == 16 > found[-1]


def engine_of(pair, **more) -> Engine:
    return make_engine(pair[0], pair[1], flush_interval=16, chunk_size=4, **more)


def test_the_default_budget_is_a_share_of_the_prompt(pair):
    budgets = {10: 1024, 16_384: 1024, 40_000: 1280, 65_536: 2048, 120_000: 3840, 10**6: 4096}
    engine = engine_of(pair)
    assert {length: engine.buffers.budget(length) for length in budgets} == budgets
    assert engine_of(pair, retrieval=False).buffers.budget(10**6) == 0
    for rows in (2, 8):  # that read one view of what they share
        assert {length: engine.buffers.budget(length, sharing=rows) // 2 for length in budgets} == budgets


def test_the_default_budget_from_host_memory_is_what_memory_is_meant_for(pair):
    llama_2 = ModelConfig(32_000, 4096, 32, 32, 32, 128, 11_008)
    qwen = ModelConfig(151_936, 1536, 28, 12, 2, 128, 8960, tie_word_embeddings=True, qkv_bias=True)
    assert qwen.num_parameters == 1_543_714_304
    settings = Settings().resolve("cuda", offload=True)
    for shards in (1, 2):
        shard = replace(qwen, num_shards=shards, n_head=12 // shards, n_kv_head=2 // shards, ffn_dim=8960 // shards)
        # Half of a prompt, or as much as half of the weights, or an eighth. Prompts of similar length share buffers.
        for offload, size, most in ((True, None, 53_248), ("auto", None, 12_288), (True, "9GiB", 12_288)):
            room = for_views(Placement(offload=offload, resident_memory=size), shard)
            found = [settings.view_tokens(length, room) for length in (40_000, 80_000, 122_880)]
            assert found == [min(16_384, most), min(36_864, most), most]
            assert settings.view_tokens(122_880, room, sharing=8) == most
        assert settings.view_tokens(122_880, for_views(Placement(), shard)) == 3840
    assert for_views(Placement(offload=True, num_resident_layers=3), llama_2) == llama_2.weights_in_tokens // 2
    assert settings.view_tokens(122_880, for_views(Placement(offload="auto"), llama_2)) == 3840


def test_a_view_from_host_memory_takes_what_is_free(pair, monkeypatch):
    monkeypatch.setattr(ModelConfig, "weights_in_tokens", 20_000)
    model = Transformer.random(replace(pair[0].config, max_position_embeddings=20_480))
    engine, asked = engine_of((model, None), offload=True), []

    def within(planned, sizes, settings, free):
        asked.append(sizes.budget)
        return 512

    monkeypatch.setattr(memory, "view_within", within)
    states = []
    for length in (9000, 8200):
        engine.generate(random_prompt(length, seed=length), 4)
        states.append(engine.buffers.state)
    assert states[0] is states[1] and states[0].budget == 512 and asked == [4096]  # once: half of a prompt
    monkeypatch.undo()
    monkeypatch.setattr(ModelConfig, "weights_in_tokens", 20_000)
    for length, budget in ((17_000, 8192), (9000, 4096)):
        engine.generate(random_prompt(length, seed=length), 4)
        assert engine.buffers.state.budget == budget


@pytest.mark.parametrize("interval, chunk", [(128, 8), (384, 48), (1024, 8), (192, 96)])
def test_a_view_that_memory_cuts_is_one_that_settings_allow(interval, chunk):
    settings = Settings(flush_interval=interval, chunk_size=chunk).resolve("cuda", offload=True)
    for free in range(0, 100_000, 700):
        view = memory.view_within(lambda sizes: MemoryPlan((memory.Part("view", sizes.budget),), memory.Part("", 0)),
                                  Sizes(1, 120_000, 48 * chunk * 20, 64), settings, free)
        split_view(view, chunk, interval, 0.25)  # raises nothing
        assert view <= max(free, 512, interval + 2 * chunk)
    assert view == 48 * chunk * 20


def test_budgets_that_are_given(pair):
    assert engine_of(pair, budget=64).buffers.budget(10**6) == engine_of(pair, budget=64).buffers.budget(
        10**6, sharing=8) == 64
    engine = engine_of(pair, budget=0.25)
    assert [engine.buffers.budget(length) for length in (8, 1000, 1001, 10_000)] == [24, 252, 252, 2500]
    assert make_engine(pair[0], retrieval=False).buffers.budget(1000) == 0
    for budget in (5000, 0.9):  # no more than a row has room for, in whole chunks
        settings = make_engine(*pair, budget=budget).settings
        chunk = settings.chunk_size
        assert settings.view_tokens(5000, room=1001) == -(-1001 // chunk) * chunk < settings.view_tokens(5000)


def test_ids_that_the_draft_does_not_know_are_refused(pair):
    small = Transformer.random(ModelConfig(40, 16, 1, 2, 2, 8, 32), seed=1, std=0.3)
    engine = engine_of((pair[0], small), budget=64)
    assert engine.vocab_size == 40
    refused("token id 50 is outside the vocabulary of 40", engine.generate, [1, 50], 4)
    tokens = engine.generate(random_prompt(50, vocab_size=40), 60, temperature=3.0, top_p=1.0).tokens
    assert len(tokens) == 60 and max(tokens) < 40


def test_a_document_is_computed_in_intervals_longer_than_the_smallest_default_view(pair):
    engine, ids = make_engine(*pair, flush_interval=1040), random_prompt(1100)
    book = engine.prefill(ids)
    answer = engine.generate([5, 6, 7], 12, prefix=book, temperature=0.0)
    alone = make_engine(*pair, flush_interval=1040).generate(ids + [5, 6, 7], 12, temperature=0.0)
    assert book.num_shared == 1040 and answer.tokens == alone.tokens
