"""The reference repositories' prompts, from files of their data sets: benchmarks/prompts.py."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import prompts  # noqa: E402
from prompts import SUMMARY, prompts_of, read_books  # noqa: E402

from triforce.cli.request import read_items  # noqa: E402
from triforce.errors import UserError  # noqa: E402
from triforce.hf.folders import TINY  # noqa: E402
from triforce.hf.tokenizer import Tokenizer  # noqa: E402

BOOK = "A harbour lay behind the hill, and nobody had ever counted its boats. " * 30
STORY = {"document": {"text": "xxxThe miller's cat was called Ottilie."}, "question": {"text": "What was it called?"}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


def test_each_kind(tokenizer, monkeypatch):
    """The beginnings of books; stretches of what comes later; a story once, however many questions there are."""
    monkeypatch.setattr(prompts, "SKIPPED", 40)
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
    with pytest.raises(UserError, match="a.jsonl, line 2: needs a JSON object with a text"):
        list(read_books(tmp_path / "a.jsonl"))


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
