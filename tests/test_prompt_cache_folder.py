"""A folder of kept prompts: a prompt finds the file that has its beginning, and answers as if it had been computed."""

import copy
import json
import logging
import os
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import SIZES, make_engine, random_prompt, refused

from triforce import UserError
from triforce.engine.buffers import Buffers
from triforce.engine.prompt_cache_folder import PromptCacheFolder
from triforce.model import Transformer

TEXT = random_prompt(700)
SETTINGS = {**SIZES, "prefill_chunk_size": 64, "gamma": 4}


def files(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("how", [{}, {"offload": True, "num_resident_layers": 1}], ids=["resident", "offloaded"])
def test_a_prompt_finds_its_file(pair, tmp_path, computed, how):
    """In another engine, by a prompt that goes on differently; the text is the one without a folder."""
    folder = tmp_path / "kept"
    question, other = [*TEXT, 5, 6], [*TEXT[:690], 7, 8, 9]
    first = make_engine(*pair, **SETTINGS, **how, cache_dir=folder)
    first.generate(question, 8)
    names = files(folder)
    assert len(names) == 1
    computed.clear()
    engine = make_engine(*pair, **SETTINGS, **how, cache_dir=folder)
    result = engine.generate(other, 8, temperature=0.0)
    assert [start for start, _ in computed] == [672] and result.stats.reused_tokens == 672
    assert result.tokens == make_engine(*pair, **SETTINGS, **how).generate(other, 8, temperature=0.0).tokens
    assert files(folder) == names  # what was read is not written again
    engine.generate([*other, *result.tokens, 3], 8)  # goes on in place
    assert files(folder) == names
    computed.clear()
    document = make_engine(*pair, **SETTINGS, **how, cache_dir=folder).prefill(TEXT)
    assert computed == [] and document.num_read == 688


def test_prompts_side_by_side(pair, tmp_path, computed):
    prompts = [[*TEXT, 5, 6], [*TEXT, 7]]
    make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(prompts, 4)
    computed.clear()
    results = make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(prompts, 4, temperature=0.0)
    assert {start for start, _ in computed} == {688} and len(files(tmp_path)) == 1
    expected = make_engine(*pair, **SETTINGS).generate(prompts, 4, temperature=0.0)
    assert [one.tokens for one in results] == [one.tokens for one in expected]


def test_what_is_not_used(pair, tmp_path, computed):
    """Numbers of another model, of another dtype, and of a model that differs in what no weight shows; and a file with
    less than half of the prompt."""
    make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(TEXT[:600], 4)
    without = copy.deepcopy(pair[0])
    without.config = without.rope.config = replace(without.config, nope_layers=(1,))
    for target in (Transformer.random(pair[0].config, seed=9), copy.deepcopy(pair[0]).to(torch.bfloat16), without):
        computed.clear()
        make_engine(target, None, **SETTINGS, cache_dir=tmp_path).generate(TEXT[:600], 4)
        assert computed[0][0] == 0
    computed.clear()
    make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(random_prompt(1300)[:20] + TEXT, 4)
    assert computed[0][0] == 0 and len(files(tmp_path)) == 5


@pytest.mark.parametrize("where", ["numbers", "header", "beginning"])
def test_a_damaged_file_is_replaced(pair, tmp_path, computed, caplog, where):
    """The prompt is computed, is said to be, and is written anew."""
    engine = make_engine(*pair, **SETTINGS, cache_dir=tmp_path)
    engine.generate(TEXT[:600], 4)
    [name] = files(tmp_path)
    with open(tmp_path / name, "r+b") as file:
        file.seek({"numbers": -40_000, "header": 300, "beginning": 0}[where], 2 if where == "numbers" else 0)
        file.write(b"\x01\x02\x03" * 40)
    computed.clear()
    with caplog.at_level(logging.WARNING, "triforce"):
        result = make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(TEXT[:600], 4, temperature=0.0)
    assert computed[0][0] == 0 == result.stats.reused_tokens
    assert ("is not used, and is removed" in caplog.text) == (where == "numbers")  # which are read last
    assert result.tokens == make_engine(*pair, **SETTINGS).generate(TEXT[:600], 4, temperature=0.0).tokens
    for again in (make_engine(*pair, **SETTINGS, cache_dir=tmp_path), engine):  # one had read its header before
        again.release()
        computed.clear()
        again.generate(TEXT[:600], 4)
        assert [start for start, _ in computed] == [576]


def test_a_file_that_goes_away(pair, tmp_path, computed, monkeypatch):
    """Another process may remove it at any time; links and files of others may not be read."""
    make_engine(*pair, **SETTINGS, cache_dir=tmp_path).generate(TEXT[:600], 4)
    os.symlink(tmp_path / "nowhere", tmp_path / f"{16 * '0'}-{32 * '0'}.safetensors")
    engine, find = make_engine(*pair, **SETTINGS, cache_dir=tmp_path), PromptCacheFolder._find

    def found(self, *args):
        length, path = find(self, *args)
        if path is not None:
            path.unlink()
        return length, path

    monkeypatch.setattr(PromptCacheFolder, "_find", found)
    computed.clear()
    result = engine.generate(TEXT[:600], 4)
    assert computed[0][0] == 0 == result.stats.reused_tokens and len(result.tokens) == 4


def test_each_group_and_no_error_of_others(pair, tmp_path, computed, caplog):
    engine = make_engine(*pair, **SETTINGS, cache_dir=tmp_path / "kept")
    texts = [random_prompt(600, seed=seed) for seed in range(3)]
    engine.generate(texts, 2)  # one after the other
    assert len(files(tmp_path / "kept")) == 3
    (tmp_path / "own").mkdir()

    def lose(share):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)

    engine.release()
    computed.clear()
    with pytest.raises(UserError, match="cannot write|no folder"):
        engine.prefill(texts[0] + texts[1][:400], keep=tmp_path / "own/book.prefix", keep_every=64, on_progress=lose)
    assert [start for start, _ in computed] == [576] and "is not used" not in caplog.text


