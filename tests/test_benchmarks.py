"""Benchmarks on the embedded pair: widened models, prompts of data sets, and the rows that they promise."""

import json
import sys
from dataclasses import replace

import prompts
import pytest
import torch
from conftest import python, refused
from prompts import SUMMARY, prompts_of, read_books
from reference import dense_logits
from widen import PADDING_LOGIT, SHAPES, save, widen

import triforce
from triforce.cli.request import read_items
from triforce.hf.checkpoint import load_model
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("command,key,expected", [
    ("on_chip --contexts 600 --seeds 1 --max-new-tokens 32 --warm-up 16 --plain-tokens 4 --device cpu", "context",
     {600}),
    ("batch --contexts 400 --batches 2 --ways draft --gammas 2 --rounds 4 --warm-up 8 --device cpu", "way",
     {"autoregression", "draft"}),
    ("questions --context 600 --questions 2 --samples 2 --singles 1 --max-new-tokens 16 --device cpu", "gpus", {1}),
    ("float8 --contexts 600 --max-new-tokens 4 --device cpu", "context", {600, None}),
    ("kinds --config triforce/tiny/target/config.json --contexts 600 700 --dtype float32 --device cpu", "context",
     {600, 700}),
    ("first_tokens --context 600 --texts 1 --new 2 6", "speculate", {True, False}),
    ("first_tokens --context 600 --texts 1 --new 6 --wrong --gpus 2", "wrong", {True}),
    ("real acceptance --checkpoint triforce/tiny/target --text docs/guide.md --contexts 600 --positions 16 "
     "--budgets 200 --device cpu", "what", {"acceptance"}),
    ("real speed --checkpoint triforce/tiny/target --draft triforce/tiny/draft --text docs/guide.md docs/figures.md "
     "--contexts 600 --seeds 2 --max-new-tokens 16 --yarn 2 --temperatures 0.6 0 --device cpu", "text",
     {"guide", "figures"}),
], ids=lambda value: value.split()[0] if isinstance(value, str) else "")
def test_it_writes_its_rows(command, key, expected, tmp_path):
    name, *flags = command.split()
    out = tmp_path / "rows.jsonl"
    done = python(f"benchmarks/{name}.py", *flags, "--out", out)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row.get(key) for row in rows} == expected


@pytest.mark.parametrize("part,shape", [
    ("target", replace(SHAPES["llama-3.1-8b"], vocab_size=5000, dim=384, n_layer=9, n_head=16, n_kv_head=4,
                       ffn_dim=704)),
    ("draft", replace(SHAPES["llama-68m"], vocab_size=5000, dim=256, n_head=4, n_kv_head=4, ffn_dim=1024))])
def test_logits_agree(part, shape):
    small = load_model(TINY / "target" if part == "target" else TINY / "draft", "cpu", torch.float32)
    big = widen(small, shape, dtype=torch.float32)
    tokens = torch.randint(0, 4096, (2, 60), generator=torch.Generator().manual_seed(0))
    expected, found = dense_logits(small, tokens), dense_logits(big, tokens)
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)
    assert (found[..., 4096:] < PADDING_LOGIT).all()
    with pytest.raises(ValueError, match="does not fit"):
        widen(small, replace(shape, dim=32))


@pytest.mark.slow
def test_folders_of_a_widened_pair_are_loaded_and_say_what_the_small_pair_says(tmp_path):
    shape = replace(SHAPES["llama-2-7b"], vocab_size=4500, dim=384, n_layer=9, n_head=8, n_kv_head=8, ffn_dim=800)
    draft = replace(SHAPES["llama-68m"], dim=256, n_head=4, n_kv_head=4, ffn_dim=1024)
    target, drafts = (save(small, to, tmp_path / name, vocab_size=4500, dtype=torch.float16) for small, to, name in
                      ((TINY / "target", shape, "target"), (TINY / "draft", draft, "draft")))
    engine = triforce.load(target, draft=drafts, device="cpu", dtype="float32", gamma=6)
    assert engine.target.config.n_layer == 9 and engine.draft.config.dim == 256
    ids = [engine.encode_prompt("It was the best of times, it was the worst of times. " * 5)]
    expected = triforce.load("tiny", device="cpu").logits(ids)
    torch.testing.assert_close(engine.logits(ids)[..., :4096], expected, rtol=0, atol=0.05)  # what float16 rounds
    assert engine.generate(ids[0], 24, temperature=0.6, seed=0).stats.acceptance_rate["retrieval"] > 0.1
    refused("not empty", save, TINY / "target", shape, target)


BOOK = "A harbour lay behind the hill, and nobody had ever counted its boats. " * 30
STORY = {"document": {"text": "xxxThe miller's cat was called Ottilie."}, "question": {"text": "What was it called?"}}


def test_each_kind(monkeypatch):
    """The beginnings of books; stretches of what comes later; a story once, however many questions there are."""
    monkeypatch.setattr(prompts, "SKIPPED", 40)
    tokenizer = Tokenizer(TINY / "target")
    ids = tokenizer.encode(BOOK)
    assert list(prompts_of("gs", iter([BOOK, "too short"]), tokenizer, 100)) == [ids[:100]]
    stretches = list(prompts_of("magicdec", iter([BOOK]), tokenizer, 100))
    assert len(stretches) > 2 and stretches[1] == [tokenizer.bos_id, *ids[140:239]]
    [asked] = prompts_of("lwm", iter([f"xxx{BOOK}"] * 2), tokenizer, 200)
    text = tokenizer.decode(asked)
    assert len(asked) == 200 and text.startswith(SUMMARY[0] + "A harbour") and text.endswith(SUMMARY[1])


def test_files_of_each_form(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': 'one'})}\n\n{json.dumps(STORY)}\n")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.content").write_text("three")
    assert list(read_books(tmp_path / "a.jsonl")) == ["one", STORY["document"]["text"]]
    assert list(read_books(tmp_path)) == ["two", "three"]


@pytest.mark.parametrize("text", ['{"text": 3}', "3", '{"text"', '{"document": "a"}'])
def test_a_line_without_a_text_is_named(text, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{text}\n')
    refused("a.jsonl, line 2: needs a JSON object with a text", list, read_books(tmp_path / "a.jsonl"))


def test_the_lines_are_prompts_of_the_command(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(BOOK)

    def run(tokens):
        monkeypatch.setattr(sys, "argv", ["prompts.py", "gs", str(tmp_path / "book.txt"), "--tokens", tokens, "--out",
                                          str(tmp_path / "out.jsonl")])
        prompts.main()

    run("50")
    [read] = read_items("--prompts", str(tmp_path / "out.jsonl"), "prompt")
    assert BOOK.startswith(read["prompt"])
    with pytest.raises(SystemExit, match="fewer --tokens"):
        run("10000")
