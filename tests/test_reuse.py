"""What the caches hold is not computed again: prompts that share a beginning, prompts that go on, conversations."""

import contextlib
import threading
from datetime import date
from functools import partial

import pytest
import torch
from conftest import SIZES, VOCAB, make_engine, random_prompt, refused, slow, tensors

from triforce import UserError
from triforce.cache.kv_cache import KVCache
from triforce.decode.drafters.model import ModelDrafter
from triforce.engine import buffers, prompt_cache_file
from triforce.engine.buffers import Buffers
from triforce.model import Transformer

SETTINGS = {**SIZES, "retrieval": True}
DOCUMENT = random_prompt(300)
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture
def engine(pair, monkeypatch):
    monkeypatch.setattr(buffers, "SHARED_FROM", 64)
    return make_engine(*pair, **SETTINGS)


@pytest.fixture(scope="module")
def twin(pair):
    """Computes every prompt anew, a token at a time."""
    alone = make_engine(*pair, **SETTINGS, reuse=False)
    alone.generate = partial(alone.generate, speculate=False)
    return alone


def same(results, expected) -> bool:
    results, expected = (one if isinstance(one, list) else [one] for one in (results, expected))
    return [one.tokens for one in results] == [one.tokens for one in expected]


@pytest.mark.parametrize("held", [False, True], ids=["anew", "of one row"])
def test_prompts_of_a_call_share_what_they_begin_with(engine, twin, computed, held):
    prompts = [DOCUMENT + random_prompt(n, seed=n) for n in (3, 20, 9)]
    if held:
        engine.generate(DOCUMENT, **GREEDY)
        computed.clear()
    results = engine.generate(prompts, **GREEDY)
    passes = sum(count for _, count in computed[: 2 - held])
    assert same(results, [twin.generate(prompt, **GREEDY) for prompt in prompts])
    assert [one.stats.shared_tokens for one in results] == [288] * 3
    assert [one.stats.reused_tokens for one in results] == [288 * held] * 3
    assert passes == 288 * (not held) + 3 * (len(DOCUMENT) - 288 + 20 - 1)
    again = engine.generate(prompts[:2], **GREEDY)
    assert same(again, results[:2]) and [one.stats.reused_tokens for one in again] == [288] * 2
    others = [random_prompt(320, seed=9) + [last] for last in (1, 2)]
    assert same(engine.generate(others, **GREEDY), [twin.generate(prompt, **GREEDY) for prompt in others])


def test_a_prompt_that_goes_on_computes_only_the_rest(engine, twin, computed):
    first = engine.generate(DOCUMENT, **GREEDY)
    computed.clear()
    prompt = DOCUMENT + first.tokens + random_prompt(30, seed=1)
    second = engine.generate(prompt, **GREEDY)
    held = len(DOCUMENT) + len(first.tokens) - 1  # the last token was emitted, and not computed
    assert second.stats.reused_tokens == held and computed == [(held, len(prompt) - 1 - held)]
    assert same(second, twin.generate(prompt, **GREEDY))
    other = DOCUMENT[:200] + random_prompt(10, seed=2)
    third = engine.generate(other, **GREEDY)
    assert third.stats.reused_tokens == 200 and same(third, twin.generate(other, **GREEDY))
    end = third.tokens[8:]  # and of more tokens than there is room for
    longer = engine.generate(other, **{**GREEDY, "max_new_tokens": 850}, stop_token_ids=end)
    assert longer.stats.reused_tokens == longer.stats.shared_tokens == 192
    assert longer.tokens == third.tokens[: 1 + min(map(third.tokens.index, end))]


def test_reuse_can_be_switched_off(pair, computed, monkeypatch):
    monkeypatch.setattr(buffers, "SHARED_FROM", 64)
    engine = make_engine(*pair, **SETTINGS, reuse=False, max_batch_size=2)
    prompts = [DOCUMENT + random_prompt(n, seed=n) for n in (3, 20)]
    results = engine.generate(prompts, **GREEDY)
    engine.generate(DOCUMENT, **GREEDY)
    computed.clear()
    later = engine.generate(DOCUMENT + [1, 2, 3], **GREEDY)
    assert all(one.stats.shared_tokens == one.stats.reused_tokens == 0 for one in (*results, later))
    assert computed == [(0, 302)]