def test_the_newest_stay(pair, tmp_path, caplog):
    texts = [random_prompt(600, seed=seed) for seed in range(3)]
    engine = make_engine(*pair, **SETTINGS, cache_dir=tmp_path)
    sizes, names = [], []
    for i, text in enumerate(texts[:2]):
        engine.generate(text, 2)
        [name] = set(files(tmp_path)) - set(names)
        names.append(name)
        sizes.append(os.path.getsize(tmp_path / name))
        os.utime(tmp_path / name, (i, i))
    small = {"cache_dir": tmp_path, "cache_dir_size": 2 * sizes[0] + 100}
    make_engine(*pair, **SETTINGS, **small).generate(texts[0], 2)  # reading makes it new
    (tmp_path / "mine.txt").write_text("stays")
    make_engine(*pair, **SETTINGS, **small).generate(texts[2], 2)
    left = files(tmp_path)
    assert names[0] in left and names[1] not in left and len(left) == 3 and "mine.txt" in left
    with caplog.at_level(logging.WARNING, "triforce"):
        make_engine(*pair, **SETTINGS, cache_dir=tmp_path, cache_dir_size=1000).generate(texts[1], 2)
    assert "is not kept" in caplog.text and files(tmp_path) == left


def test_room_is_made_before_a_file_is_written(pair, tmp_path, monkeypatch):
    """On a disk that is nearly full the oldest goes, and what a dead writer has left."""
    engine = make_engine(*pair, **SETTINGS, cache_dir=tmp_path)
    engine.generate(random_prompt(600, seed=1), 2)
    [old] = files(tmp_path)
    (tmp_path / f".{16 * '1'}-{32 * '2'}.safetensors.0123abcd.tmp").write_bytes(b"left")
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(path):
        return usage._replace(free=0 if old in files(tmp_path) else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    engine.generate(random_prompt(600, seed=2), 2)
    [name] = files(tmp_path)
    assert name != old and name.endswith(".safetensors")


def test_mistakes_and_the_command_line(pair, tmp_path, command, watched):
    (tmp_path / "file").write_text("no folder")
    refused("cannot keep prompts in .*give another cache_dir", make_engine, *pair, cache_dir=tmp_path / "file")
    refused("cache_dir_size", make_engine, *pair, cache_dir=tmp_path, cache_dir_size="much")
    book = tmp_path / "book.txt"
    book.write_text("The sea was calm, and the men said nothing of what they had seen. " * 120)
    ask = ["--prompt-file", str(book), "--question", "Who?", "--cache-dir", str(tmp_path / "kept"), "--device",
           "cpu", "--max-new-tokens", "4", "--temperature", "0", "--json"]
    first = json.loads(command(*ask).out)["text"]
    assert len(files(tmp_path / "kept")) == 1
    read = watched(Buffers, "_compute", lambda *args: args)  # nothing of the document is computed
    assert json.loads(command(*ask).out)["text"] == first and read == []


def test_files_that_are_gone_are_forgotten(pair, tmp_path):
    engine = make_engine(*pair, **SETTINGS, cache_dir=tmp_path)
    engine.generate([*TEXT, 5, 6], 4)
    kept = engine.buffers.kept
    assert kept.find(TEXT)[0] == 688 and len(kept._tokens) == 1
    for path in tmp_path.iterdir():
        path.unlink()
    assert kept.find(TEXT) == (0, None) and not kept._tokens
