"""The engine with the embedded pair: prompts, endings, streams, statistics, mistakes."""

import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import SIZES, VOCAB, make_engine, random_pair, random_prompt, refused, slow
from families import edit

import triforce
from triforce.hf.folders import TINY

TEXT = "The old man looked at the sea and said nothing. " * 40


def test_result_and_statistics(tiny_engine):
    out = tiny_engine.generate(TEXT, max_new_tokens=40, seed=3, ignore_eos=True)
    assert len(out.tokens) == 40 and out.finish_reason == "length"
    assert out.text == tiny_engine.tokenizer.decode(out.tokens, continues=True)
    stats = out.stats
    assert stats.prompt_len == len(tiny_engine.tokenizer.encode(TEXT)) and stats.new_tokens == 40 and stats.seed == 3
    assert 0 < stats.ttft and 0 < stats.tbt and math.isclose(stats.tokens_per_second, 1 / stats.tbt)
    assert set(stats.acceptance_rate) == {"retrieval", "full"}
    assert all(0 <= rate <= 1 for rate in stats.acceptance_rate.values())
    assert 1 <= stats.block_efficiency <= 7 and 6 <= stats.target_forwards <= 40
    assert stats.peak_memory > 2**20
    assert all(len(line) <= 80 for line in str(stats).splitlines()) and "tokens per second" in str(stats)


def test_seeds(tiny_engine):
    first = tiny_engine.generate(TEXT, 16, seed=5, ignore_eos=True).tokens
    tiny_engine.generate("Something else altogether.", 10)
    assert tiny_engine.generate(TEXT, 16, seed=5, ignore_eos=True).tokens == first
    assert tiny_engine.generate(TEXT, 16, seed=6, ignore_eos=True).tokens != first
    drawn = tiny_engine.generate(TEXT, 16, ignore_eos=True)
    assert tiny_engine.generate(TEXT, 16, seed=drawn.stats.seed, ignore_eos=True).tokens == drawn.tokens
    assert len({tiny_engine.generate(TEXT, 1).stats.seed for _ in range(3)}) == 3
    for seed in (torch.tensor([5]), [torch.tensor(5)], torch.tensor(5), 5.0):  # and NumPy's
        assert tiny_engine.generate(TEXT, 16, seed=seed, ignore_eos=True).tokens == first


def test_stream_equals_generate_and_can_be_closed(tiny_engine):
    out = tiny_engine.generate(TEXT, 40, seed=1)
    stream = tiny_engine.stream(TEXT, 40, seed=1)
    assert "".join(stream) == out.text and stream.result.tokens == out.tokens
    broken = tiny_engine.stream(TEXT, 40, seed=1)
    assert broken.result is None
    said = next(broken)
    so_far, more = broken.result, said + next(broken)
    broken.close()
    for result, text in ((so_far, said), (broken.result, more)):  # what there is, and was
        assert result.text == text and result.finish_reason == "interrupted" and 0 < result.stats.ttft
        assert len(result.levels) == len(result.pieces) == len(result.tokens)
        assert result.tokens == out.tokens[: len(result.tokens)] != [] and result.stats.new_tokens == len(result.tokens)
    assert tiny_engine.generate(TEXT, 40, seed=1).tokens == out.tokens


def test_a_second_generation_in_the_midst_of_a_prefill_ends_the_first(tiny_engine):
    out = tiny_engine.generate(TEXT, 8, seed=2)
    with pytest.raises(triforce.UserError, match="another generation has begun"):
        tiny_engine.generate(TEXT * 2, 8, on_prefill=lambda share: tiny_engine.generate("Others", 1))
    assert tiny_engine.generate(TEXT, 8, seed=2).tokens == out.tokens


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_ids_that_end_a_text(tiny_engine, ignore_eos):
    """As an eos does, of which there may be one too: the token is told, and is no text."""
    whole = tiny_engine.generate(TEXT, 40, temperature=0.0, ignore_eos=True)
    end = next(i for i in range(9, 40) if whole.tokens[i] not in whole.tokens[:i] and whole.pieces[i])
    for ids in ([whole.tokens[end]], {whole.tokens[end], 4000}, whole.tokens[end], np.array([whole.tokens[end]])):
        out = tiny_engine.generate(TEXT, 40, temperature=0.0, ignore_eos=ignore_eos, stop_token_ids=ids)
        assert (out.tokens, out.finish_reason) == (whole.tokens[: end + 1], "stop")
        assert out.text == "".join(whole.pieces[:end]) and len(out.levels) == end + 1
    first = tiny_engine.generate(TEXT, 40, temperature=0.0, ignore_eos=True, stop_token_ids=whole.tokens[3:6])
    assert len(first.tokens) == 1 + min(whole.tokens.index(one) for one in whole.tokens[3:6])


