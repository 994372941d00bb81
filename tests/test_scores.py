"""Scores of answers, against cases worked out by hand: benchmarks/scores.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from scores import SCORES, normalized  # noqa: E402


def test_normalized():
    assert normalized("The Cat,  an  owl & a dog's theory.") == "cat owl dogs theory"


@pytest.mark.parametrize(("score", "wanted", "said"), [
    ("every_part", ["12", "34", "56", "78"], {"They are 12 and 34.": 0.5, "": 0.0}),
    ("any_part", ["Paris", "rome"], {"In Rome, perhaps": 1.0, "In Oslo": 0.0}),
    ("begins", ["MepTolKud"], {" MepTolKud.\nAnd": 1.0, " MepTolKudo.": 0.0, "It is MepTolKud": 0.0}),
    ("f1", ["a mill by the sea"], {"The old mill": 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)}),  # 1 of 2 words, and of 3
    ("f1", ["the sea", "sea, sea"], {"sea sea": 1.0, "nothing": 0.0}),
    ("substring", ["longpier"], {"Answer: the Long-Pier.": 1.0, "Answer: the long pier.": 0.0}),
    ("line_substring", ["long pier"], {" The long pier\n\nQuestion: and Ferris?": 1.0, "The\n\nlong pier": 0.0}),
    ("longbench_choice", ["B"], {"I think **The correct answer is (B)**": 1.0, "The correct answer is B.": 1.0,
                                 "The correct answer is C, or rather The correct answer is (B)": 1.0, "B": 0.0}),
    ("first_number", ["40711"], {" it is 40711, not 5": 1.0, "5, or 40711": 0.0, "none": 0.0}),
    ("whole_word", ["77b0-fe"], {'"77b0-fe"}': 1.0, "x77b0-fe": 0.0}),
    ("character", ["BERTA"], {"Berta!": 1.0, "Bertas": 0.0}),
    ("number", ["9.5"], {"It is 9.5 or 91": 1.0, "90": 0.0}), ("number", [91], {"It is 91.": 1.0}),
    ("leading_numbers", [2, 7, 4], {"[2, 7, 5]": 2 / 3, "[7, 2]": 0.0}),
    ("last_number", ["-7"], {"it returns 3, that is: -7.": 1.0, "7 it is": 0.0}),
    ("infinitebench_choice", ["B", "To the well"], {"B. To the well": 1.0, "I say the answer is: To the well": 1.0,
                                                    "C": 0.0, "": 0.0}),
    ("infinitebench_debug", ["C", "add"], {"C. add": 1.0, "The answer is: Option C": 1.0, "the error is: add": 1.0,
                                           "C": 0.0})])
def test_score(score, wanted, said):
    for text, points in said.items():
        assert SCORES[score](text, wanted) == pytest.approx(points), text
