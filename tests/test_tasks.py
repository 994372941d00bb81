"""Tasks that are made of a text and a seed, and their answers in every way: benchmarks/ruler.py and tasks.py."""

import random
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from triforce.errors import UserError
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import ruler  # noqa: E402
import tasks  # noqa: E402
from samples import Sample  # noqa: E402

LENGTH = 3000
NEEDLES = [task for task in ruler.FAMILIES if task.startswith("niah")]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


@pytest.fixture(scope="module")
def source():
    """A text of 400 sentences of eight made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(400)]
    lines = [" ".join(rng.choices(words, k=8)).capitalize() + "." for _ in range(400)]
    return ruler.Text("\n".join(lines))


def made(task, source, tokenizer, length=LENGTH, number=0, seed=0, **how) -> Sample:
    return ruler.make(task, source, tokenizer, length=length, number=number, seed=seed, **how)


@pytest.mark.parametrize("task", ruler.FAMILIES)
def test_a_sample_follows_from_its_seed_and_its_number(task, source, tokenizer):
    sample = made(task, source, tokenizer)
    assert sample == made(task, source, tokenizer)
    for other in (made(task, source, tokenizer, seed=1), made(task, source, tokenizer, number=1)):
        assert other.answers != sample.answers


@pytest.mark.parametrize("task", NEEDLES)
def test_needles(task, source, tokenizer):
    sample = made(task, source, tokenizer)
    text, answers = tokenizer.decode(sample.prompt), sample.answers
    at = text.rindex("\nWhat ") if "\nWhat " in text else text.rindex("\n")
    context, question = text[:at], text[at:]
    found = re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", context)
    asked = [key for key in dict(found) if key in question]
    assert len(set(found)) == len(found)
    assert sorted(value for key, value in found if key in asked) == sorted(answers)
    assert all(context.count(value) == 1 and value not in question for value in answers)
    assert all(question.count(key) == 2 for key in asked)
    wanted = {"niah_multiquery": (4, 4, 4), "niah_multivalue": (1, 4, 4), "niah_multikey_1": (1, 1, 4)}
    if task in ("niah_multikey_2", "niah_multikey_3"):  # all lines are needles
        assert len(found) > 20 and len(answers) == 1
    else:
        assert (len(asked), len(answers), len(found)) == wanted.get(task, (1, 1, 1))


def test_facts(source, tokenizer):
    sample = made("recall_40", source, tokenizer)
    text, [value] = tokenizer.decode(sample.prompt), sample.answers
    lines = re.findall(r"Remember: (\w+) (\w+)\.\n", text)
    assert len(lines) == len(set(lines)) == 40
    [key] = [key for key, held in lines if held == value]
    assert text.count(value) == 1 and text.endswith(f"\nRemember: {key}")


def args_of(**how) -> Namespace:
    return Namespace(**{"sampled": 1, "temperature": 0.6, "top_p": 0.9, "warm_up": 1, "read": [], "tasks": ["recall"],
                        "samples": 1, "length": 900, "seed": 0, "new_tokens": None, "text": None, **how})


@pytest.mark.slow
def test_a_tasks_answers_in_every_way(embedded_engine, source):
    """The embedded pair finds a fact again over the full cache, and does not over the first and the newest tokens."""
    sample = made("recall", source, embedded_engine.tokenizer, length=640, number=1, new_tokens=8)
    ways = ["full cache", "triforce", "retrieval", "streaming"]
    rows = list(tasks.Ways(embedded_engine, ways, [256, 1024]).answers(sample, args_of()))
    told = {(row["way"], row["budget"], row["temperature"]): row for row in rows}
    assert len(told) == len(rows) == 2 * (2 + 2 * 2)
    full, hierarchy = told["full cache", None, 0.0], told["triforce", 1024, 0.0]
    assert full["score"] == hierarchy["score"] == 1.0
    assert full["identical"] and hierarchy["identical"]
    assert full["tokens_per_verify"] == 1.0 < hierarchy["tokens_per_verify"]
    for kind in ways[2:]:
        lossy, whole = (told[kind, budget, 0.0] for budget in (256, 1024))  # the larger view holds the whole prompt
        assert whole["identical"] and whole["score"] == 1.0
        assert told[kind, 1024, 0.6]["identical"]
        assert lossy["tokens_per_verify"] is None and lossy["tbt_ms"] > 0
    assert told["streaming", 256, 0.0]["score"] == 0.0 and not told["streaming", 256, 0.0]["identical"]


def test_names_that_are_not_known_are_refused(embedded_engine):
    with pytest.raises(UserError, match="recal is not a known task; did you mean recall"):
        tasks.gather(args_of(tasks=["recal"]), embedded_engine.tokenizer)
    with pytest.raises(UserError, match="pg-19 is not a known kind of file; did you mean pg19"):
        tasks.gather(args_of(read=["pg-19=x.txt"]), embedded_engine.tokenizer)
    with pytest.raises(UserError, match="stream is not a known way"):
        tasks.Ways(embedded_engine, ["stream"], [256])
