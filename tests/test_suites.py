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


def test_narrativeqa(read):
    (first, one), (_, two), (third, three) = read("narrativeqa", "narrativeqa.jsonl")
    assert first.endswith("stood still on Sundays.\n\nQuestion: What was the cat called?\nAnswer:")
    assert one.answers == ["Ottilie", "The miller's cat was called Ottilie"] and one.scored("Ottilie") == 1.0
    assert two.answers == ["On Sundays"] and two.number == 2
    assert "Edda left the lamp" in third and three.scored("it was Edda") == 0.5


def test_triforces_summaries(read):
    """A book once, without its first three characters, and nothing to score."""
    (text, sample), (other, _) = read("narrativeqa-lwm", "narrativeqa.jsonl")
    assert text.startswith("You are a helpful assistant. USER: Please read a part of the book below")
    assert "[start of the book]\nThe miller's cat" in text
    assert text.endswith("tell the story in 500 words.\n\nASSISTANT: ")
    assert "a left the lamp" in other
    assert sample.new_tokens == 256 and sample.scored("anything") is None


def test_longbench_v2(read):
    (text, one), (_, two) = read("longbench-v2", "longbench_v2.json")
    assert "<text>\nThe ferry carried bells, and rang all night.\n</text>\n\n" in text
    assert "Choices:\n(A) Coal\n(B) Salt\n(C) Bells\n(D) Nothing\n\nFormat your response" in text
    assert one.scored("The correct answer is (C)") == 1.0 and one.scored("The correct answer is (A)") == 0.0
    assert (one.number, two.number) == (2, 16)  # lines of the file
    assert two.answers == ["A"]


@pytest.mark.parametrize(("task", "ends", "right", "wrong"), [
    ("passkey", "What is the pass key?\n\nThe pass key is", " 40711.", " 4071."),
    ("number_string", "\n\nThe sequence of digits is", "2233441100", "223344110"),
    ("kv_retrieval", "The value associated with the specified key is: ", '"77b0-fe"', '"90d2-ee"'),
    ("longbook_qa_eng", "Question: What was in the bucket?\nAnswer:", "Ash", "Water"),
    ("longbook_choice_eng", "B. To the well\nC. To the sea\nD. Home\n\nThe letter of the correct answer is", "B", "A"),
    ("longdialogue_qa_eng", "replaced with $$MASK$$ is likely", " Berta", " Ivo"),
    ("math_find", "]\n\nThe largest number of the list is:", " 91", " 17"),
    ("math_calc", "Expression: 2 + 5 - 3\nValues:", "[2, 7, 4]", "[7, 2, 4]"),
    ("code_run", "compute the exact value of func_1(3). The value of func_1(3) is", " 7", " 8"),
    ("code_debug", "C. add\nD. div\n\nThe correct option is:", "C. add", "A. sub"),
])
def test_infinitebench(task, ends, right, wrong, read):
    [(text, sample)] = read("infinitebench", f"infinitebench/{task}.jsonl", new_tokens=10)
    assert text.endswith(ends)
    assert sample.task == f"infinitebench/{task}"
    assert sample.scored(right) == 1.0 and sample.scored(wrong) == 0.0


def test_helmets_recall(read):
    [(text, sample)] = read("helmet-json-kv", "helmet/json_kv.jsonl")
    assert text.endswith("Key: k-1\nCorresponding value: v-1\n\nKey: k-3\nCorresponding value: v-3\n\nKey: k-2\n"
                         "Corresponding value:")
    assert sample.scored(" v-2") == 1.0 and sample.scored(" v-1") == 0.0
    (more, four), (single, one) = read("helmet-ruler", "helmet/niah_mv.jsonl")
    assert more.startswith("Some special magic numbers are hidden") and more.endswith("in the provided text are")
    assert four.scored("4455667 and 7") == 0.5
    assert single.startswith("A special magic uuid is hidden") and one.answers == ["3b-44"]
    assert (four.new_tokens, one.new_tokens) == (50, 100)  # a uuid is longer


def test_helmets_questions(read):
    [(text, sample)] = read("helmet-qa", "helmet/nq.jsonl")
    assert "Document (Title: Pier): The long pier was built by Joan Ferris.\n\nDocument (Title: Harbour): The" in text
    assert text.endswith("\n\nQuestion: Who built the long pier?\nAnswer:") and sample.scored("A Ms. Ferris") == 1.0


def test_rulers_own_files(read):
    [(text, needle)] = read("ruler", "ruler/niah_single_1/validation.jsonl")
    [(other, question)] = read("ruler", "ruler/qa_1/validation.jsonl")
    assert text.endswith("The number is") and (needle.task, needle.new_tokens) == ("ruler/niah_single_1", 128)
    assert other.endswith("What was red? Answer:") and (question.task, question.new_tokens) == ("ruler/qa_1", 32)
    assert question.scored("THE SKY") == 1.0  # one of the answers is enough


def test_pg19(read, tokenizer, monkeypatch):
    """TriForce's prompts are the beginnings of books; those of MagicDec stretches of what comes later."""
    book = tokenizer.encode("A harbour lay behind the hill, and nobody had ever counted its boats. " * 30)
    [(_, sample)] = read("pg19", "pg19/books.jsonl", length=356)
    assert sample.prompt == book[:100] and sample.new_tokens == 256 and sample.scored("so") is None
    monkeypatch.setattr(suites, "SKIPPED", 40)
    samples = [sample.prompt for _, sample in read("pg19-magicdec", "pg19/books.jsonl", length=356)]
    assert len(samples) == (len(book) - 40) // 100
    assert samples[1] == [tokenizer.bos_id, *book[141:240]]
    assert len(read("pg19-magicdec", "pg19/books.jsonl", length=356, count=2)) == 2


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