def test_forms_of_a_prompt(tiny_engine):
    ids = tiny_engine.tokenizer.encode(TEXT)
    by_text = tiny_engine.generate(TEXT, 8, seed=0)
    assert tiny_engine.generate(ids, 8, seed=0).tokens == by_text.tokens
    assert tiny_engine.generate(torch.tensor(ids), 8, seed=0).tokens == by_text.tokens
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = tiny_engine.generate([{"role": "user", "content": TEXT}], 8, seed=0, chat_template=template)
    assert chat.stats.prompt_len in (len(ids) - 1, len(ids))  # with or without the tokenizer's bos
    several = tiny_engine.generate([TEXT, "One"], 8, seed=0)
    assert [len(out.tokens) for out in several] == [8, 8] and several[0].tokens == by_text.tokens
    assert several[1].tokens == tiny_engine.generate("One", 8, seed=1).tokens  # row i uses seed + i
    one = tiny_engine.generate([ids[0]], 8, temperature=0.0)
    assert one.stats.prompt_len == 1 and len(one.tokens) == 8
    rows = np.array([ids[:20], ids[20:40]])  # arrays are batches or prompts by their shape
    expected = [tiny_engine.generate(row.tolist(), 5, temperature=0.0).tokens for row in rows]
    for batch in (rows, torch.from_numpy(rows), list(rows)):
        assert [out.tokens for out in tiny_engine.generate(batch, 5, temperature=0.0)] == expected
    assert tiny_engine.generate(rows[0], 5, temperature=0.0).tokens == expected[0]


def test_batch_of_ragged_prompts(pair):
    lengths = (300, 57, 1, 180, 20)
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(lengths)]
    outs = make_engine(*pair, max_batch_size=3, **SIZES).generate(prompts, 25, seed=9,
                                                                  temperature=[0.0, 0.5, 1.0, 0.9, 0.0])
    assert [len(out.tokens) for out in outs] == [25] * 5
    assert [out.stats.seed for out in outs] == [9, 10, 11, 12, 13]
    alone = make_engine(*pair, **SIZES)
    for i, temperature in ((1, 0.5), (2, 1.0), (3, 0.9)):
        assert alone.generate(prompts[i], 25, seed=9 + i, temperature=temperature).tokens == outs[i].tokens


def test_statistics_of_a_batch_are_each_rows_own(pair):
    engine, how = make_engine(*pair, max_batch_size=2, **SIZES), {"temperature": 0.0, "stop_token_ids": [7]}
    short, long = engine.generate([random_prompt(90)] * 2, 30, logit_bias=[{7: 1e6}, {7: -1e6}], **how)
    assert short.tokens == [7] and short.stats.target_forwards == short.stats.block_efficiency == 1
    assert len(long.tokens) == 30 and long.stats.block_efficiency == 30 / long.stats.target_forwards
    assert engine.generate(random_prompt(90), 1).stats.block_efficiency == 1


@pytest.mark.parametrize("pieces", [3, 1000])
def test_a_stream_that_has_ended_holds_no_buffers(tiny_engine, pieces, states):
    """Neither one that was closed nor one that came to its end, although both still tell their results."""
    engine = make_engine(tiny_engine.target, tiny_engine.draft, tokenizer=tiny_engine.tokenizer)
    stream = engine.stream(TEXT, 40, temperature=0.0, ignore_eos=True)
    said = [piece for piece, _ in zip(stream, range(pieces), strict=False)]
    stream.close()
    assert [state() is None for state in states] == [False]
    engine.release()
    assert states[0]() is None and stream.result.text.startswith("".join(said))


def test_logits_after_a_document_are_those_of_the_whole_text(pair, watched):
    """Which is not computed again."""
    engine, text = make_engine(*pair, **SIZES), random_prompt(90)
    document, another = engine.prefill(text[:70]), engine.prefill(random_prompt(70, seed=3))
    whole, computed = engine.logits([text]), watched(engine.target, "prefill", lambda tokens, *more: tokens.shape[1])
    some = engine.logits([text], last=10, prefix=document)
    torch.testing.assert_close(some, whole[:, -10:], atol=1e-4, rtol=1e-4)
    assert computed == [90 - document.num_shared] and document.num_shared >= 64
    for wrong in ({"last": 90}, {"last": 5, "prefix": another}):
        refused("begin with the prefix's", engine.logits, [text], **{"prefix": document, **wrong})


