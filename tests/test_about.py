"""The command line's ways to use one document more than once, from flags to output."""

import builtins
import io
import json
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import refused

import triforce
from triforce.cli import interactive, request, run
from triforce.engine.conversation import Chat
from triforce.engine.prompt_cache_file import PrefixReader

FEW = ["--max-new-tokens", "6", "--gamma", "4", "--device", "cpu", "--no-compile"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("about")
    (folder / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 30)
    (folder / "questions").write_text('Who tells this?\n\n{"question": "What is the ship called?", "seed": 7}\n')
    return folder


@pytest.fixture
def lines_of(command):
    """The objects that a command writes."""
    return lambda *argv: [json.loads(line) for line in command(*argv).out.splitlines()]


def test_questions_are_answered_over_one_document(folder, command, lines_of):
    book = ["--prompt-file", str(folder / "book.txt")]
    saved = str(folder / "book.prefix")
    questions = ["--questions", str(folder / "questions"), "--seed", "3"]
    first = lines_of(*book, *questions, "--json", "--save-prefix", saved, *FEW)
    assert [row["question"] for row in first] == ["Who tells this?", "What is the ship called?"]
    assert [row["stats"]["seed"] for row in first] == [3, 7]
    assert all(row["stats"]["shared_tokens"] >= 512 and len(row["tokens"]) == 6 for row in first)
    again = lines_of("--prefix", saved, *questions, "--json", *FEW)
    assert [row["tokens"] for row in again] == [row["tokens"] for row in first]
    samples = lines_of("--prefix", saved, "--question", "Who tells this?", "--num-samples", "3", "--seed", "3",
                       "--json", *FEW)
    assert [row["sample"] for row in samples] == [0, 1, 2] and samples[0]["tokens"] == first[0]["tokens"]
    assert [row["stats"]["seed"] for row in samples] == [3, 4, 5]
    shown = command("--prefix", saved, *questions, *FEW)
    assert shown.out.startswith("> Who tells this?\n") and "shared prompt tokens" in shown.err
    assert re.search(r"\nanswers +2\n", shown.err) and re.search(r"\nnew tokens of all +12\n", shown.err)
    other = str(folder / "other.prefix")
    told = command(*book, "--save-prefix", other, *FEW).err
    assert f"ask about it with --question, or later with --prefix {other}" in told
    command("--prefix", other, "--num-samples", "2", *FEW)  # no question: it goes on


def test_questions_from_standard_input(folder, monkeypatch, command, lines_of):
    asked = ["--questions", "-", "--prompt-file", str(folder / "book.txt"), "--json", *FEW]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Who tells this?\nTo whom?\n")))
    assert [row["question"] for row in lines_of(*asked)] == ["Who tells this?", "To whom?"]
    monkeypatch.setattr("sys.stdin", None)
    for flags in (asked, ["--prompt", "x", "--interactive", *FEW]):
        assert " is closed" in command(*flags, status=2).err


@pytest.mark.parametrize("text,questions", [
    ("a?\n\n b? \n", [("a?", None), ("b?", None)]),
    ('"a?"\n{"question": "b?", "seed": 1}\n42', [("a?", None), ("b?", 1), ("42", None)]),
    ("[INST] Who? [/INST]\n[1] Who?", [("[INST] Who? [/INST]", None), ("[1] Who?", None)]),
    ('"Who\u2028is it?"\n"He" is who?', [("Who\u2028is it?", None), ('"He" is who?', None)]),
    ("", "no question"), ('a?\n{"x": 1}', "line 2 of --questions"), ('{"question": ""}', "line 1 of --questions"),
    ('[\n {"question": "a?"},\n]', "line 2 of --questions"),
    ('a?\n{"question": "b?", "sed": 1}', "line 2 .* has the field 'sed', and there are question, seed")])
def test_files_of_questions(text, questions, tmp_path):
    (path := tmp_path / "q").write_text(text)
    flags = "--questions", str(path), "question"
    if isinstance(questions, list):
        assert [(item["question"], item.get("seed")) for item in request.read_items(*flags)] == questions
        return
    refused(questions, request.read_items, *flags)


def test_a_saved_chat_is_asked_with_chat(folder, command, lines_of):
    """It does nothing there. Of a document of text it is an error."""
    file, template = str(folder / "chat.prefix"), folder / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    book = ["--prompt-file", str(folder / "book.txt"), "--save-prefix", file, *FEW]
    asked = ["--prefix", file, "--questions", str(folder / "questions"), "--seed", "3", "--json", *FEW]
    command(*book, "--chat", "--chat-template", str(template))
    answers = [[row["tokens"] for row in lines_of(*asked, *more)] for more in ([], ["--chat"])]
    assert answers[0] == answers[1]
    command(*book)
    assert "was made of text; drop --chat" in " ".join(command(*asked, "--chat", status=2).err.split())


def test_an_interrupted_prefill_is_gone_on_with(folder, command, broken_off):
    file = folder / "part.prefix"
    flags = ["--prompt-file", str(folder / "book.txt"), "--save-prefix", str(file), "--save-every", "256",
             "--prefill-chunk-size", "256", *FEW]
    with broken_off():
        assert command(*flags, status=130).err.endswith("interrupted\n")
    ask = ["--prefix", str(file), "--question", "Who?", *FEW]
    assert "of its document, whose prefill was broken off" in " ".join(command(*ask, status=2).err.split())
    assert " tokens, 256 of them from " in command(*flags, "--question", "Who?").err
    command(*ask)


def test_prompts_with_questions_messages_and_seeds(folder, command, lines_of):
    path, template = folder / "prompts", folder / "template"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    chat = ["--prompts", str(path), "--chat-template", str(template), "--temperature", "0", *FEW]
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}], "question": "Who?"}\n'
                    '{"messages": [{"role": "user", "content": "Hi\\n\\nWho?"}], "prompt": null}\n'
                    '{"messages": [{"role": "user", "content": "Hi"}]}\n')
    told = command("--prompts", str(path), *FEW, status=2).err  # the tiny pair has no chat template
    assert "line 1 of --prompts" in told
    one, same, other = lines_of(*chat)
    assert one["tokens"] == same["tokens"] and one["stats"]["load"] == same["stats"]["load"] > 0
    assert one["stats"]["prompt_len"] == same["stats"]["prompt_len"] > other["stats"]["prompt_len"]
    (folder / "questions").write_text("Who?\n")
    ask = ["--chat", "--prompt-file", str(path), "--questions", str(folder / "questions"), *FEW]
    assert "line 1" not in (told := command(*ask, status=2).err) and "no chat template" in told  # no question's fault
    path.write_text('"Call me"\n{"messages": [{"role": "user", "content": "' + "b c " * 70_000 + '"}]}\n')
    shown = command(*chat, "--batch-size", "1", status=2)  # before the first is answered
    assert not shown.out and "error: line 2 of --prompts" in shown.err and "exceed the model's positions" in shown.err
    path.write_text('{"prompt": "Call me", "question": "Who?", "seed": 5}\n"Call me\\n\\nWho?\\n"\n')
    first, second = lines_of("--prompts", str(path), "--seed", "1", *FEW)
    assert (first["stats"]["seed"], second["stats"]["seed"], first["question"]) == (5, 2, "Who?")
    assert first["stats"]["prompt_len"] > second["stats"]["prompt_len"] - 4