def test_questions_about_a_prefix(engine, twin, computed):
    book = engine.prefill(DOCUMENT)
    assert len(book) == 300 and book.num_shared == 288 and computed == [(0, 288)]
    assert book.nbytes == 4 * 8 * 2 * 2 * (2 * 288 + 72)  # float32: K and V of 2 layers and heads; means of 72 chunks
    computed.clear()
    questions = [random_prompt(n, seed=n) for n in (2, 25)]
    results = engine.generate(questions, prefix=book, **GREEDY)
    assert computed == [(288, 2 * (12 + 25 - 1))] and [one.stats.shared_tokens for one in results] == [288] * 2
    expected = [twin.generate(DOCUMENT + question, **GREEDY) for question in questions]
    assert same(results, expected)
    assert same(engine.generate(questions[1], prefix=book, **GREEDY), expected[1])
    engine.release()
    assert same(engine.generate(questions[0], prefix=book, **GREEDY), expected[0])  # it outlives the engine's buffers
    with pytest.raises(UserError, match="another engine's, save the prefix, and open the file with this one"):
        twin.generate(questions[0], prefix=book, **GREEDY)


@pytest.mark.quick
@pytest.mark.parametrize("length", [16, 47, 48, 64])
def test_a_document_of_whole_intervals_is_continued_without_a_question(engine, twin, length):
    """Its last token is pending, and no part of what is shared."""
    document, question, law = random_prompt(length), random_prompt(5, seed=1), {"temperature": 0.0, "ignore_eos": True}
    book, expected = engine.prefill(document), twin.generate(document, 8, **law).tokens
    assert book.num_shared == length // 16 * 16
    alone = engine.generate(question, 8, prefix=book, **law).tokens
    samples = engine.generate("", 8, prefix=book, num_samples=3, **law)
    assert [one.tokens for one in samples] == [expected] * 3
    assert engine.generate("", 8, prefix=book, **law).tokens == expected
    assert [one.tokens for one in engine.generate(["", question], 8, prefix=book, **law)] == [expected, alone]


def test_samples_of_one_prompt(engine):
    """Seeds are seed, seed + 1, ...: each sample is what that seed gives."""
    drawn = {"temperature": 1.0, "max_new_tokens": 12}
    samples = engine.generate(DOCUMENT, num_samples=3, seed=5, **drawn)
    assert [one.stats.seed for one in samples] == [5, 6, 7] and samples[0].stats.shared_tokens == 288
    assert len({tuple(one.tokens) for one in samples}) == 3
    prompts = [DOCUMENT, DOCUMENT[:100]]
    for seed, seeds in ((5, [[5, 6], [7, 8]]), ([5, 70], [[5, 6], [70, 71]]), ([1, 2, 3, 4], [[1, 2], [3, 4]])):
        both = engine.generate(prompts, num_samples=2, seed=seed, **drawn)
        assert [[one.stats.seed for one in each] for each in both] == seeds
    own = engine.generate(prompts, num_samples=2, seed=[5, 70], temperature=[0.0, 1.0], max_new_tokens=12,
                          logit_bias=[None, {3: float("-inf")}])
    assert own[0][0].tokens == own[0][1].tokens and own[1][0].tokens != own[1][1].tokens
    assert not any(3 in one.tokens for one in own[1])
    refused("num_samples", engine.generate, DOCUMENT, num_samples=0)
    with pytest.raises(UserError, match=r"seed has 3 values for 2 prompts and 4 answers; give one value"):
        engine.generate(prompts, num_samples=2, seed=[1, 2, 3], **drawn)


@pytest.mark.parametrize("way", ["shared", "prefill", "open", "release"])
def test_a_stream_that_is_left_behind_lets_go_of_its_buffers(engine, states, watched, tmp_path, way):
    """Before what comes next is planned, and where prompts share what is computed for them now."""
    engine.prefill(DOCUMENT).save(tmp_path / "document")
    stream = engine.stream(random_prompt(25, seed=25), **GREEDY)
    next(stream)
    alive = watched(Buffers, "_check", lambda *args, **how: states[0]() is not None)
    shared = random_prompt(200, seed=3)
    {"shared": lambda: engine.generate([shared + [1, 2], shared + [3]], **GREEDY),
     "prefill": lambda: engine.prefill(DOCUMENT), "open": lambda: engine.open(tmp_path / "document"),
     "release": engine.release}[way]()
    assert not any(alive) and states[0]() is None and bool(alive) == (way != "release")
    assert stream.result.tokens
    refused("another generation has begun .* or its caches were freed", list, stream)


