"""A stream of one answer: what there is of it in between, and who may end it."""

import threading
import time

import pytest
from conftest import SIZES, make_engine, random_prompt, refused

import triforce
from triforce import Engine
from triforce.engine.session import Session

PROMPT = random_prompt(100)


def test_another_thread_ends_it(pair):
    """As a server does whose client is gone: after the round that is under way."""
    engine, is_round, closed = make_engine(*pair, **SIZES), threading.Event(), threading.Event()
    stream = engine.stream(PROMPT, 200, temperature=0.0, on_decode=lambda count: (is_round.set(), closed.wait(20)))

    def end():
        is_round.wait(20)
        stream.close()
        closed.set()

    other = threading.Thread(target=end)
    other.start()
    assert len(list(stream)) == 1 and stream.result.finish_reason == "interrupted"
    other.join(20)
    assert closed.is_set() and 0 < len(stream.result.tokens) < 20
    assert len(engine.generate(PROMPT, 5).tokens) == 5


def test_a_turn_that_a_callback_ends_is_kept_as_it_was_given():
    chat = triforce.load("tiny", device="cpu").chat(ignore_eos=True)
    turn = chat.stream("Who?", on_prefill=lambda share: turn.close())
    assert list(turn) == [] and chat.turns == []
    turn = chat.stream("Who?", max_new_tokens=60, on_decode=lambda count: turn.close())
    given = "".join(turn)
    assert [(text, answer.text) for text, answer in chat.turns] == [("Who?", given)] and given
    assert chat.send("And then?", max_new_tokens=3).tokens and len(chat.turns) == 2


def test_a_stream_that_nobody_wants_any_more_computes_nothing(pair):
    """While it waited for another call, it was closed."""
    engine, seen, ended = make_engine(*pair, **SIZES), [], []
    stream = engine.stream(PROMPT, 200, temperature=0.0, on_prefill=seen.append)
    iterating = threading.Thread(target=lambda: ended.append(list(stream)))

    def close_it(count):
        if not ended and not iterating.is_alive():
            iterating.start()
            time.sleep(0.2)
            stream.close()

    engine.generate(random_prompt(90, seed=2), 9, on_decode=close_it)
    iterating.join(20)
    assert ended == [[]] and seen == []


def test_two_threads_cannot_iterate_over_one(pair):
    engine, told = make_engine(*pair, **SIZES), []

    def iterate_too(count):
        refused("give each thread a stream of its own", next, stream)
        told.append(count)

    stream = engine.stream(PROMPT, 9, temperature=0.0, on_decode=iterate_too)
    assert len(list(stream)) > 0 and told and stream.result.finish_reason == "length"


def test_a_turn_is_cancelled_before_its_lock_is_waited_for():
    chat = triforce.load("tiny", device="cpu").chat(ignore_eos=True)
    is_round, closing, rounds = threading.Event(), threading.Event(), []
    turn = chat.stream("Who?", max_new_tokens=200,
                       on_decode=lambda count: (rounds.append(count), is_round.set(), closing.wait(0.5)))
    iterating = threading.Thread(target=lambda: list(turn))
    iterating.start()
    assert is_round.wait(20)
    turn.close()
    closing.set()
    iterating.join(20)
    assert not iterating.is_alive() and len(rounds) == 1 == len(chat.turns)


@pytest.mark.parametrize("size", [pytest.param(4, id="side by side"),
                                  pytest.param(2, id="in two groups", marks=pytest.mark.slow)])
def test_several_prompts(size):
    """Each has the text that it has by itself, piece by piece, and the levels of its own tokens; one ends early."""
    engine = triforce.load("tiny", device="cpu", max_batch_size=size)
    prompts = ["The sea", "Once upon a time there", "def add(a, b):", "One, two,"]
    how = {"temperature": 0.0, "ignore_eos": True}
    alone = [engine.generate(prompt, 40, **how) for prompt in prompts]
    stream, texts, spans = engine.stream(prompts, 40, **how), [""] * 4, [""] * 4
    for number, piece in stream:
        texts[number] += piece
        assert "".join(text for text, _ in stream.spans) == piece
        spans[number] += "".join(level[0] * len(text) for text, level in stream.spans)
    assert texts == [one.text for one in alone] == [one.text for one in stream.results]
    assert [one.tokens for one in stream.results] == [one.tokens for one in alone]
    for one, result in zip(spans, stream.results, strict=True):
        told = zip(result.pieces, result.levels, strict=True)
        assert "t" in one and one == "".join(level[0] * len(text) for text, level in told)
    stream = engine.stream(prompts, 40, **how)
    for number, _ in stream:
        if number == 1:
            stream.cancel(1)
    one, *others = (stream.results[i] for i in (1, 0, 2, 3))
    assert one.finish_reason == "interrupted" and 0 < len(one.tokens) < 40
    assert one.tokens == alone[1].tokens[: len(one.tokens)]
    assert [other.tokens for other in others] == [alone[i].tokens for i in (0, 2, 3)]
    stream = engine.stream(prompts, 40, **how)
    for number in range(4):
        stream.cancel(number)
    assert list(stream) == [] and {one.finish_reason for one in stream.results} == {"interrupted"}
    assert engine.generate(prompts[0], 40, **how).text == alone[0].text


def test_what_nobody_watches_does_not_stop_between_rounds(pair, watched):
    """To leave the engine's lock, stream and settings after a round and to come back takes a host 0.15 ms."""
    begun, rounds = watched(Engine, "working", lambda self: None), watched(Session, "round", lambda self: None)
    engine = make_engine(*pair, max_batch_size=2)
    texts = [random_prompt(90), random_prompt(70), random_prompt(50)]  # two groups
    silent = engine.generate(texts, 24, seed=3, speculate=False)
    counts = len(begun), len(rounds)
    assert counts[0] <= 6 and counts[1] >= 40
    told = engine.generate(texts, 24, seed=3, speculate=False, on_decode=lambda count: None)
    assert [one.tokens for one in told] == [one.tokens for one in silent]
    assert len(begun) - counts[0] >= len(rounds) - counts[1]