def test_logits_equal_the_rounds_and_those_of_the_last_positions_are_the_same(pair, watched):
    """Those alone go through the output layer: all of them for a long text may not fit."""
    engine, prompt = make_engine(*pair, **SIZES, prefill_chunk_size=32), random_prompt(90)
    tokens = engine.generate(prompt, 30, temperature=0.0).tokens
    assert engine.logits([prompt + tokens])[0, 89:-1].argmax(-1).tolist() == tokens
    rows = [prompt, random_prompt(90, seed=1)]
    whole = engine.logits(rows)
    assert whole.shape == (2, 90, VOCAB)
    seen = watched(engine.target.output, "forward", lambda hidden: hidden.shape)
    for last in (1, 7, 90, np.int64(5)):
        some = engine.logits(rows, last=last)
        assert some.shape == (2, last, VOCAB) and some.dtype == torch.float32
        torch.testing.assert_close(some, whole[:, -last:], atol=1e-4, rtol=1e-4)
        assert {shape[1] for shape in seen} == {last}
        seen.clear()
    for last, text in ((0, r"last \(0\) must be a whole number, at least 1"), (91, r"last \(91\) .* at most 90"),
                       (1.5, "whole number")):
        refused(text, engine.logits, rows, last=last)


LOADING = [  # (options of `load`, what is said of them)
    ({"gamma": 8}, "gamma (8) must be between 1 and block_size - 1 (7)"),
    ({"gamma": 0}, "gamma (0) must be a whole number, at least 1, or 'auto'"),
    ({"buget": 4096}, "buget is not a known setting; did you mean budget?"),
    ({"block_size": 500}, "block_size (500) must be between 1 and flush_interval (128); try 8"),
    ({"block_size": 1}, "block_size (1) leaves no room for a drafted token"),
    ({"budget": 4100}, "budget (4100) must be a multiple of chunk_size (8); try 4096"),
    ({"budget": 8}, "budget (8) must be at least 144"),
    ({"budget": 1.5}, "budget (1.5) must be a number of tokens, or a fraction"),
    ({"chunk_size": 7}, "chunk_size (7) must divide flush_interval (128)"),
    ({"max_seq_len": 10**9}, "max_seq_len (1000000000) exceeds the model's positions"),
    ({"device": "cuda:99"}, "device cuda:99 was asked for, and PyTorch finds"),
    ({"device": "meta"}, "device 'meta' is unknown"),
    ({"recent": 1.0}, "recent (1.0) must be a share"),
    ({"draft_cache": "full"}, "draft_cache ('full') must be 'retrieval' or 'query'"),
    ({"draft_cache": "snapkv", "retrieval": False}, "is for a retrieval level, which retrieval=False"),
    ({"draft_cache": "snapkv", "offload": True}, "'snapkv' chooses from a cache on the device"),
    ({"sampling": "gumbel"}, "sampling ('gumbel') must be 'rejection' or 'coupled'"),
    ({"leaves": 1}, "need sampling 'coupled', and it is 'rejection'"),
    ({"sampling": "coupled", "leaves_inner": 300}, "rows, and 512 are the most"),
    ({"offload": "all"}, "'auto'"), ({"num_resident_layers": 2}, "offload=True"),
    ({"offload": True, "num_resident_layers": 9}, "8 layers"),
    ({"offload": True, "num_resident_layers": -1}, "at least 0"),
    ({"offload": True, "num_resident_layers": 1, "resident_memory": "1GB"}, "give one"),
    ({"offload": True, "resident_memory": "9" * 400}, "20GiB"), ({"offload": True, "piece_tokens": 0}, "at least 1"),
    ({"gamma": True}, "gamma (True) must be a whole number"), ({"draft_sink": False}, "draft_sink (False) must"),
    ({"gamma_inner": 8, "block_size": 8}, "gamma_inner (8) must be between 1 and block_size - 1 (7)")]


