"""A hundred random sequences of all that can be done with documents. A slow twin computes every prompt anew: each
answer is the twin's."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from conftest import SIZES, make_engine, random_prompt, slow

from triforce import attention
from triforce.cache import prefix
from triforce.engine import buffers
from triforce.model import Transformer

SETTINGS = {**SIZES, "retrieval": True, "max_seq_len": 4096}
GREEDY = {"temperature": 0.0, "ignore_eos": True}
OPERATIONS = ("prefill", "save and open", "ask", "ask many", "fork", "together", "alone", "go on", "turn back",
              "break off", "send", "send", "send", "break off a turn", "undo", "undo")
STEPS, A_TEST = 16, 5  # operations of a sequence, sequences of a test
DOCUMENTS = [random_prompt(300), random_prompt(200) + random_prompt(90, seed=50), random_prompt(150, seed=51)]


class Sequence:
    """What is held, and what should be."""

    def __init__(self, seed: int, engine, twin, folder, met: Counter):
        self.dice, self.engine, self.twin, self.folder, self.met = random.Random(seed), engine, twin, folder, met
        self.books = []  # the newest first, and the one before it
        self.chat = None
        self.turns: list[tuple[str, list[int]]] = []  # of the conversation: what was asked, and what was answered
        self.last = list(DOCUMENTS[0])  # the last prompt, and its answer

    def step(self, number: int) -> None:
        what = self.dice.choice(OPERATIONS) if self.books else "prefill"
        count, question = self.dice.choice([3, 5, 8]), random_prompt(self.dice.randint(1, 30), seed=100 + number)
        if what == "undo" and not self.turns:
            return
        self.met[what] += 1
        if what in ("prefill", "save and open"):
            self.renew(what)
        elif what in ("ask", "ask many", "fork"):
            self.ask(what, question, count)
        elif what in ("send", "break off a turn"):
            self.send(what, f"What of {self.dice.choice(['Ahab', 'the sea', 'Queequeg'])}, {number}?", 3 * count)
        elif what == "together":
            prompts = [self.last + question, self.last + question[::-1], self.last]  # which share what they begin with
            results = self.engine.generate(prompts, count, **GREEDY)
            assert [one.tokens for one in results] == [self.expected(prompt, count) for prompt in prompts]
        elif what == "undo":
            self.chat.undo()
            self.turns.pop()
            assert [said for said, _ in self.chat.turns] == [said for said, _ in self.turns]
        else:
            self.say(what, question, count)

    def expected(self, prompt: list[int], count: int) -> list[int]:
        return self.twin.generate(prompt, count, **GREEDY).tokens

    def renew(self, what: str) -> None:
        """The document: another one, or the same out of a file."""
        if what == "prefill":
            self.books = [self.engine.prefill(self.dice.choice(DOCUMENTS)), *self.books[:1]]
        else:
            book, path = self.dice.choice(self.books), self.folder / "a.prefix"
            book.save(path)
            self.books = [self.engine.open(path), *(one for one in self.books if one is not book)]
            assert self.books[0].tokens == book.tokens
            path.unlink()
        self.chat, self.turns = None, []

    def ask(self, what: str, question: list[int], count: int) -> None:
        """About the document: once, several questions side by side, or several answers to one."""
        book = self.dice.choice(self.books)
        asked = [question, question[::-1], question[:1]] if what == "ask many" else [question]
        forks = 3 if what == "fork" else 1
        results = self.engine.generate(asked, count, prefix=book, num_samples=forks, **GREEDY)
        results = [one for of_one in results for one in (of_one if isinstance(of_one, list) else [of_one])]
        expected = [self.expected(book.tokens + one, count) for one in asked for _ in range(forks)]
        assert [one.tokens for one in results] == expected
        self.last = book.tokens + asked[0] + expected[0]

    def send(self, what: str, text: str, count: int) -> None:
        """A turn of the conversation; or the beginning of one, about the newest document."""
        self.chat = self.chat or self.engine.chat(prefix=self.books[0], **GREEDY)
        prompt = list(self.books[0].tokens)
        for said, answer in (*self.turns, (text, [])):
            prompt += self.engine.tokenizer.encode(f"\n\n{said}\n", bos=False)
            prompt += [token for token in answer if token not in self.engine.eos_ids]  # an end token ends a turn alone
        stream = self.chat.stream(text, max_new_tokens=count)
        answer = self.broken_off(stream, count, 1 if what == "break off a turn" else None)
        assert answer == self.expected(prompt, count)[: len(answer)] and answer
        assert len(answer) == count or what == "break off a turn"
        self.turns.append((text, answer))

    def say(self, what: str, question: list[int], count: int) -> None:
        """A prompt of its own: another text, or the last one and more, or a part of the last one."""
        length = self.dice.randint(1, len(self.last)) if what == "turn back" else len(self.last)
        prompt = self.dice.choice(DOCUMENTS) if what == "alone" else self.last[:length] + question
        stream = self.engine.stream(prompt, count, **GREEDY)
        answer = self.broken_off(stream, count, 2 if what == "break off" else None)
        expected = self.expected(prompt, count)
        assert answer == expected[: len(answer)] and (answer == expected or what == "break off")
        assert self.engine.generate(prompt, count, **GREEDY).tokens == expected
        self.last = (prompt + expected)[:600]

    def broken_off(self, stream, count: int, pieces: int | None) -> list[int]:
        """What a stream of `count` tokens says, to its end or until so many pieces have come."""
        for given, _ in enumerate(stream, 1):
            if given == pieces:
                break
        stream.close()
        answer, interrupted = stream.result.tokens, stream.result.finish_reason == "interrupted"
        assert interrupted == (pieces is not None and len(answer) < count)
        self.met["interrupted"] += interrupted
        return answer


@pytest.mark.parametrize("first", slow(*range(0, 100, A_TEST)))
def test_a_hundred_sequences_against_a_twin(first, tiny_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(buffers, "SHARED_FROM", 64)
    target, met, turn = tiny_engine.target, Counter(), first // A_TEST
    if turn % 2:  # layers with a window, whose rings go around
        monkeypatch.setattr(prefix, "BACK", 16)
        monkeypatch.setattr(attention, "RING", 8)
        window = {"sliding_layers": (turn // 2 % 2,), "sliding_window": (24, 60, 150)[turn % 3]}
        target = Transformer.random(replace(target.config, **window), std=0.1)
    models = target, tiny_engine.draft
    how = {**SETTINGS, "tokenizer": tiny_engine.tokenizer, "eos_ids": tiny_engine.eos_ids}
    twin = make_engine(*models, **how, reuse=False)
    twin.generate = partial(twin.generate, speculate=False)
    for seed in range(first, first + A_TEST):
        sequence = Sequence(seed, make_engine(*models, **how, gamma=2, gamma_inner=1), twin, tmp_path, met)
        for number in range(STEPS):
            sequence.step(number)
    if first == 0:  # so few sequences need not have all
        assert all(met[what] for what in (*OPERATIONS, "interrupted")), met
