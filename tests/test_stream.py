"""A stream of one answer: what there is of it in between, and who may end it."""

import threading
import time

import pytest
from conftest import make_engine, random_prompt

import triforce
from triforce import UserError

SETTINGS = {"flush_interval": 16, "chunk_size": 4, "budget": 64}
PROMPT = random_prompt(100)


def test_a_result_in_between_stays_what_it_was(pair):
    stream = make_engine(*pair, **SETTINGS).stream(PROMPT, 40, temperature=0.0, logprobs=0)
    next(stream)
    early = stream.result
    count = len(early.tokens)
    for _ in stream:
        pass
    assert len(early.tokens) == len(early.levels) == len(early.pieces) == len(early.logprobs) == count < 40
    assert early.stats.new_tokens == count and len(stream.result.tokens) == 40


def test_another_thread_ends_it(pair):
    """As a server does whose client is gone: after the round that is under way."""
    engine, is_round, closed = make_engine(*pair, **SETTINGS), threading.Event(), threading.Event()
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


def test_a_callback_ends_it(pair):
    engine = make_engine(*pair, **SETTINGS)
    stream = engine.stream(PROMPT, 200, temperature=0.0, on_decode=lambda count: stream.close())
    assert len(list(stream)) == 1 and stream.result.finish_reason == "interrupted"
    assert 0 < len(stream.result.tokens) < 20
    early = engine.stream(random_prompt(100, seed=1), 200, on_prefill=lambda share: early.close())
    assert list(early) == [] and early.result.tokens == []


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
    engine, seen, ended = make_engine(*pair, **SETTINGS), [], []
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
    engine, told = make_engine(*pair, **SETTINGS), []

    def iterate_too(count):
        with pytest.raises(UserError, match="give each thread a stream of its own"):
            next(stream)
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
