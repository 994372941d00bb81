"""Tasks made of any text and a seed, offline: RULER's families (arXiv 2404.06654), a pass key, the embedded pair's own.

    niah_single_1 to 3     a needle in noise, in the text (a number), in the text (a uuid)
    niah_multikey_1 to 3   one needle of four; one of as many as fit; the same with uuids as keys and values
    niah_multivalue        four values of one key
    niah_multiquery        four keys are asked for
    vt                     which variables have a value, through assignments
    cwe, fwe               the most common words of a list; the most frequent coded words
    qa                     a question about one document of many that are alike
    passkey                InfiniteBench's: a number in noise, asked for in the words that it stands in
    recall, recall_40      what the embedded pair was trained on: one of 9 facts, or of 40, as lines of a book

Wording, sizes and scores are RULER's. Two things differ. Keys and common words are words of the given text; RULER has a
list of English words. Questions are about made-up people, in documents cut from the text; RULER has SQuAD and HotpotQA,
and its files can be read (see suites.py). A sample is the same whenever text, tokenizer, length, number and seed are.
"""

import math
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import tiny_data
from samples import Sample, fill

from triforce.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ASKED_FOR_ONE = ("A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you "
                 "about the {one} afterwards.\n{context}\nWhat is the special magic {one} for {query} mentioned in the "
                 "provided text? The special magic {one} for {query} mentioned in the provided text is")
ASKED_FOR_MORE = ("Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will "
                  "quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} "
                  "mentioned in the provided text? The special magic {kind} for {query} mentioned in the provided text "
                  "are")
VARIABLES = ("Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
             "Question: Find all variables that are assigned the value {query} in the text above. Answer: According to "
             "the chain(s) of variable assignment in the text above, {count} variables are assigned the value {query}, "
             "they are: ")
COMMON = ("Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
          "that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: "
          "The top 10 words that appear most often in the list are:")
FREQUENT = ("Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text? Answer: According to the coded "
            "text above, the three most frequently appeared words are:")
PASSKEY = ("There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz "
           "you about the important information there.\n\n{context}\n\nWhat is the pass key?\n\nThe pass key is")
ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
DOCUMENTS = f"{ORDER}\n\nThe following are given documents.\n\n{{context}}\n\n{ORDER}\n\nQuestion: {{query}} Answer:"


class Text:
    """What tasks are made of: a text's sentences and its words.

    Raises:
        UserError: it has too few of either.
    """

    def __init__(self, text: str):
        self.text = text
        self.sentences = [one for one in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if one]
        self.words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text)))
        if len(self.sentences) < 20 or len(self.words) < 100:
            raise UserError(f"the text has {len(self.sentences)} sentences and {len(self.words)} different words of 4 "
                            "to 9 small letters; give one with at least 20 and 100, a book say")

    def stretch(self, start: int, count: int) -> list[str]:
        """`count` sentences from one on; after the last comes the first again."""
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(count)]


