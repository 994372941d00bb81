"""Mistakes in Python that were tracebacks, or passed without a word: a line each, before anything is computed."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import make_engine, random_pair, random_prompt, refused

import triforce
from triforce import UserError
from triforce.cli import run
from triforce.engine.engine import Engine
from triforce.model import Transformer


def nested(depth: int) -> list:
    found = [5]
    for _ in range(depth):
        found = [found]
    return found


@pytest.fixture(scope="module")
def tiny():
    return triforce.load("tiny", device="cpu")


@pytest.mark.parametrize("call,message", [
    (lambda engine: engine.chat("a document"), "prefix must be what this engine's `prefill` or `open` returned"),
    (lambda engine: engine.generate("x", budget=64), "budget is no option of generate; give it to triforce.load"),
    (lambda engine: triforce.generate("x", max_length=9), "max_length is not a known option"),
    (lambda engine: engine.chat(streamer=4), "streamer is not a known option of a turn"),
    (lambda engine: engine.chat(system=5), "system .5. must be a text"),
    (lambda engine: engine.stream("a", 3, num_samples=4), "stream gives one answer to each prompt"),
    (lambda engine: engine.chat().send("x", num_samples=4), "num_samples is no option of a conversation.*drop it"),
    (lambda engine: engine.chat().send("x", prefix=3), "prefix is no option of a turn.* to `Engine.chat`"),
    (lambda engine: engine.chat(engine.prefill([1, 2]), chat_template="x"), "give the template to `prefill`"),
    (lambda engine: engine.generate("x", 3, prefix=engine.prefill([1, 2]), chat_template="x"),
     "a prefix keeps the template that it was made with"),
    (lambda engine: engine.generate("x", 3, prefix=engine.prefill([1, 2]), chat_template_kwargs={"a": 1}),
     "made of text; ask by text or ids, and without chat_template_kwargs"),
    (lambda engine: engine.generate(["x", [5] * 131_000], 300, prefix=engine.prefill([1, 2])),
     r"prompt 1: .* cut the question by 230 tokens to 130770 or"),
    (lambda engine: engine.prefill([{"role": "user"}], chat_template="x"), r"whose content \(None\) is neither a text"),
    (lambda engine: engine.generate([{"role": "user", "content": "x"}], chat_template="x", chat_template_kwargs=3),
     r"chat_template_kwargs \(3\) must be a dict"),
    (lambda engine: engine.generate([{"role": "user", "content": "x"}], chat_template="x",
                                    chat_template_kwargs={"messages": []}), "kwargs has 'messages', which are what is"),
    (lambda engine: engine.generate("x", temperature=1e39), r"temperature \(1e\+39\) must be 0 .* at most 1e30"),
    (lambda engine: engine.prefill(["a" * 9000] * 2), r"this one is .'a{5,40}\.\.\.a+', '.*'.$"),
    (lambda engine: engine.chat().send(3), "a message is a text that is not empty, and this one is 3; say"),
    (lambda engine: engine.open("a\0b"), "is no name of a file"),
    (lambda engine: engine.logits(None), "logits takes .B, S. ids"),
    (lambda engine: engine.logits([[10**30]]), "outside the vocabulary of 4096"),
    (lambda engine: triforce.load("tiny", device="cpu", cache_dir=""), "'' is no name of a file or folder"),
    (lambda engine: triforce.load("tiny", device="cpu", retrieval="no"), "retrieval .'no'. must be True or False"),
    *((lambda engine, name=name: engine.generate("x", 3, **{name: "no"}), f"{name} .'no'. must be True or False")
      for name in ("speculate", "one_row", "ignore_eos")),
    (lambda engine: engine.generate("x", 3, chat_template="{% bad"), "are for messages; drop them, or give messages"),
    (lambda engine: engine.prefill("x", chat_template_kwargs={"a": 1}), "are for messages; drop them, or give mess"),
    (lambda engine: engine.generate([{"role": "user", "content": "x"}], chat_template=5), "must be a text in Jinja"),
    (lambda engine: engine.encode_prompt(nested(900)), "a prompt is text, a list of whole numbers"),
    (lambda engine: triforce.AsTransformers(engine).generate([[5]], num_samples=2), "a prompt gets one answer"),
    (lambda engine: triforce.AsTransformers(engine).generate([5]), r"input_ids .1. and attention_mask .1. must be"),
    (lambda engine: triforce.AsTransformers(engine).generate([[5]], [[1, 1]]), r"attention_mask .1, 2. must be .B, S"),
])
def test_it_is_told_in_a_line(tiny, call, message):
    refused(message, call, tiny)


def test_what_makes_no_drafter_is_told():
    refused("draft .5. must be a folder, a repository id", triforce.load, "tiny", draft=5, device="cpu")
    engine = make_engine(*random_pair(), draft=lambda tape: None)
    with pytest.raises(UserError, match="draft must make a Drafter of a Tape, and made None; see docs/extending.md"):
        engine.generate(random_prompt(40), 4)


class Period(triforce.Drafter):
    """What stood six tokens before, as if it had been drawn."""

    def __init__(self, tape):
        self.tape, self.num_drafted = tape, tape.buffer()

    def propose(self, start, plan, probs):
        place = start[:, None] + 1 + torch.arange(plan.gamma)
        tokens = self.tape.tokens.gather(1, (place - 6).clamp(min=0))
        self.tape.tokens.scatter_(1, place, tokens)
        self.write(probs, tokens[..., None])
        return self.num_drafted.fill_(plan.gamma)

    def write(self, probs, tokens):
        probs.zero_().scatter_(2, tokens, 1.0)


@pytest.mark.parametrize("retrieval", [False, True])
def test_what_a_drafter_forgets_to_write_biases_nothing(retrieval):
    """Where it leaves what it wrote for other tokens, and where it writes nothing, so that no token is kept."""
    class Stale(Period):
        def write(self, probs, tokens):
            probs.scatter_(2, tokens, 1.0)

    class Forgetful(Period):
        def write(self, probs, tokens):
            pass

    texts, kept = [], []
    for drafter in (Period, Stale, Forgetful):
        engine = make_engine(random_pair(vocab_size=16)[0], draft=drafter, gamma=3, retrieval=retrieval)
        found = engine.generate(random_prompt(60, vocab_size=16) * 2, 80, temperature=1.0, top_p=1.0, seed=1)
        texts.append(found.tokens)
        kept.append(found.levels.count("custom"))
    assert texts[0] == texts[1] and kept[0] == kept[1] > 0 == kept[2]


def test_an_activation_that_there_is_none_of():
    with pytest.raises(KeyError, match="mish"):
        Transformer.random(replace(random_pair()[0].config, activation="mish"))


def test_a_window_is_no_larger_than_its_row():
    """A draft's cache of a billion tokens would take minutes to plan; a row of some thousand has no more of them."""
    state = make_engine(*random_pair(), draft_window=10**9).prepare([random_prompt(100)], 8, temperature=0.0)
    [drafter] = state.hierarchy.sources.values()
    assert 100 < drafter.cache.window_size <= state.capacity < 10_000


