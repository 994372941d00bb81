"""A stream of one answer: what there is of it in between, and who may end it."""

import threading

from conftest import make_engine, random_prompt

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
    """As a server does whose client is gone. It waits for the piece that is under way."""
    engine, is_round, closed = make_engine(*pair, **SETTINGS), threading.Event(), threading.Event()
    stream = engine.stream(PROMPT, 200, temperature=0.0, on_decode=lambda count: (is_round.set(), closed.wait(0.2)))

    def end():
        is_round.wait(20)
        stream.close()
        closed.set()

    other = threading.Thread(target=end)
    other.start()
    pieces = len(list(stream))
    other.join(20)
    assert closed.is_set() and 0 < pieces < 100 and stream.result.finish_reason == "interrupted"
    assert len(engine.generate(PROMPT, 5).tokens) == 5


def test_a_callback_ends_it(pair):
    engine = make_engine(*pair, **SETTINGS)
    stream = engine.stream(PROMPT, 200, temperature=0.0, on_decode=lambda count: stream.close())
    assert len(list(stream)) == 1 and stream.result.finish_reason == "interrupted"
    assert 0 < len(stream.result.tokens) < 20
