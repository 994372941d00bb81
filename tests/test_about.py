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

import triforce
from triforce.cli import interactive, main, request, run
from triforce.engine.buffers import Buffers
from triforce.engine.conversation import Chat
from triforce.engine.prompt_cache_file import PrefixReader
from triforce.errors import UserError

FEW = ["--max-new-tokens", "6", "--gamma", "4", "--device", "cpu", "--no-compile"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("about")
    (folder / "book.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 30)
    (folder / "questions").write_text('Who tells this?\n\n{"question": "What is the ship called?", "seed": 7}\n')
    return folder


def lines_of(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_questions_are_answered_over_one_document(folder, capsys):
    book = ["--prompt-file", str(folder / "book.txt")]
    saved = str(folder / "book.prefix")
    questions = ["--questions", str(folder / "questions"), "--seed", "3"]
    assert main([*book, *questions, "--json", "--save-prefix", saved, *FEW]) == 0
    first = lines_of(capsys)
    assert [row["question"] for row in first] == ["Who tells this?", "What is the ship called?"]
    assert [row["stats"]["seed"] for row in first] == [3, 7]
    assert all(row["stats"]["shared_tokens"] >= 512 and len(row["tokens"]) == 6 for row in first)
    assert main(["--prefix", saved, *questions, "--json", *FEW]) == 0
    assert [row["tokens"] for row in lines_of(capsys)] == [row["tokens"] for row in first]
    assert main(["--prefix", saved, "--question", "Who tells this?", "--num-samples", "3", "--seed", "3", "--json",
                 *FEW]) == 0
    samples = lines_of(capsys)
    assert [row["sample"] for row in samples] == [0, 1, 2] and samples[0]["tokens"] == first[0]["tokens"]
    assert [row["stats"]["seed"] for row in samples] == [3, 4, 5]
    assert main(["--prefix", saved, *questions, *FEW]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("> Who tells this?\n") and "shared prompt tokens" in shown.err
    assert re.search(r"\nanswers +2\n", shown.err) and re.search(r"\nnew tokens of all +12\n", shown.err)
    other = str(folder / "other.prefix")
    assert main([*book, "--save-prefix", other, *FEW]) == 0
    assert f"ask about it with --question, or later with --prefix {other}" in capsys.readouterr().err
    assert main(["--prefix", other, "--num-samples", "2", *FEW]) == 0  # no question: it goes on


def test_questions_from_standard_input(folder, monkeypatch, capsys):
    asked = ["--questions", "-", "--prompt-file", str(folder / "book.txt"), "--json", *FEW]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Who tells this?\nTo whom?\n")))
    assert main(asked) == 0
    assert [row["question"] for row in lines_of(capsys)] == ["Who tells this?", "To whom?"]
    monkeypatch.setattr("sys.stdin", None)
    for flags in (asked, ["--prompt", "x", "--interactive", *FEW]):
        assert main(flags) == 2 and " is closed" in capsys.readouterr().err


@pytest.mark.parametrize("text,questions", [
    ("a?\n\n b? \n", [("a?", None), ("b?", None)]),
    ('"a?"\n{"question": "b?", "seed": 1}\n42', [("a?", None), ("b?", 1), ("42", None)]),
    ("[INST] Who? [/INST]\n[1] Who?", [("[INST] Who? [/INST]", None), ("[1] Who?", None)]),
    ('"Who\u2028is it?"\n"He" is who?', [("Who\u2028is it?", None), ('"He" is who?', None)]),
    ("", "no question"), ('a?\n{"x": 1}', "line 2 of --questions"), ('{"question": ""}', "line 1 of --questions"),
    ('["a?", "b?"]', "is one list of JSON"), ('[\n {"question": "a?"},\n]', "line 2 of --questions"),
    ('a?\n{"question": "b?", "sed": 1}', "line 2 .* has the field 'sed', and there are question, seed")])
def test_files_of_questions(text, questions, tmp_path):
    (path := tmp_path / "q").write_text(text)
    flags = "--questions", str(path), "question"
    if isinstance(questions, list):
        assert [(item["question"], item.get("seed")) for item in request.read_items(*flags)] == questions
        return
    with pytest.raises(UserError, match=questions):
        request.read_items(*flags)


def test_a_saved_chat_is_asked_with_chat(folder, capsys):
    """It does nothing there. Of a document of text it is an error."""
    file, template = str(folder / "chat.prefix"), folder / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    book = ["--prompt-file", str(folder / "book.txt"), "--save-prefix", file, *FEW]
    asked = ["--prefix", file, "--questions", str(folder / "questions"), "--seed", "3", "--json", *FEW]
    assert main([*book, "--chat", "--chat-template", str(template)]) == 0
    assert main(asked) == 0 and main([*asked, "--chat"]) == 0
    answers = [row["tokens"] for row in lines_of(capsys)]
    assert answers[:2] == answers[2:]
    assert main(book) == 0 and main([*asked, "--chat"]) == 2
    assert "was made of text; drop --chat" in " ".join(capsys.readouterr().err.split())


def test_an_interrupted_prefill_is_gone_on_with(folder, capsys, monkeypatch):
    file, compute = folder / "part.prefix", Buffers._compute

    def broken(self, cache, tokens, start, *more):
        if start > 0:
            raise KeyboardInterrupt
        compute(self, cache, tokens, start, *more)

    flags = ["--prompt-file", str(folder / "book.txt"), "--save-prefix", str(file), "--save-every", "256",
             "--prefill-chunk-size", "256", *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(Buffers, "_compute", broken)
        assert main(flags) == 130 and capsys.readouterr().err.endswith("interrupted\n")
    assert main(["--prefix", str(file), "--question", "Who?", *FEW]) == 2
    assert "of its document, whose prefill was broken off" in " ".join(capsys.readouterr().err.split())
    assert main([*flags, "--question", "Who?"]) == 0 and " tokens, 256 of them from " in capsys.readouterr().err
    assert main(["--prefix", str(file), "--question", "Who?", *FEW]) == 0


def test_prompts_with_questions_messages_and_seeds(folder, capsys):
    path, template = folder / "prompts", folder / "template"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    chat = ["--prompts", str(path), "--chat-template", str(template), "--temperature", "0", *FEW]
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}], "question": "Who?"}\n'
                    '{"messages": [{"role": "user", "content": "Hi\\n\\nWho?"}], "prompt": null}\n'
                    '{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert main(["--prompts", str(path), *FEW]) == 2  # the tiny pair has no chat template
    assert "line 1 of --prompts" in capsys.readouterr().err
    assert main(chat) == 0
    one, same, other = lines_of(capsys)
    assert one["tokens"] == same["tokens"] and one["stats"]["load"] == same["stats"]["load"] > 0
    assert one["stats"]["prompt_len"] == same["stats"]["prompt_len"] > other["stats"]["prompt_len"]
    path.write_text('"Call me"\n{"messages": [{"role": "user", "content": "' + "b c " * 70_000 + '"}]}\n')
    assert main([*chat, "--batch-size", "1"]) == 2
    shown = capsys.readouterr()  # before the first is answered
    assert not shown.out and "error: line 2 of --prompts" in shown.err and "exceed the model's positions" in shown.err
    path.write_text('{"prompt": "Call me", "question": "Who?", "seed": 5}\n"Call me\\n\\nWho?\\n"\n')
    assert main(["--prompts", str(path), "--seed", "1", *FEW]) == 0
    first, second = lines_of(capsys)
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


def test_a_conversation_on_the_terminal(folder, monkeypatch, capsys):
    saved, save = str(folder / "talk.prefix"), Chat.save

    def interrupted(self, path):
        if path == "x":
            raise KeyboardInterrupt
        save(self, path)

    monkeypatch.setattr(Chat, "save", interrupted)
    typed(monkeypatch, "/stats", "", "Who tells this?", "/stats", "/save " + saved, "/undo 3", "/undo", "/undo",
          "/nope", "/help", KeyboardInterrupt, "/save", "/save x", "Once more", "/quit", "never read")
    assert main(["--prompt-file", str(folder / "book.txt"), "--interactive", *FEW]) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() and "never read" not in shown.out
    document = len(triforce.load("tiny", device="cpu").encode_prompt((folder / "book.txt").read_text()))
    with PrefixReader(saved) as file:
        assert len(file.tokens) > document + 4  # what was said is in it
    for said in ("nothing has been answered yet", "tokens per target forward", "turns before them: 0)",
                 "no turn to undo", "/nope is no command", "/undo 3 is no command", "/save is no command",
                 "Ctrl-C ends an answer"):
        assert said in shown.err
    assert shown.err.count("(broken off; ") == 2


def test_ctrl_c_ends_the_answer_and_not_the_program(folder, monkeypatch, capsys):
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
    assert main(["--prompt-file", str(folder / "book.txt"), "--interactive", "--ignore-eos", "--max-new-tokens", "60",
                 *FEW[2:]]) == 0
    assert "(ended)" in capsys.readouterr().err and kept[0] < 60 == kept[1]


@pytest.mark.parametrize("text", [b"caf\xe9?\nAnd why?\n/stats\n", b"caf\xef\xbf\xbd?\n\n/stats\nAnd why?"])
def test_a_conversation_from_a_pipe(folder, monkeypatch, capsys, text):
    """Of several lines, one of which is not UTF-8. Each answer has its question."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", errors="strict"))
    assert main(["--prompt-file", str(folder / "book.txt"), "--interactive", *FEW]) == 0
    assert re.fullmatch("> caf\ufffd\\?\n.*\n\n> And why\\?\n.*\n\n", capsys.readouterr().out, re.S)


def test_a_conversation_about_the_embedded_document(monkeypatch, capsys):
    """--prompt-len says that there is one, although the questions come from standard input."""
    typed(monkeypatch, "What is this?", "/stats")
    monkeypatch.setattr(request, "_is_piped", lambda: True)
    assert main(["--interactive", "--prompt-len", "1024", *FEW]) == 0
    shown = capsys.readouterr()
    assert "a document of 1,024 tokens" in " ".join(shown.err.split())
    assert "prompt tokens                      1,0" in shown.err and max(map(len, shown.err.splitlines())) <= 80


@pytest.mark.parametrize("device, more, asks, compiles", [
    ("cuda", {}, True, True), ("cuda", {}, False, None), ("cuda", {"compile": False}, True, False),
    ("cpu", {}, True, None)])
def test_a_conversation_on_a_gpu_is_of_compiled_steps(monkeypatch, device, more, asks, compiles):
    """Unless the user says otherwise: it has many answers, and one wait."""
    monkeypatch.setattr(run, "load", lambda checkpoint, **how: how)
    monkeypatch.setattr(run, "find_device", torch.device)
    args = SimpleNamespace(checkpoint="tiny", batch_size=1, interactive=asks, device=device, **more)
    assert run.load_engine(args, None).get("compile") == compiles