def test_an_interrupt_in_the_middle_of_a_prefill(engine, twin, monkeypatch):
    """Of one layer the keys and values are those of the new prompt: what was held before is still right."""
    engine.generate(DOCUMENT, **GREEDY)

    def broken(self, tokens, blocks, *args, **how):
        start, stop, block = blocks[0]
        self.layers[0](self.embedding(tokens)[:, start:stop], block.layer(0))
        raise KeyboardInterrupt

    interrupted(monkeypatch, Transformer, "prefill", broken, lambda: engine.generate(DOCUMENT + [1, 2, 3], **GREEDY))
    prompt = DOCUMENT + [1, 2, 4]
    assert same(engine.generate(prompt, **GREEDY), twin.generate(prompt, **GREEDY))


def interrupted(monkeypatch, owner, name: str, broken, call) -> None:
    """By Ctrl-C, where a call comes to owner.name."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, broken)
        call()


@pytest.mark.parametrize("what,draft_cache", [("rewind", "retrieval"), ("truncate", "snapkv"),
                                              *slow(("rewind", "snapkv"), ("truncate", "retrieval"))])
def test_an_interrupt_on_the_way_back(pair, twin, what, draft_cache, monkeypatch):
    """Of what a DecodeBatch holds, a part has gone: the same prompt again, or one that begins like what was said."""
    engine = make_engine(*pair, **SETTINGS, draft_cache=draft_cache)
    said = DOCUMENT + engine.generate(DOCUMENT, temperature=0.0, max_new_tokens=50).tokens
    state = engine.buffers.state
    place, name = (state.hierarchy.view, "open") if what == "rewind" else (state.cache, "truncate")
    whole = getattr(place, name)

    def broken(*args):
        whole(*args)
        raise KeyboardInterrupt

    interrupted(monkeypatch, place, name, broken,
                lambda: engine.generate(DOCUMENT if what == "rewind" else said[:310] + [1] * 20, **GREEDY))
    assert engine.buffers.state is state
    longer = said + random_prompt(20, seed=5)
    assert same(engine.generate(longer, **GREEDY), twin.generate(longer, **GREEDY))


def test_a_draft_goes_on_with_a_conversation(pair, watched):
    """It reads what it has not read, and all of it again once something was taken back."""
    engine = make_engine(*pair, **(SETTINGS | {"retrieval": False}))
    read = watched(ModelDrafter, "_take_in", lambda self, lengths: [
        (length, self._seen[row]) for row, length in lengths.items()])
    said = DOCUMENT + engine.generate(DOCUMENT, temperature=0.0, max_new_tokens=20).tokens
    held = engine.buffers.state.lens[0]
    read.clear()
    engine.generate(said + [5, 6], **GREEDY)
    [(length, known)] = next(filter(None, read))
    assert length == len(said) + 1 and held - 20 < known <= held
    read.clear()
    engine.generate(said[:-5] + [7] * 40, **GREEDY)
    assert next(filter(None, read)) == [(len(said) + 34, 0)]


@pytest.mark.parametrize("longer", [False, True])
def test_a_draft_that_was_broken_off_reads_anew(pair, longer, monkeypatch):
    """What it knew was of another text, or of what was taken back: a seed says what it says to a new engine."""
    made = SETTINGS | {"retrieval": False, "draft_window": 32}
    engine, law = make_engine(*pair, **made), {"seed": 3, "temperature": 1.0, "max_new_tokens": 20}
    engine.generate(DOCUMENT, temperature=0.0, max_new_tokens=40)
    prompt = random_prompt(320, seed=9) if longer else DOCUMENT

    def broken(self, ends):
        raise KeyboardInterrupt

    interrupted(monkeypatch, ModelDrafter, "open", broken, lambda: engine.generate(prompt, **law))
    prompt = prompt if longer else prompt + random_prompt(60, seed=4)
    said = engine.generate(prompt, **law)
    assert said.tokens == make_engine(*pair, **made).generate(prompt, **law).tokens
    assert said.tokens == engine.generate(prompt, **law).tokens


def test_messages_have_to_go_on_from_those_of_the_prefix(tiny_engine):
    """Or else a question about a book would be answered without it."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call me Ishmael. " * 60}]
    book = tiny_engine.prefill(messages, chat_template=TEMPLATE)
    longer = [messages[0], {"role": "user", "content": messages[1]["content"] + "\n\nWho?"}]
    results = [tiny_engine.generate(one, prefix=book, **LAW) for one in (
        longer, [*longer, {"role": "assistant", "content": "He."}, {"role": "user", "content": "Why?"}], "Who?")]
    assert [one.stats.shared_tokens for one in results] == [book.num_shared] * 3
    assert results[0].tokens == results[2].tokens
    for other in ([{"role": "user", "content": "Who?"}], messages[:1], [messages[0], {**messages[1], "role": "tool"}],
                  [messages[1], messages[0]], [messages[0], {"role": "user", "content": "Call me"}],
                  [messages[0], {"role": "user", "content": [{"type": "text", "text": messages[1]["content"]}]}]):
        refused("do not begin with those of the prefix", tiny_engine.generate, other, prefix=book, **LAW)


