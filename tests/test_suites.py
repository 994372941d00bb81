"""Tasks from the files of suites, small ones of our own in tests/data: benchmarks/suites.py and records.py."""

import sys
from pathlib import Path

import pytest

from triforce.errors import UserError
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import suites  # noqa: E402

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


@pytest.fixture
def read(tokenizer):
    def reading(kind, path, length=2000, count=9, **how):
        samples = suites.read(kind, DATA / path, tokenizer, length=length, count=count, **how)
        assert all(sample.prompt[0] == tokenizer.bos_id for sample in samples)
        return [(tokenizer.decode(sample.prompt), sample) for sample in samples]

    return reading


@pytest.mark.parametrize(("kind", "path", "number", "begins", "ends", "right", "wrong"), [
    ("narrativeqa", "narrativeqa.jsonl", 0, "", "on Sundays.\n\nQuestion: What was the cat called?\nAnswer:",
     "Ottilie", "Edda"),
    ("narrativeqa", "narrativeqa", 0, "", "Question: Who, in the end, kept the key?\nAnswer:", "The clerk", "Nobody"),
    ("narrativeqa-lwm", "narrativeqa.jsonl", 0, "You are a helpful assistant. USER: Please read a part",
     "tell the story in 500 words.\n\nASSISTANT: ", None, None),
    ("longbench-v2", "longbench_v2.json", 0, "", None, "The correct answer is (C)", "The correct answer is (A)"),
    ("infinitebench", "infinitebench/passkey.jsonl", 0, "", "What is the pass key?\n\nThe pass key is", " 40711.",
     " 4071."),
    ("infinitebench", "infinitebench/number_string.jsonl", 0, "", "\n\nThe sequence of digits is", "2233441100",
     "223344110"),
    ("infinitebench", "infinitebench/kv_retrieval.jsonl", 0, "", "associated with the specified key is: ", '"77b0-fe"',
     '"90d2-ee"'),
    ("infinitebench", "infinitebench/longbook_qa_eng.jsonl", 0, "", "Question: What was in the bucket?\nAnswer:", "Ash",
     "Water"),
    ("infinitebench", "infinitebench/longbook_choice_eng.jsonl", 0, "",
     "B. To the well\nC. To the sea\nD. Home\n\nThe letter of the correct answer is", "B", "A"),
    ("infinitebench", "infinitebench/longdialogue_qa_eng.jsonl", 0, "", "replaced with $$MASK$$ is likely", " Berta",
     " Ivo"),
    ("infinitebench", "infinitebench/math_find.jsonl", 0, "What is the largest number in the following list?\n\n[3",
     "]\n\nThe largest number of the list is:", " 91", " 17"),
    ("infinitebench", "infinitebench/math_calc.jsonl", 0, "", "Expression: 2 + 5 - 3\nValues:", "[2, 7, 4]",
     "[7, 2, 4]"),
    ("infinitebench", "infinitebench/code_run.jsonl", 0, "There is a function called func_1 in the",
     "compute the exact value of func_1(3). The value of func_1(3) is", " 7", " 8"),
    ("infinitebench", "infinitebench/code_debug.jsonl", 0, "", "C. add\nD. div\n\nThe correct option is:", "C. add",
     "A. sub"),
    ("helmet-json-kv", "helmet/json_kv.jsonl", 0, "",
     "Key: k-3\nCorresponding value: v-3\n\nKey: k-2\nCorresponding value:", " v-2", " v-1"),
    ("helmet-ruler", "helmet/niah_mv.jsonl", 1, "A special magic uuid is hidden", None, "3b-44", "3b"),
    ("helmet-qa", "helmet/nq.jsonl", 0, "", "Question: Who built the long pier?\nAnswer:", "A Ms. Ferris", "Nobody"),
    ("ruler", "ruler/niah_single_1/validation.jsonl", 0, "", "The number is", None, "none"),
    ("ruler", "ruler/qa_1/validation.jsonl", 0, "", "What was red? Answer:", "THE SKY", "none")])