@dataclass(frozen=True)
class Making:
    """What one sample is made with."""

    source: Text
    tokenizer: object
    room: int  # tokens of the prompt
    rng: random.Random

    def fill(self, write: Callable[[int], str], what: str) -> list[int]:
        return fill(write, self.tokenizer.encode, self.room, what)

    def fresh(self, make: Callable[[], str], count: int, known: set[str], text: str = "") -> list[str]:
        """`count` things that stand nowhere in the text and are all different; `known` takes them in."""
        made = []
        while len(made) < count:
            one = make()
            if one not in known and one not in text:
                known.add(one)
                made.append(one)
        return made

    def word(self) -> str:
        return "-".join(self.rng.sample(self.source.words, 2))

    def number(self) -> str:
        return str(self.rng.randrange(10**6, 10**7))

    def uuid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def name(self) -> str:
        """A made-up one. All are of one length, so none is a part of another."""
        syllables = [self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiou") for _ in range(3)]
        return ("".join(syllables) + self.rng.choice("lnrst")).capitalize()


def spread(among: list[str], what: list[str], places: list[float]) -> list[str]:
    """`among` with one more at each place, from 0 (the first) to 1 (the last)."""
    mixed = [((i + 0.5) / max(len(among), 1), 0, one) for i, one in enumerate(among)]
    mixed += [(place, 1, one) for place, one in zip(places, what, strict=True)]
    return [one for *_, one in sorted(mixed, key=lambda item: item[:2])]


def needles(made: Making, *, haystack: str, keys: str = "words", values: str = "numbers", num_keys: int = 1,
            num_values: int = 1, num_queries: int = 1) -> tuple[list[int], list[str]]:
    """haystack: "noise", "text", or "needles" that nobody asks for. keys, values: "words", "numbers" or "uuids"."""
    make = {"words": made.word, "numbers": made.number, "uuids": made.uuid}
    known: set[str] = set()
    text = made.source.text if haystack == "text" else ""
    names = made.fresh(make[keys], max(num_keys, num_queries), known, text)
    held = {name: made.fresh(make[values], num_values, known, text) for name in names}
    lines = [NEEDLE.format(kind=values, key=name, value=value) for name in names for value in held[name]]
    places = [made.rng.random() for _ in lines]
    asked = names[:num_queries]
    query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    answers = [value for name in asked for value in held[name]]
    template = ASKED_FOR_ONE if len(answers) == 1 else ASKED_FOR_MORE
    start, others = made.rng.randrange(len(made.source.sentences)), []

    def hay(count: int) -> list[str]:
        if haystack == "noise":
            return [NOISE] * count
        if haystack == "text":
            return made.source.stretch(start, count)
        while len(others) < count:
            key, value = made.fresh(make[keys], 1, known) + made.fresh(make[values], 1, known)
            others.append(NEEDLE.format(kind=values, key=key, value=value))
        return others[:count]

    def write(count: int) -> str:
        context = (" " if haystack == "text" else "\n").join(spread(hay(count), lines, places))
        return template.format(one=values[:-1], kind=values, context=context, query=query)

    return made.fill(write, "a haystack"), answers


def pass_key(made: Making) -> tuple[list[int], list[str]]:
    """Five digits, which stand in the text twice."""
    key, place = str(made.rng.randrange(10_000, 100_000)), made.rng.random()
    line = f"The pass key is {key}. Remember it. {key} is the pass key."
    return made.fill(lambda count: PASSKEY.format(context=" ".join(spread([NOISE] * count, [line], [place]))),
                     "a haystack"), [key]


def variables(made: Making, *, hops: int = 4, example_lines: int = 12) -> tuple[list[int], list[str]]:
    """A chain of assignments among noise, after an example with its answer."""
    def chain(letters: int) -> tuple[list[str], str, list[str]]:
        known: set[str] = set()
        names = made.fresh(lambda: "".join(made.rng.choices(string.ascii_uppercase, k=letters)), hops + 1, known)
        value = str(made.rng.randrange(10_000, 100_000))
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {name} = VAR {before}" for before, name in zip(names[:-1], names[1:], strict=True)]
        return lines, value, names

    def ask(lines: list[str], value: str, places: list[float], count: int) -> str:
        context = "\n".join(spread([NOISE] * count, lines, places))
        return VARIABLES.format(context=context, query=value, count=hops + 1)

    def places() -> list[float]:
        return sorted(made.rng.random() for _ in range(hops + 1))  # a value is assigned before it is used

    lines, value, names = chain(3)
    example = ask(lines, value, places(), example_lines) + " ".join(names) + "\n\n"
    lines, value, names = chain(5)
    here = places()
    return made.fill(lambda count: example + ask(lines, value, here, count), "a chain of variables"), names


def common_words(made: Making, *, num_common: int = 10) -> tuple[list[int], list[str]]:
    """Ten words stand thirty times each in a numbered list, all others three times, after an example with 10 and 3; in
    a short list six times and once, after 3 and 1."""
    often, seldom, before = (30, 3, (10, 3)) if made.room >= 4000 else (6, 1, (3, 1))
    words = made.rng.sample(made.source.words, len(made.source.words))
    common, example_words, rest = words[:num_common], words[num_common : 2 * num_common], words[2 * num_common :]
    mixing = made.rng.getrandbits(32)

    def other(i: int) -> str:
        """A text may have too few words; then two make one."""
        return rest[i] if i < len(rest) else rest[i % len(rest)] + rest[i // len(rest) - 1]

    def listed(frequent: list[str], others: list[str], often: int, seldom: int) -> str:
        entries = frequent * often + others * seldom
        random.Random(mixing).shuffle(entries)
        return COMMON.format(context=" ".join(f"{i}. {word}" for i, word in enumerate(entries, 1)))

    def answer(frequent: list[str]) -> str:
        return " " + " ".join(f"{i}. {word}" for i, word in enumerate(frequent, 1))

    example = listed(example_words, rest[:30], *before) + answer(example_words) + "\n"
    return made.fill(lambda count: example + listed(common, [other(i) for i in range(count)], often, seldom),
                     "a list of words"), common


def frequent_words(made: Making, *, letters: int = 6, num_words: int = 2000, alpha: float = 2.0
                   ) -> tuple[list[int], list[str]]:
    """Coded words by Zipf's law; the first rank is dots, and the next three are asked for."""
    coded = made.fresh(lambda: "".join(made.rng.choices(string.ascii_lowercase, k=letters)), num_words - 1, set())
    ranked, mixing = ["....", *coded], made.rng.getrandbits(32)
    total = sum(rank**-alpha for rank in range(1, num_words + 1))

    def write(count: int) -> str:
        size = 100 + 10 * count  # words; a hundred are enough to tell the first ranks apart
        words = [word for rank, word in enumerate(ranked, 1) for _ in range(round(size * rank**-alpha / total))]
        random.Random(mixing).shuffle(words)
        return FREQUENT.format(context=" ".join(words))

    return made.fill(write, "a coded text"), ranked[1:4]


def questions(made: Making, *, sentences: int = 5) -> tuple[list[int], list[str]]:
    """Documents cut from the text, each with a sentence about another made-up person; one of them is asked about."""
    known: set[str] = set()
    [person, town] = made.fresh(made.name, 2, known, made.source.text)
    start, place = made.rng.randrange(len(made.source.sentences)), made.rng.random()
    others: list[list[str]] = []

    def document(i: int, who: str, where: str) -> str:
        lines = made.source.stretch(start + i * sentences, sentences)
        return " ".join([*lines[:2], f"{who} was born in the town of {where}.", *lines[2:]])

    def write(count: int) -> str:
        while len(others) < count:
            others.append(made.fresh(made.name, 2, known))
        people = others[:count]
        at = round(place * count)
        people = [*people[:at], [person, town], *people[at:]]
        context = "\n\n".join(f"Document {i}:\n{document(i, *who)}" for i, who in enumerate(people, 1))
        return DOCUMENTS.format(context=context, query=f"In which town was {person} born?")

    return made.fill(write, "a document"), [town]


def facts(made: Making, *, num_facts: int = 9) -> tuple[list[int], list[str]]:
    """The task that the embedded pair was trained on; see tiny_data.py."""
    rng = np.random.default_rng(made.rng.getrandbits(64))
    if num_facts > tiny_data.MAX_FACTS:
        raise UserError(f"{num_facts} facts need more syllables than there are; ask for at most {tiny_data.MAX_FACTS}")
    least = 24 * (num_facts + 2)
    if made.room < least:
        raise UserError(f"{num_facts} facts need about {least} tokens, and there is room for {made.room}; give a "
                        "larger --length")
    text, chars = made.source.text, 5 * made.room + 2000  # a short text is repeated
    text *= math.ceil(chars / len(text))
    prompt, answer = tiny_data.make_recall_document(
        rng, partial(made.tokenizer.encode, bos=False), text, made.room, float(rng.random()), n_facts=num_facts,
        bos=made.tokenizer.bos_id)
    return prompt[made.tokenizer.bos_id is None :], [made.tokenizer.decode(answer).strip()]


# Name: how it is made, tokens of an answer, its score
FAMILIES: dict[str, tuple[Callable[[Making], tuple[list[int], list[str]]], int, str]] = {
    "niah_single_1": (partial(needles, haystack="noise"), 128, "every_part"),
    "niah_single_2": (partial(needles, haystack="text"), 128, "every_part"),
    "niah_single_3": (partial(needles, haystack="text", values="uuids"), 128, "every_part"),
    "niah_multikey_1": (partial(needles, haystack="text", num_keys=4), 128, "every_part"),
    "niah_multikey_2": (partial(needles, haystack="needles"), 128, "every_part"),
    "niah_multikey_3": (partial(needles, haystack="needles", keys="uuids", values="uuids"), 128, "every_part"),
    "niah_multivalue": (partial(needles, haystack="text", num_values=4), 128, "every_part"),
    "niah_multiquery": (partial(needles, haystack="text", num_queries=4), 128, "every_part"),
    "vt": (variables, 30, "every_part"),
    "cwe": (common_words, 120, "every_part"),
    "fwe": (frequent_words, 50, "every_part"),
    "qa": (questions, 32, "any_part"),
    "passkey": (pass_key, 16, "first_number"),
    "recall": (facts, 32, "begins"),
    "recall_40": (partial(facts, num_facts=40), 32, "begins"),
}


def make(task: str, source: Text, tokenizer, *, length: int, number: int, seed: int,
         new_tokens: int | None = None) -> Sample:
    """Sample `number` of a family: the prompt and its answer have at most `length` tokens, and no unit more would fit.

    Args:
        new_tokens: of the answer; None: as the suite has it.

    Raises:
        UserError: `length` is too small for it.
    """
    write, usual, score = FAMILIES[task]
    count = new_tokens or usual
    if length <= count:
        raise UserError(f"--length {length} leaves no room beside {count} new tokens of {task}; give a larger one")
    made = Making(source, tokenizer, length - count, random.Random(f"{task} {seed} {number}"))
    prompt, answers = write(made)
    return Sample(task, number, prompt, count, answers, score)