def test_what_a_file_cannot_say_is_refused_before_the_work(tiny_engine, tmp_path):
    messages, shares, day = [{"role": "user", "content": "Call me Ishmael. " * 60}], [], {"today": date(2026, 1, 1)}
    how = {"chat_template": TEMPLATE, "on_progress": shares.append}
    with pytest.raises(UserError, match="a file cannot hold these chat_template_kwargs: .*date.*; give texts"):
        tiny_engine.prefill(messages, keep=tmp_path / "a", chat_template_kwargs=day, **how)
    assert shares == []
    with pytest.raises(UserError, match="a file cannot hold these chat_template_kwargs"):
        tiny_engine.prefill(messages, chat_template_kwargs=day, **how).save(tmp_path / "a")
    written = set()
    for _ in range(2):  # it is known to be the same
        tiny_engine.prefill(messages, keep=tmp_path / "b", chat_template_kwargs={"pair": (1, 2)}, **how)
        written.add((tmp_path / "b").stat().st_ino)
    assert len(written) == 1


def test_an_interrupt_in_the_middle_of_a_flush(engine, twin, monkeypatch):
    """A length says that tokens lie in the prefix, and they do not: nothing of it is reused."""
    flush, calls = KVCache.flush, []

    def broken(self, row):
        calls.append(row)
        if len(calls) < 2:
            return flush(self, row)
        self.prefix.truncate(row, self.lens[row] + 16)
        raise KeyboardInterrupt

    interrupted(monkeypatch, KVCache, "flush", broken,
                lambda: engine.generate(DOCUMENT, temperature=0.0, max_new_tokens=60))
    [said] = engine.buffers.state.texts()
    assert len(calls) == 2 and len(said) > 320
    again = engine.generate(said + [7], **GREEDY)
    assert again.stats.reused_tokens == 0 and same(again, twin.generate(said + [7], **GREEDY))


@pytest.mark.parametrize("with_prefix", [True, False])
def test_a_seed_says_the_same_whatever_was_reused(tiny_engine, with_prefix):
    """A view is chosen by the queries of the last tokens of a prompt, whether they had to be computed for it or not."""
    document = random_prompt(1500, seed=int(with_prefix), vocab_size=4000)
    book = tiny_engine.prefill(document) if with_prefix else None

    def ask(*question: int):
        prompt = list(question) if with_prefix else document + list(question)
        return tiny_engine.generate(prompt, 40, prefix=book, seed=3, temperature=1.0, ignore_eos=True)

    first = ask(5, 6, 7)
    ask(5, 6, 9)
    again = ask(5, 6, 7)
    assert tiny_engine.buffers.state.hierarchy.view.selected[0] or with_prefix
    assert again.stats.reused_tokens > first.stats.reused_tokens and again.tokens == first.tokens