def test_a_sample_of_each_kind(kind, path, number, begins, ends, right, wrong, read):
    text, sample = read(kind, path, new_tokens=10)[number]
    assert text.startswith(begins) and text.endswith(ends or "")
    assert right is None or sample.scored(right) == 1.0
    assert sample.scored(wrong) == 0.0 if wrong is not None else sample.scored("anything") is None


def test_pg19(read, tokenizer, monkeypatch):
    """TriForce's prompts are the beginnings of books; those of MagicDec stretches of what comes later."""
    book = tokenizer.encode("A harbour lay behind the hill, and nobody had ever counted its boats. " * 30)
    [(_, sample)] = read("pg19", "pg19/books.jsonl", length=356)
    assert sample.prompt == book[:100] and sample.new_tokens == 256 and sample.scored("so") is None
    monkeypatch.setattr(suites, "SKIPPED", 40)
    samples = [sample.prompt for _, sample in read("pg19-magicdec", "pg19/books.jsonl", length=356, count=2)]
    assert len(samples) == 2 and samples[1] == [tokenizer.bos_id, *book[141:240]]


def test_a_document_is_cut_in_its_middle_and_nothing_else_is(read, tmp_path):
    text = (DATA / "longbench_v2.json").read_text()
    (tmp_path / "a.json").write_text(text.replace("bells, and rang", "bells " + "and ropes " * 500 + "and rang"))
    [(text, sample), *_] = read("longbench-v2", tmp_path / "a.json", length=400)
    assert 300 - 128 < len(sample.prompt) <= 400 - 128 and sample.dropped > 500
    assert "<text>\nThe ferry carried bells" in text and "rang all night.\n</text>\n\nWhat is the correct" in text


@pytest.mark.parametrize(("kind", "text", "line", "expected"), [
    ("narrativeqa", '{"context": "a", "question": "b", "answers": ["c"]}\n\n{"context": "a"', 3,
     "a JSON object on a line of its own"),
    ("narrativeqa", '{"context": "a", "question": "b", "answers": ["c"]}\n{"question": "b"}', 2,
     "a text in the field context or document.text; found the fields question"),
    ("narrativeqa", "3", 1, "a JSON object; found int"),
    ("longbench-v2", '[\n\n {"answer": "E"}]', 3, "A, B, C or D in the field answer"),
    ("longbench-v2", '[\n {"answer": "A"', 2, "an object of the list that begins on line 1"),
    ("infinitebench", '{"input": "a", "context": "b", "answer": ["c"], "options": ["d", "e", "f", "g"]}', 1,
     "four options, the answer among them"),
    ("helmet-json-kv", '{"context": "a", "question": "b", "answer": "c", "demos": ["d"]}', 1, r"pairs \[key, value\]"),
    ("helmet-qa", '{"question": "a", "answers": ["b"], "ctxs": [{"text": "c"}]}', 1, "with title and text in"),
    ("ruler", '{"input": "a", "outputs": [true]}', 1, "a text or a list of texts in the field outputs")])
def test_what_does_not_fit_is_refused_with_its_line(kind, text, line, expected, tokenizer, tmp_path):
    name = "longbook_choice_eng" if kind == "infinitebench" else "file"
    path = tmp_path / (f"{name}.json" if text.startswith("[") else f"{name}.jsonl")
    path.write_text(text)
    with pytest.raises(UserError, match=rf"{path}, line {line}: expected .*{expected}"):
        suites.read(kind, path, tokenizer, length=2000, count=9)


def test_files_that_cannot_be_read(tokenizer, tmp_path):
    def refused(kind, path, said, length=2000):
        with pytest.raises(UserError, match=said):
            suites.read(kind, path, tokenizer, length=length, count=9)

    refused("narrativeqa", tmp_path / "none.jsonl", "No such file")
    refused("pg19", tmp_path, "has no text files")
    refused("infinitebench", tmp_path / "passkeys.jsonl", "named after its task, one of passkey, number_string")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    refused("ruler", tmp_path / "bytes.jsonl", "no text in UTF-8")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused("ruler", tmp_path / "empty.jsonl", "holds nothing to ask")
    refused("pg19", DATA / "pg19/books.jsonl", "a book of 9,000 tokens, or a smaller --length", length=9000)
    refused("longbench-v2", DATA / "longbench_v2.json", "line 2: .* without its document has .* room for 22", 150)
