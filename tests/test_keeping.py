"""A prefill that is kept in a file while it is done: broken off and gone on with, it is the one of one go."""

import os
import shutil
from dataclasses import asdict
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from conftest import SIZES, make_engine, random_prompt, refused, tensors
from test_prefix_file import ODD, rewritten

import triforce
from triforce import UserError
from triforce.engine.prompt_cache_file import Layout, PrefixReader, write
from triforce.model import Transformer

DOCUMENT = random_prompt(700)  # 688 of them lie in whole flush intervals
SETTINGS = {**SIZES, "prefill_chunk_size": 64, "gamma": 4}


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
    assert len(engine.open(file)) == 700
    other = make_engine(Transformer.random(pair[0].config, seed=9), **SETTINGS)
    other._identity, mine = {**other.identity(), "name": "Llama-Large"}, engine.identity()
    names = rf"\({mine['name']}, {mine['model'][:8]}\) than this one \(Llama-Large, {other.identity()['model'][:8]}\); "
    refused(f"made with another model {names}", other.prefill, DOCUMENT, keep=file)
    shares = []
    with pytest.raises(UserError, match="there is no folder"):
        engine.prefill(DOCUMENT, keep=tmp_path / "no" / "book.prefix", on_progress=shares.append)
    assert shares == []  # before the work


def test_a_file_of_other_intervals(pair, tmp_path):
    file, wide = tmp_path / "book.prefix", {**SETTINGS, "flush_interval": 64, "budget": 128}
    kept = make_engine(*pair, **SETTINGS).prefill(DOCUMENT, keep=file)
    engine = make_engine(*pair, **wide)
    book = engine.prefill(DOCUMENT, keep=file)
    assert 0 < book.num_read == book.num_shared < kept.num_shared and len(engine.open(file)) == len(DOCUMENT)


def test_what_a_file_says_is_checked_by_kind_and_range(pair, tmp_path):
    """Also where whoever wrote it has its checksum right."""
    path, engine = tmp_path / "book.prefix", make_engine(*pair, **SETTINGS)
    book = engine.prefill(DOCUMENT[:100])
    book.save(path)
    whole, about = path.read_bytes(), book.about
    with PrefixReader(path) as reader:
        sizes = asdict(reader.layout)
    names = []
    for name, value in [(name, value) for name in (*about, "more") for value in (*ODD, "missing")]:
        path.write_bytes(whole)
        rewritten(path, lambda about, _, name=name, value=value: [
            about.pop(name, 0) if value == "missing" else about.update({name: value})] and None)
        try:
            assert len(engine.open(path)) == 100
        except UserError as error:
            assert "\n" not in str(error) and ";" in str(error)
            names.append(name)
    assert {*about, "more"} - {"name"} <= {*names} and len(names) > 150
    for changed, more, tokens in (({"n_kv_head": sizes["n_kv_head"] * 2}, {}, DOCUMENT[:100]),
                                  ({"num_layers": 1}, {}, DOCUMENT[:100]), ({}, {"part_of": 100}, DOCUMENT[:100]),
                                  ({"head_dim": sizes["head_dim"] // 2}, {}, DOCUMENT[:100]), ({}, {}, [10**6] * 100)):
        layout = Layout(**{**sizes, **changed})
        kv = torch.zeros(2, layout.n_kv_head, layout.length, layout.head_dim)
        write(path, layout, {**about, **more}, tokens, lambda i, kv=kv: kv, range(layout.n_kv_head))
        refused("says what no document has", engine.open, path)


def test_room_is_looked_for_before_the_work(pair, tmp_path, computed, monkeypatch, command):
    """On the disk, and for the name."""
    engine, flags = make_engine(*pair, **SETTINGS), ["--prompt", "word " * 900, "--device", "cpu", "--save-prefix"]
    assert "name too long" in command(*flags, str(tmp_path / ("b" * 250)), status=2).err
    book = engine.prefill(DOCUMENT, keep=tmp_path / "book.prefix")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    assert engine.prefill(DOCUMENT, keep=tmp_path / "book.prefix").num_read == book.num_shared  # nothing to write
    computed.clear()
    refused("GB free", engine.prefill, DOCUMENT, keep=tmp_path / "more.prefix")
    for more in ([], ["--save-every", "256"]):
        assert "GB free" in command(*flags, str(tmp_path / "b"), *more, status=2).err
    assert computed == [] and os.listdir(tmp_path) == ["book.prefix"]


OF_THE_DAY = ("Today is {{ strftime_now('%d %B %Y') }}. "
              "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}<assistant>")


def test_a_template_that_names_the_day_is_told_the_one_of_the_document(tiny_engine, tmp_path, monkeypatch, broken_off):
    """By questions, and by a prefill that goes on the next day."""
    days = SimpleNamespace(now=datetime(2026, 11, 28, 9, 30))
    clock = type("Clock", (datetime,), {"now": lambda *_: days.now})
    for name in ("engine.engine", "engine.conversation", "hf.chat_template"):
        monkeypatch.setattr(f"triforce.{name}.datetime", clock)
    path, messages = tmp_path / "book.prefix", [{"role": "user", "content": "Call me Ishmael. " * 120}]
    engine = make_engine(tiny_engine.target, tokenizer=tiny_engine.tokenizer, prefill_chunk_size=256)
    with broken_off(), pytest.raises(KeyboardInterrupt):
        engine.prefill(messages, chat_template=OF_THE_DAY, keep=path, keep_every=256)
    days.now = datetime(2026, 12, 24)
    book = engine.prefill(messages, chat_template=OF_THE_DAY, keep=path, keep_every=256)
    assert book.num_read > 0 and book.rendered_at == "2026-11-28T09:30:00"
    assert engine.tokenizer.decode(book.tokens).startswith("Today is 28 November 2026. <user>Call me")
    days.now = datetime(2027, 1, 1)
    opened = engine.open(path)
    for one in (book, opened):
        out = engine.generate("Who?", 4, prefix=one)
        assert out.stats.shared_tokens == book.num_shared > 256
    talk = engine.chat(opened, max_new_tokens=4)
    assert talk.send("Who?").stats.shared_tokens == book.num_shared
    talk.save(tmp_path / "talk.prefix")
    assert engine.open(tmp_path / "talk.prefix").rendered_at == book.rendered_at
    new = engine.chat(chat_template=OF_THE_DAY, max_new_tokens=4)
    first = new.send("Who are you? " * 60).stats.prompt_len
    days.now = datetime(2027, 1, 2)
    assert new.send("And?").stats.reused_tokens >= first - 16  # beyond midnight, too


def test_it_is_said_if_nothing_of_a_document_serves(tmp_path, command, caplog):
    """With the reason, before anything is computed, and once."""
    template = "{{ style }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    messages, path = [{"role": "user", "content": "Call me Ishmael. " * 120}], tmp_path / "book.prefix"
    book = triforce.load("tiny", device="cpu").prefill(messages, chat_template=template)
    book.save(path)
    flags = ["--prefix", str(path), "--question", "Who?", "--max-new-tokens", "2", "--device", "cpu"]
    for more, said in (([], 0), (["--chat-template-kwargs", '{"style": "Brief: "}'], 1)):
        command(*flags, *more)
        assert caplog.text.count("are computed anew with each question, since") == said
