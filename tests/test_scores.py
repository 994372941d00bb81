"""Scores of answers, against cases worked out by hand: benchmarks/scores.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from scores import SCORES, normalized  # noqa: E402


def test_normalized():
    assert normalized("The Cat,  an  owl & a dog's theory.") == "cat owl dogs theory"


@pytest.mark.parametrize(("score", "said", "wanted", "points"), [
    ("every_part", "They are 12 and 34.", ["12", "34", "56", "78"], 0.5),
    ("every_part", "ABC", ["abc"], 1.0),
    ("every_part", "", ["abc"], 0.0),
    ("any_part", "In Rome, perhaps", ["Paris", "rome"], 1.0),
    ("any_part", "In Oslo", ["Paris", "rome"], 0.0),
    ("begins", " MepTolKud.\nAnd", ["MepTolKud"], 1.0),
    ("begins", " MepTolKudo.", ["MepTolKud"], 0.0),
    ("begins", "It is MepTolKud", ["MepTolKud"], 0.0),
    ("f1", "The old mill", ["a mill by the sea"], 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),  # 1 of 2 words, and of 3
    ("f1", "sea sea", ["the sea", "sea, sea"], 1.0),
    ("f1", "nothing", ["the sea"], 0.0),
    ("substring", "Answer: the Long-Pier.", ["longpier"], 1.0),
    ("substring", "Answer: the long pier.", ["longpier"], 0.0),
    ("line_substring", " The long pier\n\nQuestion: and Ferris?", ["long pier"], 1.0),
    ("line_substring", " The long pier\n\nQuestion: and Ferris?", ["ferris"], 0.0),
    ("longbench_choice", 'I think **The correct answer is (B)**', ["B"], 1.0),
    ("longbench_choice", "The correct answer is B.", ["B"], 1.0),
    ("longbench_choice", "The correct answer is C, or rather The correct answer is (B)", ["B"], 1.0),
    ("longbench_choice", "B", ["B"], 0.0),
    ("first_number", " it is 40711, not 5", ["40711"], 1.0),
    ("first_number", "5, or 40711", ["40711"], 0.0),
    ("first_number", "none", ["40711"], 0.0),
    ("whole_word", '"77b0-fe"}', ["77b0-fe"], 1.0),
    ("whole_word", "x77b0-fe", ["77b0-fe"], 0.0),
    ("character", "Berta!", ["BERTA"], 1.0),
    ("character", "Bertas", ["BERTA"], 0.0),
    ("number", "It is 91.", [91], 1.0),
    ("number", "It is 9.5 or 91", ["9.5"], 1.0),
    ("number", "90", [91], 0.0),
    ("leading_numbers", "[2, 7, 5]", [2, 7, 4], 2 / 3),
    ("leading_numbers", "[7, 2]", [2, 7, 4], 0.0),
    ("last_number", "it returns 3, that is: -7.", ["-7"], 1.0),
    ("last_number", "7 it is", ["7"], 0.0),
    ("infinitebench_choice", "B. To the well", ["B", "To the well"], 1.0),
    ("infinitebench_choice", "C", ["B", "To the well"], 0.0),
    ("infinitebench_choice", "I say the answer is: To the well", ["B", "To the well"], 1.0),
    ("infinitebench_choice", "perhaps C or B", ["C", "Home"], 1.0),
    ("infinitebench_choice", "", ["C", "Home"], 0.0),
    ("infinitebench_debug", "C. add", ["C", "add"], 1.0),
    ("infinitebench_debug", "The answer is: Option C", ["C", "add"], 1.0),
    ("infinitebench_debug", "the error is: add", ["C", "add"], 1.0),
    ("infinitebench_debug", "C", ["C", "add"], 0.0),
])
def test_score(score, said, wanted, points):
    assert SCORES[score](said, wanted) == pytest.approx(points)