@pytest.mark.parametrize("call,text", [
    *((lambda e, options=options: triforce.load("tiny", **{"device": "cpu", **options}), text)
      for options, text in LOADING),
    (lambda e: e.generate([]), "prompt is empty"),
    (lambda e: e.generate([4096000]), "outside the vocabulary of"),
    (lambda e: e.generate("a", 0), "max_new_tokens (0) must be a whole number, at least 1"),
    (lambda e: e.generate([5] * 4000, 200), "cut the prompt by 104 tokens to 3896 or ask for at most 96 new ones"),
    (lambda e: e.generate(b"hi"), "decode it: prompt.decode()"),
    (lambda e: e.generate("a", temprature=1), "temprature is not a known option of generate; did you mean "
     "temperature?"),
    (lambda e: e.generate("a", 5, top_p=0.0), "top_p (0.0)"),
    (lambda e: e.generate("a", 5, temperature="0.5"), "temperature ('0.5')"),
    (lambda e: e.generate("a", 5, stop_token_ids=[2, 4096]), "stop_token_ids: token id 4096 is outside the vocabulary "
     "of 4096; ids go from 0 to 4095"),
    (lambda e: e.generate("a", 5, stop_token_ids=2.0), "stop_token_ids (2.0) must be whole numbers"),
    (lambda e: e.generate("a", 5, one_row=True), "one_row needs speculate=False"),
    (lambda e: e.generate("a", 5, keep="middle"), "keep ('middle') must be None or 'start' or 'end' or 'both'"),
    (lambda e: e.generate("a", 5000, keep="end"), "exceed max_seq_len (4096)"),
    (lambda e: e.generate("a", 5, logprobs=-1), "logprobs (-1) must be a whole number, at least 0; try 5"),
    (lambda e: e.generate("a", 5, logprobs=True), "logprobs (True)"),
    (lambda e: e.generate("a", 5, logprobs=4097), "logprobs (4097) must be at most 4096, the size of the vocabulary"),
    *((lambda e, n=n: e.generate(["Once"] * n, 4, num_samples=10**8 // n), "100,000,000 answers are more than the "
       "65,536 of one call; ask for fewer at a") for n in (1, 2)),  # at once, and in little memory
    (lambda e: e.stream(["a", "b"], [3]), "max_new_tokens has 1 values for 2 prompts"),
    (lambda e: e.logits([[5]], last=1, prefix="a"), "prefix must be what this engine's `prefill`"),
    (lambda e: e.generate([1.5, 2.7]), "a list of whole numbers (ids)"),
    (lambda e: e.generate("a", 5, seed=2**63), "seed (9223372036854775808)"),
    (lambda e: e.logits([5, 6, 7]), "put the ids of one text into a list of their own: [[5, 6, 7]]"),
    (lambda e: e.generate(["a", ""], num_samples=2), "prompt 1: the prompt is empty")])
def test_mistakes(tiny_engine, call, text):
    assert text in refused("", call, tiny_engine)


def copy_of_tiny(folder, part="target", **config):
    """The embedded target or draft in another folder, with some fields of its config.json changed."""
    shutil.copytree(TINY / part, folder)
    edit(folder, **config)
    return folder


def test_a_draft_with_another_tokenizer_is_refused(tmp_path):
    draft = copy_of_tiny(tmp_path / "draft", "draft")
    model = bytearray((draft / "tokenizer.model").read_bytes())
    at = model.index("▁the".encode())
    model[at : at + len("▁the".encode())] = "▁zzz".encode()
    (draft / "tokenizer.model").write_bytes(model)
    with pytest.raises(triforce.UserError, match="another tokenizer than the target: id .* means '▁the' and '▁zzz'"):
        triforce.load("tiny", draft=draft, device="cpu")


def test_max_seq_len_decides_between_the_factors_of_longrope(tmp_path):
    """For a target and a draft; and keys that were saved of one kind are not opened as the other."""
    fields = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 256}
    parts = {name: copy_of_tiny(tmp_path / name, name, **fields, rope_scaling={
        "type": "longrope", "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}) for name in ("target", "draft")}
    how = {"device": "cpu", "draft": parts["draft"], "flush_interval": 64}
    short, long = (triforce.load(parts["target"], max_seq_len=most, **how) for most in (256, None))
    assert [model.config.max_len for model in (short.target, short.draft)] == [256, 256] < [long.target.config.max_len]
    path = tmp_path / "book.prefix"
    short.prefill(TEXT[:400]).save(path)
    assert short.open(path).num_shared > 0
    refused("another model", long.open, path)


def test_a_padded_draft_is_no_other_tokenizer(tmp_path):
    """Models of one family pad their vocabularies differently; ids beyond the tokenizer's are never drawn."""
    from safetensors.torch import load_file, save_file

    draft = copy_of_tiny(tmp_path / "draft", "draft", vocab_size=4160)
    tensors = load_file(draft / "model.safetensors")
    name = "model.embed_tokens.weight"
    pad = torch.ones(64, tensors[name].shape[1], dtype=tensors[name].dtype)
    tensors[name] = torch.cat([tensors[name], pad])
    save_file(tensors, draft / "model.safetensors")
    engine = triforce.load("tiny", draft=draft, device="cpu", gamma=6)
    assert engine.vocab_size == 4096
    warm = {"max_new_tokens": 16, "temperature": 1.5, "top_p": 1.0, "seed": 0}
    plain = triforce.load("tiny", device="cpu", gamma=6)
    assert engine.generate(TEXT, **warm).tokens == plain.generate(TEXT, **warm).tokens


def test_settings_may_be_of_numpy():
    engine = triforce.load("tiny", device="cpu", offload=True, num_resident_layers=np.int64(2), gamma=np.int32(3),
                           max_seq_len=np.int64(2048), flush_interval=np.int64(64), budget=np.float64(0.5))
    assert engine.placement.num_resident_layers == 2 and engine.settings.flush_interval == 64
    assert all(type(value) is int for value in (engine.placement.max_seq_len, engine.settings.gamma))
    free = engine.generate(TEXT, 8, temperature=0.0, ignore_eos=True).tokens
    assert engine.generate(TEXT, 8, logit_bias={np.int64(77): 1e6}).tokens == [77] * 8
    assert engine.generate(TEXT, 8, temperature=0.0, ignore_eos=True).tokens == free and len(free) == 8  # forgotten


@pytest.mark.parametrize("options", [
    {}, {"draft": False}, {"draft": "ngram"}, {"retrieval": False}, {"draft": False, "retrieval": False},
    *slow({"block_size": 2}, {"block_size": 16})])
def test_auto_in_all_its_combinations(pair, options, eager_to_draft):
    """Greedy tokens are those of no speculation, whatever there is to draft with, also in a mixed batch; and where
    there is something, it does draft."""
    draft = pair[1] if "draft" not in options else None
    engine = make_engine(pair[0], draft, **{"gamma": "auto", "max_batch_size": 2, "budget": 256, **options})
    drafts, long = options != {"draft": False, "retrieval": False}, random_prompt(300)
    for prompts, temperature in (([[5]], 0.8), ([long], 0.0), ([[5], long], [0.0, 0.9])):
        how = {"max_new_tokens": 20, "ignore_eos": True, "temperature": temperature}
        outs = engine.generate(prompts, **how)
        assert any(plan.gamma > 0 for plan in eager_to_draft) == drafts  # of the rounds that were timed
        assert all(len(out.tokens) == 20 and ("full" in out.stats.acceptance_rate) == drafts for out in outs)
        eager_to_draft.clear()
        if temperature != 0.8:
            greedy = 0 if temperature == [0.0, 0.9] else -1
            assert outs[greedy].tokens == engine.generate(prompts, speculate=False, **how)[greedy].tokens


def test_all_in_one_call(states):
    triforce.unload()
    first = triforce.generate(TEXT, max_new_tokens=8, temperature=0.0, device="cpu")
    assert triforce.generate(TEXT, max_new_tokens=8, temperature=0.0, device="cpu").tokens == first.tokens
    assert len(states) == 1  # of the engine that is kept
    triforce.generate(TEXT, max_new_tokens=8, temperature=0.0, device="cpu", gamma=3)
    assert [state() is None for state in states] == [True, False]
    triforce.unload()
    assert states[1]() is None


def test_threads_that_share_an_engine_wait_for_each_other():
    """Each gets what it would get alone; a stream that another thread's call has taken over says so."""
    engine = make_engine(*random_pair(), **SIZES)
    prompts, law = [random_prompt(60 + 20 * i, seed=i) for i in range(3)], {"temperature": 0.0, "ignore_eos": True}

    def call(i: int) -> list[int]:
        return engine.generate(prompts[i], 16, **law).tokens

    expected = [call(i) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(call, [0, 1, 2] * 2)) == expected * 2
        stream = engine.stream(prompts[0], 24, **law)
        next(stream)
        assert threads.submit(call, 1).result() == expected[1]
    refused("another generation has begun", list, stream)