def test_lines_without_a_seed_differ_between_batches(tmp_path, command):
    """Where another line has one: they are drawn, or count from --seed."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "seed": 5}\n"the same"\n{"prompt": "b", "seed": 5}\n"the same"\n')
    flags = ["--prompts", str(file), "--batch-size", "2", "--max-new-tokens", "2", "--device", "cpu"]
    found = [[json.loads(line)["stats"]["seed"] for line in command(*flags, *more).out.splitlines()]
             for more in ([], [], ["--seed", "7"])]
    assert found[2] == [5, 8, 5, 10]
    assert all(seeds[0] == seeds[2] == 5 and seeds[1] != seeds[3] for seeds in found)
    assert found[0][1] != found[1][1]
    assert run.seeds_of([{"seed": 3}, {}], 10, None, samples=2) == [3, 12]


@pytest.mark.parametrize("flags,message", [
    (["--logit-bias", "99999999=1"], "99999999"), (["--stop-token-ids", "99999999"], "outside the vocabulary"),
    (["--logprobs", "99999999", "--json"], "logprobs"), (["--max-new-tokens", "5000", "--max-seq-len", "5100"], "5100"),
    (["--questions", "{file}"], "line 1 of --questions"),
    (["--questions", "{long}", "--max-seq-len", "700"], "line 2 of --questions"),
])
def test_what_a_question_may_not_ask_is_told_before_the_prefill(flags, message, tmp_path, command, monkeypatch):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "who?", "seed": 99999999999999999999999}\n{"question": "where?"}\n')
    monkeypatch.setattr(Engine, "prefill", lambda *args, **options: pytest.fail("prefilled"))
    long = tmp_path / "long.txt"
    long.write_text("who?\n" + "what of it " * 200)
    flags = [flag.format(file=file, long=long) for flag in flags]
    asked = ["--device", "cpu", "--prompt-len", "300", "--question", "hi", "--num-samples", "2", *flags]
    assert message in command(*asked, status=2).err


def test_a_conversation_that_is_too_long_says_what_there_is_to_do():
    engine = triforce.load("tiny", device="cpu", max_seq_len=60)
    chat, book = engine.chat(max_new_tokens=20), engine.prefill(list(range(3, 30)))
    refused("cut the prompt by", chat.send, "word " * 60)
    with pytest.raises(UserError, match="take turns back with undo, .* or ask for fewer new ones"):
        for _ in range(9):
            chat.send("What is this?", ignore_eos=True)
    chat.undo()
    refused("cut the question by", engine.chat(book).send, "word " * 60, max_new_tokens=5)
