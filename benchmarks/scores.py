"""How the suites score an answer: pure functions of what a model said and of what it should have said, 0 to 1.

Each follows its suite's rules, so that scores can be set beside published ones. The first line of a function says which
suite's it is.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
LETTERS = "ABCD"


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous space: how questions are answered is not scored."""
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", plain).split())


def every_part(said: str, wanted: Sequence[str]) -> float:
    """RULER, all families but questions: the share of the answers that occur in what was said."""
    return sum(answer.lower() in said.lower() for answer in wanted) / len(wanted)


def any_part(said: str, wanted: Sequence[str]) -> float:
    """RULER, questions: whether one of the answers occurs."""
    return float(any(answer.lower() in said.lower() for answer in wanted))


def begins(said: str, wanted: Sequence[str]) -> float:
    """The embedded pair's own task: whether what was said begins with one of the answers, as whole words."""
    return float(any(re.match(rf"{re.escape(answer)}(?!\w)", said.strip()) for answer in wanted))


def f1(said: str, wanted: Sequence[str]) -> float:
    """NarrativeQA and InfiniteBench's questions: words in common, the best over the answers."""
    return max(_f1(normalized(said).split(), normalized(answer).split()) for answer in wanted)


def _f1(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def substring(said: str, wanted: Sequence[str]) -> float:
    """HELMET, recall: whether one of the answers occurs, both normalized."""
    return float(any(normalized(answer) in normalized(said) for answer in wanted))


def line_substring(said: str, wanted: Sequence[str]) -> float:
    """HELMET, questions: the same of the first line, at whose end an answer stops there."""
    return substring(said.split("\n")[0], wanted)


def longbench_choice(said: str, wanted: Sequence[str]) -> float:
    """LongBench v2: the letter of "The correct answer is (A)", brackets or not. wanted: [letter]."""
    plain = said.replace("*", "")
    found = (re.search(r"The correct answer is \(([A-D])\)", plain)
             or re.search(r"The correct answer is ([A-D])", plain))
    return float(found is not None and found[1] == wanted[0])


def first_number(said: str, wanted: Sequence[str]) -> float:
    """InfiniteBench, passkey and number_string: whether the first run of digits is the answer."""
    found = re.search(r"[0-9]+", said)
    return float(found is not None and found[0] in wanted)


def whole_word(said: str, wanted: Sequence[str]) -> float:
    """InfiniteBench, kv_retrieval: whether the answer is one of the words."""
    words = _words(said, "\n:\"'.,?!{}")
    return float(any(answer in words for answer in wanted))


def character(said: str, wanted: Sequence[str]) -> float:
    """InfiniteBench, longdialogue_qa_eng: whether the first answer, a name in capitals, is one of the words."""
    return float(wanted[0] in [word.upper() for word in _words(said, "\n:\"'.,?!{}")])


def number(said: str, wanted: Sequence) -> float:
    """InfiniteBench, math_find: whether the first number is the answer."""
    found = re.search(r"\d+\.\d+|\d+", said)
    return float(found is not None and float(found[0]) == float(wanted[0]))


def leading_numbers(said: str, wanted: Sequence[int]) -> float:
    """InfiniteBench, math_calc: the share of the values that are right before the first wrong one."""
    right = 0
    for mine, value in zip(re.findall(r"[0-9]+", said), wanted, strict=False):
        if int(mine) != value:
            break
        right += 1
    return right / len(wanted)


def last_number(said: str, wanted: Sequence) -> float:
    """InfiniteBench, code_run: whether the last word is the answer."""
    words = _words(said.strip(), "\n.`'\":")
    return float(bool(words) and re.fullmatch(r"[+-]?\d+", words[-1]) is not None and int(words[-1]) == int(wanted[0]))


def infinitebench_choice(said: str, wanted: Sequence[str]) -> float:
    """InfiniteBench, longbook_choice_eng: the first character, what stands after "answer is", or the first lone letter.

    wanted: [the letter, and the option's text]; the text counts only after "answer is".
    """
    if said[:1] in tuple(LETTERS):
        return float(said[0] == wanted[0])
    plain = " ".join(_words(said, "\n\".'\",?!{}"))
    for mark in ("answer is:", "answer:", "answer is", "option is"):
        if mark in plain:
            return float(plain.split(mark, 1)[1].lstrip().startswith(tuple(wanted)))
    alone = next((word for word in plain.split() if word in tuple(LETTERS)), None)
    return float(alone == wanted[0])


def infinitebench_debug(said: str, wanted: Sequence[str]) -> float:
    """InfiniteBench, code_debug: "B." or "B:" at the start, or the letter or the function's name after "answer is:".

    wanted: [the letter, the function's name].
    """
    if said[:2] in (f"{wanted[0]}.", f"{wanted[0]}:"):
        return 1.0
    plain = " ".join(_words(said.strip().replace("Option", " ").replace("option", " "), "\n`'\"-*"))
    for mark in ("answer is:", "is:", "answer:"):
        if mark in plain:
            return float(plain.split(mark, 1)[1].lstrip().startswith(tuple(wanted)))
    return 0.0


def _words(text: str, separators: str) -> list[str]:
    return text.translate(str.maketrans(dict.fromkeys(separators, " "))).split()


SCORES: dict[str, Callable[[str, Sequence], float]] = {
    function.__name__: function
    for function in (every_part, any_part, begins, f1, substring, line_substring, longbench_choice, first_number,
                     whole_word, character, number, leading_numbers, last_number, infinitebench_choice,
                     infinitebench_debug)}