TEMPLATE = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")
LAW = {"temperature": 0.0, "max_new_tokens": 10}


def test_a_conversation_keeps_its_turns(tiny_engine, computed):
    chat = tiny_engine.chat()
    said = ["Call me Ishmael. " * 20, "Some years ago, never mind how long precisely", "having little money"]
    prompt, held = [], 0
    for i, text in enumerate(said):
        computed.clear()
        answer = chat.send(text, **LAW)
        prompt += tiny_engine.tokenizer.encode(f"\n\n{text}\n" if i else f"{text}\n", bos=not i)
        assert answer.stats.prompt_len == len(prompt)
        if i:  # all that was there before, but for the token that was emitted last, and those whose queries choose
            again = max(len(prompt) - held, tiny_engine.buffers.state.cache.newest)
            assert answer.stats.reused_tokens >= len(prompt) - 1 - again and computed[0][1] <= again + 1
        prompt += [token for token in answer.tokens if token not in tiny_engine.eos_ids]
        held = len(prompt)
    assert [text for text, _ in chat.turns] == said
    chat.undo()
    assert len(chat.turns) == 2 and chat.send(said[2], **LAW).tokens == answer.tokens
    for _ in range(3):
        chat.undo()
    refused("no turn to undo", chat.undo)
    refused("empty", chat.send, " ")


def test_turns_have_the_same_bits_with_drafts_and_without(pair):
    """Whatever a last round brought beyond the limit: what it holds of that would be computed in other steps."""
    told = []
    for speculate in (True, False):
        engine, text = make_engine(*pair, gamma=6), random_prompt(200, seed=1)
        for turn in range(5):
            out = engine.generate(text, 10 + turn, temperature=0.0, logprobs=0, speculate=speculate)
            text = text + out.tokens + random_prompt(9, seed=turn)
            told.append((speculate, out.logprobs, out.stats.reused_tokens))
    assert [one[1:] for one in told[:5]] == [one[1:] for one in told[5:]]
    assert told[-1][2] > 200


def test_prompts_that_go_on_have_the_same_bits_with_drafts_and_without(pair):
    """Where a round that went beyond the limit has flushed one interval more."""
    found = []
    for speculate in (True, False):
        engine = make_engine(*pair, gamma=6, flush_interval=16, chunk_size=4, max_batch_size=2)
        first = engine.generate(text := random_prompt(600, seed=1), 24, temperature=0.0, speculate=speculate)
        asks = [text + first.tokens + random_prompt(40, seed=seed) for seed in (2, 3)]
        both = engine.generate(asks, 6, temperature=0.0, logprobs=0, speculate=speculate)
        found.append([(one.logprobs, one.stats.shared_tokens) for one in both])
    assert found[0] == found[1] and found[0][0][1] > 600


@pytest.mark.parametrize("width", [3, 4, None])
def test_what_ends_an_answer_is_not_what_was_said(tiny_engine, width):
    """Without a template, too, the next turn follows the answer's text: without a stop string of so many characters,
    and without an id that ends it."""
    chat, law = tiny_engine.chat(), {"temperature": 0.0, "max_new_tokens": 40}
    free = chat.send("Call me Ishmael.", **law)
    chat.undo()
    middle = len(free.text) // 2
    how = {"stop_token_ids": [free.tokens[9]]} if width is None else {"stop": free.text[middle : middle + width]}
    answer = chat.send("Call me Ishmael.", **law, **how)
    assert answer.finish_reason == "stop" and len(answer.text) < len(free.text)
    said = tiny_engine.tokenizer.decode(chat._ids(("And then?", None)))
    assert said == f"Call me Ishmael.\n{answer.text}\n\nAnd then?\n"


def test_a_special_token_that_ends_an_answer_is_not_said(tiny_engine):
    chat, end = tiny_engine.chat(), tiny_engine.tokenizer.bos_id
    law = {"temperature": 0.0, "stop_token_ids": [end], "logit_bias": {end: 1e9}}
    answer = chat.send("Call me Ishmael.", max_new_tokens=9, **law)
    assert (answer.tokens, answer.text) == ([end], "") and chat._ids(("And then?", None)).count(end) == 1


