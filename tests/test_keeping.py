"""A prefill that is kept in a file while it is done: broken off and gone on with, it is the one of one go."""

import json

import pytest
import torch
from conftest import make_engine, random_prompt

import triforce
from triforce import UserError, cli
from triforce.model import Transformer

DOCUMENT = random_prompt(700)  # 688 of them lie in whole flush intervals
SETTINGS = {"flush_interval": 16, "chunk_size": 4, "budget": 64, "prefill_chunk_size": 64, "gamma": 4}


@pytest.fixture
def computed(monkeypatch):
    """(first, tokens) of what goes through the target's prefill."""
    seen, prefill = [], Transformer.prefill

    def noted(self, tokens, blocks, *args, **how):
        seen.append((blocks[0][2].start, tokens.shape[1]))
        return prefill(self, tokens, blocks, *args, **how)

    monkeypatch.setattr(Transformer, "prefill", noted)
    return seen


def tensors(book):
    return [x.clone() for i in range(2) for x in (*book.store.layer(i, 0), book.store.chunk_keys[i])]


@pytest.mark.parametrize("how", [{}, {"offload": True, "num_resident_layers": 1}], ids=["resident", "offloaded"])
def test_it_goes_on_where_it_was_broken_off(pair, tmp_path, computed, how):
    """Keys, values and what views are chosen by: the same bits. What the file had is not computed again."""
    file, engine = tmp_path / "book.prefix", make_engine(*pair, **SETTINGS, **how)
    expected = tensors(engine.prefill(DOCUMENT))
    computed.clear()
    shares = []

    def ended(share):
        shares.append(share)
        if len(computed) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.prefill(DOCUMENT, keep=file, keep_every=150, on_progress=ended)
    assert computed == [(0, 192), (192, 192), (384, 192)] and shares == sorted(shares)
    with pytest.raises(UserError, match="has 384 of the 700 tokens of its document, whose prefill was broken"):
        engine.open(file)  # questions would be answered without the rest
    computed.clear()
    book = make_engine(*pair, **SETTINGS, **how).prefill(DOCUMENT, keep=file, keep_every=150)
    assert computed == [(384, 192), (576, 112)] and book.num_read == 384 and book.tokens == DOCUMENT
    assert all(torch.equal(one, other) for one, other in zip(tensors(book), expected, strict=True))
    computed.clear()
    written = file.stat()
    again = make_engine(*pair, **SETTINGS, **how).prefill(DOCUMENT, keep=file)
    assert computed == [] and again.num_read == 688
    assert file.stat().st_ino == written.st_ino  # what is there is not written once more
    assert all(torch.equal(one, other) for one, other in zip(tensors(again), expected, strict=True))
    question, books = random_prompt(9, seed=1), [engine.prefill(DOCUMENT, keep=file), engine.prefill(DOCUMENT)]
    answers = [engine.generate(question, prefix=one, temperature=0.0, max_new_tokens=12).tokens for one in books]
    assert answers[0] == answers[1]
    computed.clear()
    more = engine.prefill(DOCUMENT + [5], keep=file)  # a token that no flush interval holds: nothing to compute
    assert computed == [] and more.tokens == DOCUMENT + [5] == engine.open(file).tokens
    text = DOCUMENT + [5] + random_prompt(100, seed=4)
    longer = engine.prefill(text, keep=file)  # whole chunks of what the file has are of use, or bits would differ
    assert computed == [(640, 160)] and longer.num_shared == 800 == engine.open(file).num_shared
    kept = tensors(longer)
    assert all(torch.equal(one, other) for one, other in zip(kept, tensors(engine.prefill(text)), strict=True))


def test_another_document_is_not_overwritten(pair, tmp_path):
    file, engine = tmp_path / "book.prefix", make_engine(*pair, **SETTINGS)
    engine.prefill(DOCUMENT, keep=file)
    with pytest.raises(UserError, match="keeps another document: of its 700 tokens, the first 300 are those"):
        engine.prefill(DOCUMENT[:300] + random_prompt(400, seed=5), keep=file)
    with pytest.raises(UserError, match="of its 700 tokens, the first 0 are those"):  # without a whole interval
        engine.prefill(random_prompt(5, seed=5), keep=file)
    with pytest.raises(UserError, match="the first 650 are those"):
        engine.prefill(DOCUMENT[:650], keep=file)
    assert len(engine.open(file)) == 700
    other = make_engine(Transformer.random(pair[0].config, seed=9), **SETTINGS)
    with pytest.raises(UserError, match="made with another model"):
        other.prefill(DOCUMENT, keep=file)
    with pytest.raises(UserError, match="keep_every .0. must be a whole number"):
        engine.prefill(DOCUMENT, keep=file, keep_every=0)
    shares = []
    with pytest.raises(UserError, match="there is no folder"):
        engine.prefill(DOCUMENT, keep=tmp_path / "no" / "book.prefix", on_progress=shares.append)
    assert shares == []  # before the work
    (tmp_path / "empty").touch()
    engine.prefill(DOCUMENT, keep=tmp_path / "empty")
    assert len(engine.open(tmp_path / "empty")) == 700


def test_a_file_of_other_intervals(pair, tmp_path):
    file, wide = tmp_path / "book.prefix", {**SETTINGS, "flush_interval": 64, "budget": 128}
    kept = make_engine(*pair, **SETTINGS).prefill(DOCUMENT, keep=file)
    engine = make_engine(*pair, **wide)
    book = engine.prefill(DOCUMENT, keep=file)
    assert 0 < book.num_read == book.num_shared < kept.num_shared and len(engine.open(file)) == len(DOCUMENT)


def test_the_command_line(tmp_path, capsys):
    file, text = tmp_path / "book.prefix", tmp_path / "book.txt"
    text.write_text("Call me Ishmael. " * 400)
    flags = ["--prompt-file", str(text), "--save-prefix", str(file), "--save-every", "1024", "--device", "cpu"]
    engine = triforce.load("tiny", device="cpu")
    ids = engine.encode_prompt(text.read_text())
    engine.prefill(ids[:1100], keep=file)  # as a run that was broken off leaves it
    assert cli.main(flags) == 0
    assert f"had 1,024 of {len(ids):,} tokens" in capsys.readouterr().err and len(engine.open(file)) == len(ids)
    asked = ["--prefix", str(file), "--question", "Who?", "--max-new-tokens", "4", "--temperature", "0", "--json"]
    assert cli.main([*asked, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.main(["--prompt", "a", "--save-every", "9"]) == 2
    assert "name it with --save-prefix" in capsys.readouterr().err