def typed(monkeypatch, *lines):
    """What somebody types: a line, or an exception that a key raises."""
    left = iter([*lines, EOFError])

    def read(prompt=""):
        line = next(left)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)


def test_a_conversation_on_the_terminal(folder, monkeypatch, command):
    saved, save = str(folder / "talk.prefix"), Chat.save

    def interrupted(self, path):
        if path == "x":
            raise KeyboardInterrupt
        save(self, path)

    monkeypatch.setattr(Chat, "save", interrupted)
    typed(monkeypatch, "/stats", "", "Who tells this?", "/stats", "/save " + saved, "/undo 3", "/undo", "/undo",
          "/nope", "/help", KeyboardInterrupt, "/save", "/save x", "Once more", "/quit", "never read")
    shown = command("--prompt-file", str(folder / "book.txt"), "--interactive", *FEW)
    assert shown.out.strip() and "never read" not in shown.out
    document = len(triforce.load("tiny", device="cpu").encode_prompt((folder / "book.txt").read_text()))
    with PrefixReader(saved) as file:
        assert len(file.tokens) > document + 4  # what was said is in it
    for said in ("nothing has been answered yet", "tokens per target forward", "turns before them: 0)",
                 "no turn to undo", "/nope is no command", "/undo 3 is no command", "/save is no command",
                 "Ctrl-C ends an answer"):
        assert said in shown.err
    assert shown.err.count("(broken off; ") == 2


def test_ctrl_c_ends_the_answer_and_not_the_program(folder, monkeypatch, command):
    """What was said so far stays; the next question is answered."""
    typed(monkeypatch, "Go on", "And then?")
    write, whole, seen, kept = sys.stdout.write, interactive.reply, [], []

    def interrupted(piece):
        seen.append(piece)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return write(piece)

    monkeypatch.setattr(interactive, "reply",
                        lambda chat, *more: (whole(chat, *more), kept.append(len(chat.turns[-1][1].tokens))))
    monkeypatch.setattr(sys.stdout, "write", interrupted)
    shown = command("--prompt-file", str(folder / "book.txt"), "--interactive", "--ignore-eos", "--max-new-tokens",
                    "60", *FEW[2:])
    assert "(ended)" in shown.err and kept[0] < 60 == kept[1]


@pytest.mark.parametrize("text", [b"caf\xe9?\nAnd why?\n/stats\n", b"caf\xef\xbf\xbd?\n\n/stats\nAnd why?"])
def test_a_conversation_from_a_pipe(folder, monkeypatch, command, text):
    """Of several lines, one of which is not UTF-8. Each answer has its question."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", errors="strict"))
    said = command("--prompt-file", str(folder / "book.txt"), "--interactive", *FEW).out
    assert re.fullmatch("> caf\ufffd\\?\n.*\n\n> And why\\?\n.*\n\n", said, re.S)


def test_a_conversation_about_the_embedded_document(monkeypatch, command):
    """--prompt-len says that there is one, although the questions come from standard input."""
    typed(monkeypatch, "What is this?", "/stats")
    monkeypatch.setattr(request, "_is_piped", lambda: True)
    shown = command("--interactive", "--prompt-len", "1024", *FEW)
    assert "a document of 1,024 tokens" in " ".join(shown.err.split())
    assert "prompt tokens                      1,0" in shown.err and max(map(len, shown.err.splitlines())) <= 80


@pytest.mark.parametrize("device, more, asks, compiles", [
    ("cuda", {}, True, True), ("cuda", {}, False, None), ("cuda", {"compile": False}, True, False),
    ("cpu", {}, True, None)])
def test_a_conversation_on_a_gpu_is_of_compiled_steps(monkeypatch, device, more, asks, compiles):
    """Unless the user says otherwise: it has many answers, and one wait."""
    monkeypatch.setattr(run, "load", lambda checkpoint, **how: how)
    monkeypatch.setattr(run, "find_device", torch.device)
    args = SimpleNamespace(checkpoint="tiny", batch_size=1, num_samples=None, interactive=asks, device=device, **more)
    assert run.load_engine(args, None, request.Request()).get("compile") == compiles