def test_what_a_template_reads_besides_the_messages(tiny_engine, tmp_path):
    """The same for prompts, conversations, and questions about a document, which may bring their own."""
    template, short = TEMPLATE + "{% if terse %}!{% endif %}", {"chat_template_kwargs": {"terse": True}}
    messages = [{"role": "user", "content": "Call me Ishmael. " * 40}]

    def length(text):
        return len(tiny_engine.tokenizer.encode(text, bos=False))

    rendered = f"<user>{messages[0]['content']}</user>\n<assistant>"
    for more, end in (({}, ""), (short, "!")):
        made = tiny_engine.generate(messages, chat_template=template, **more, **LAW)
        assert made.stats.prompt_len == length(rendered + end)
        said = tiny_engine.chat(chat_template=template, **more).send(messages[0]["content"], **LAW)
        assert said.stats.prompt_len == made.stats.prompt_len
    book = tiny_engine.prefill(messages, chat_template=template, **short)
    book.save(tmp_path / "book.prefix")
    asked = f"<user>{messages[0]['content']}\n\nWho?</user>\n<assistant>"
    for one in (book, tiny_engine.open(tmp_path / "book.prefix")):
        for more, end in (({}, "!"), ({"chat_template_kwargs": {}}, "")):
            stats = tiny_engine.generate("Who?", prefix=one, **more, **LAW).stats
            assert stats.prompt_len == length(asked + end) and stats.shared_tokens == book.num_shared > 0


def test_a_document_in_messages(tiny_engine):
    """The prefix is what all rendered prompts begin with; the question follows the document within its message."""
    document = "Call me Ishmael. " * 80
    book = tiny_engine.prefill([{"role": "system", "content": "Be brief."}, {"role": "user", "content": document}],
                        chat_template=TEMPLATE)
    text = tiny_engine.tokenizer.decode(book.tokens)
    assert text.startswith("<system>Be brief.</system>\n<user>Call me") and text.rstrip().endswith("Ishmael.")
    answers = tiny_engine.generate(["Who?", "Where is he?"], prefix=book, **LAW)
    for question, answer in zip(["Who?", "Where is he?"], answers, strict=True):
        rendered = f"<system>Be brief.</system>\n<user>{document}\n\n{question}</user>\n<assistant>"
        assert answer.stats.shared_tokens == book.num_shared > 256
        assert answer.tokens == tiny_engine.generate(tiny_engine.tokenizer.encode(rendered, bos=False), **LAW).tokens
    chat = tiny_engine.chat(book)
    assert chat.send("Who?", **LAW).tokens == answers[0].tokens
    assert chat.send("And?", **LAW).stats.shared_tokens == book.num_shared
    refused("as text", tiny_engine.generate, [1, 2], prefix=book)


@pytest.mark.parametrize("has_document,template", [(True, TEMPLATE), (False, None),
                                                   *slow((True, None), (False, TEMPLATE))],
                         ids=["template, document", "none", "document", "template"])
def test_a_conversation_is_saved_and_gone_on_with(tiny_engine, tmp_path, has_document, template):
    """By another engine, which answers as the first would. Where the engine has answered others meanwhile, the file has
    the document's keys and values, and all tokens."""
    path, text = tmp_path / "talk.prefix", "Call me Ishmael. Some years ago, never mind how long. " * 60
    book = None
    if has_document:
        book = tiny_engine.prefill([{"role": "user", "content": text}] if template else text, chat_template=template)
    chat = tiny_engine.chat(book) if has_document else tiny_engine.chat(system="Be brief.", chat_template=template)
    with pytest.raises(UserError, match="nothing has been said") if book is None else contextlib.nullcontext():
        chat.save(path)
    if has_document:
        assert tiny_engine.open(path).tokens == book.tokens
    chat.send("Who are you, and where do you come from? " * 40, **LAW)
    chat.save(path)
    other = make_engine(tiny_engine.target, tiny_engine.draft, tokenizer=tiny_engine.tokenizer, max_seq_len=4096)
    opened = other.open(path)
    held = book.num_shared if has_document else 0
    assert opened.num_shared > held + 256 and opened.messages == (chat.messages if template else None)
    gone_on, expected = other.chat(opened).send("And then?", **LAW), chat.send("And then?", **LAW)
    assert gone_on.tokens == expected.tokens and gone_on.stats.prompt_len == expected.stats.prompt_len
    assert gone_on.stats.shared_tokens == opened.num_shared
    tiny_engine.generate("Something else. " * 100, **LAW)
    chat.save(path)
    later = other.open(path)
    assert later.num_shared == held and len(later) > len(opened)
    assert other.chat(later).send("Why?", **LAW).tokens == chat.send("Why?", **LAW).tokens


def test_nobody_answers_while_a_conversation_is_saved(tiny_engine, monkeypatch, tmp_path):
    """Another thread's answer would be written over what is read."""
    chat, write = tiny_engine.chat(), prompt_cache_file.write
    thread = threading.Thread(target=tiny_engine.generate, args=("Something else. " * 60,), kwargs=LAW)
    chat.send("Call me Ishmael. " * 60, **LAW)

    def slowly(*args, **how):
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        write(*args, **how)

    monkeypatch.setattr(prompt_cache_file, "write", slowly)
    chat.save(tmp_path / "talk.prefix")
    thread.join(60)
    assert not thread.is_alive() and tiny_engine.open(tmp_path / "talk.prefix").num_shared > 128


def test_a_document_is_saved_and_opened(pair, engine, twin, tmp_path):
    """By another engine, with another flush interval, offloaded or in float64: with the same keys and values."""
    path, question = tmp_path / "book.prefix", random_prompt(9, seed=1)
    book = engine.prefill(DOCUMENT)
    expected = engine.generate(question, prefix=book, **GREEDY)
    book.save(path)
    opened = make_engine(*pair, **SETTINGS).open(path)
    assert opened.tokens == DOCUMENT and opened.num_shared == 288
    assert all(torch.equal(*both) for both in zip(tensors(book), tensors(opened), strict=True))
    laws = [one.engine.generate(question, prefix=one, logprobs=VOCAB, **GREEDY).logprobs for one in (book, opened)]
    assert laws[0] == laws[1] and all(len(at.top) == VOCAB for at in laws[0])  # of every word, to the bit
    for more in ({"flush_interval": 64}, {"offload": True, "num_resident_layers": 1, "piece_tokens": 48}):
        other = make_engine(*pair, **{**SETTINGS, "budget": 128, **more})
        opened = other.open(path)
        assert opened.num_shared == (256 if "flush_interval" in more else 288)
        assert same(other.generate(question, prefix=opened, **GREEDY), expected)
    assert same(expected, twin.generate(DOCUMENT + question, **GREEDY))


@pytest.mark.parametrize("how", [{}, {"offload": "auto", "num_resident_layers": 1}], ids=["resident", "in parts"])
def test_what_a_conversation_holds_is_saved_with_its_document(pair, monkeypatch, tmp_path, how):
    """Wherever the two lie: they are one text in the file. What another text left in the DecodeBatch is not in it."""
    monkeypatch.setattr(buffers, "SHARED_FROM", 64)
    engine, question = make_engine(*pair, **SETTINGS, **how), random_prompt(60, seed=3)
    book = engine.prefill(DOCUMENT)
    tokens = DOCUMENT + question + engine.generate(question, 60, prefix=book, temperature=0.0, ignore_eos=True).tokens
    held = engine.buffers.held(tokens, book)
    held.save(tmp_path / "talk.prefix")
    other = make_engine(*pair, **SETTINGS)
    opened = other.open(tmp_path / "talk.prefix")
    assert opened.tokens == tokens and opened.num_shared == held.num_shared > len(DOCUMENT) + len(question)
    anew = make_engine(*pair, **SETTINGS).prefill(tokens)
    for i in range(2):
        for one, two in zip(opened.store.layer(i, 0), anew.store.layer(i, 0), strict=True):
            torch.testing.assert_close(one[:, : held.num_shared], two[:, : held.num_shared])
    elsewhere = DOCUMENT + random_prompt(100, seed=4)
    assert engine.buffers.held(elsewhere, book).num_shared == book.num_shared
    assert engine.buffers.held(random_prompt(100, seed=5), None).store is None
