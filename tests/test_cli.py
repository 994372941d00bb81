"""The command line as a user meets it: in a process of its own, piped, and with mistakes. test_cli_flags.py has it
without the library behind it."""

import contextlib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from conftest import ROOT, python

import triforce
from triforce import UserError, cli
from triforce.cli import request, run
from triforce.cli.main import COMMANDS, COMMON, parser
from triforce.engine.engine import Engine
from triforce.engine.session import Stream

SMALL = ["--prompt", "The sea was calm and the wind", "--max-new-tokens", "12", "--device", "cpu", "--gamma", "6"]


def test_prompts_from_files_and_stdin(tmp_path, command):
    def length(*flags):
        told = command(*flags, "--max-new-tokens", "4", "--device", "cpu", "--json", "--seed", "0").out
        return json.loads(told)["stats"]["prompt_len"]

    (document := tmp_path / "book.txt").write_text("Call me Ishmael. " * 50)
    assert length("--prompt-file", str(document), "--prompt-len", "100") == 100
    assert length("--prompt-file", str(document), "--prefill", "100", "--question", "Who?") > 102
    document.write_bytes("\ufeffOnce upon\r\na time\rthere".encode())
    with open(document) as stdin, mock.patch.object(sys, "stdin", stdin):
        assert request.read_file("--prompt-file", "-") == "Once upon\na time\nthere"
    assert request.read_file("--prompt-file", str(document)) == "Once upon\na time\nthere"
    with mock.patch.object(sys, "stdin", None), pytest.raises(UserError, match="standard input, and that is closed"):
        request.read_file("--prompt-file", "-")
    (template := tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{{ names }}{% endfor %}")
    chat = ["--prompt", "Hello", "--chat", "--chat-template", str(template)]
    assert length(*chat, "--chat-template-kwargs", '{"names": ["Ishmael", "Ahab", "Queequeg"]}') > length(*chat) + 3


def test_a_pipe_is_read_as_the_prompt(tmp_path, command):
    """Also a file behind `<`; a prompt that is given goes before; what brings nothing is no prompt."""
    def said(*argv, stdin=os.devnull, status=0):
        with open(stdin) as file, mock.patch.object(sys, "stdin", file):
            return command(*argv, status=status)

    flags = ["--max-new-tokens", "4", "--device", "cpu", "--json", "--seed", "0", "--gamma", "4"]  # for the same text
    piped = python("generate.py", *(flag for flag in flags if flag != "--json"), input="Once upon a time")
    alone = json.loads(said("--prompt", "Once upon a time", *flags).out)
    tokens = alone["tokens"]
    assert piped.returncode == 0 and piped.stdout.strip() == alone["text"].strip() != ""
    assert all(word in piped.stderr for word in ("standard input", "tokens per second", "seed"))
    assert all(len(line) <= 80 for line in piped.stderr.splitlines())
    (document := tmp_path / "text").write_text("Once upon a time")
    (empty := tmp_path / "empty").touch()
    assert json.loads(said(*flags, stdin=document).out)["tokens"] == tokens
    assert json.loads(said("--prompt", "Once upon a time", *flags, stdin=empty).out)["tokens"] == tokens
    for stdin in (os.devnull, empty):
        shown = said("--checkpoint", str(ROOT / "triforce/tiny/target"), "--device", "cpu", stdin=stdin, status=2)
        assert "the prompt is empty; try --prompt" in shown.err


def test_the_demo_says_what_it_is(command):
    flags = ["--device", "cpu", "--prompt-len", "2000", "--max-new-tokens", "8", "--gamma", "3"]
    shown = command(*flags)
    assert "toy of 7.5 million" in shown.err and "drafts read 1,024 of these tokens" in shown.err
    assert "CPython's language reference" in " ".join(shown.err.split())
    assert "acceptance: of the tokens" in shown.err and "target forward: " in shown.err
    assert all(len(line) <= 80 for line in shown.err.splitlines())
    alone = command(*flags, "--no-speculation").err  # names are explained where they stand in the table
    assert "target forward: " in alone and "acceptance: " not in alone and "retrieval rebuild: " not in alone


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")  # other tests have imported them
def test_commands_and_their_modules(capsys, monkeypatch):
    """`triforce download`, `triforce convert` and the like run, however the program is started."""
    def said(program, *argv):
        monkeypatch.setattr(sys, "argv", [program, *argv])
        with pytest.raises(SystemExit) as end:  # as Python runs a file, or a module behind -m
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        return end.value.code or 0, capsys.readouterr().out

    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    for program in ("triforce", "generate.py"):
        assert said(program, "--version")[1].startswith("triforce 0.")
        for command in COMMANDS.keys() - {"eval"}:  # whose help is another program's
            status, text = said(program, command, "--help")
            assert status == 0 and f"usage: triforce {command}" in text and max(map(len, text.splitlines())) < 80
            assert command not in ("plan", "check") or f"\n    triforce {command} " in text  # examples


def test_eval_without_its_package(command, monkeypatch):
    for name in ("lm_eval", "lm_eval.api.instance"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "triforce.evaluation", raising=False)
    assert "pip install 'triforce[eval]'" in command("eval", "--tasks", "x", status=2).err


@pytest.mark.parametrize("argv,text", [
    (["--temprature", "1"], "--temprature is not a known flag or command; did you mean --temperature?"),
    (["--frobnicate"], "--frobnicate is not a known flag or command; triforce --help-all lists all"),
    (["--prompt", "Once", "upon"], "a text goes behind --prompt, in quotes"), (["plna"], "did you mean plan?"),
    (["--gamma", "x"], "gamma ('x') must be a whole number, at least 1, or 'auto'; try 6"),
    (["--logit-bias", "5:2"], "argument --logit-bias: '5:2' must be ID=BIAS, such as 5=-100 or 5=-inf"),
    (["--logit-bias", "5=inf"], "logit_bias of token 5 (inf) must be a number"),
    (["--max-new-tokens"], "expected one argument; see triforce --help"),
    (["--top-p", "1.5"], "top_p (1.5) must be above 0"), (["--max-new-tokens", "0"], "at least 1; try 256"),
    (["--prompt-len", "0"], "--prompt-len: '0' must be a whole number"), (["--num-samples", "0"], "least 1"),
    (["--seed", "9" * 20], "seed (99999999999999999999)"),
    (["--checkpoint", "/no/such/folder"], "no such folder"), (["--draft", "some/draft"], "triforce download --repo-id"),
    (["--prompt", ""], "the prompt is empty"), (["--prompt", "a", "--question", " "], "--question holds no question"),
    *((flags, f"cannot read {flags[-2]}") for flags in (
        ["--prompts", "/no"], ["--prompt-file", "/no"], ["--questions", "/no"], ["--chat", "--chat-template", "/no"])),
    (["--prompt", "a", "--chat-template", "x"], "add --chat"),
    (["--prompt", "a", "--save-every", "9"], "add --save-prefix"),
    (["--prompt", "a", "--cache-dir-size", "1GB"], "add --cache-dir"),
    (["--prompt", "a", "--piece-tokens", "64"], "add --offload"),
    (["--interactive", "--prompt-file", "{book}", "--chat-template-kwargs", "{{}}"], "add --chat"),
    (["--prompt", "a", "--chat", "--chat-template-kwargs", "{{x}}"], "-kwargs: '{x}' is no JSON"),
    *(([*flags, "x"], f"{flags[0]} does not go with {flags[-1]}") for flags in (
        ["--prompts", "x", "--prompt"], ["--prompt", "a", "--prompt-file"], ["--interactive", "--question"],
        ["--prefix", "{book}", "--prompt"], ["--prefix", "{book}", "--chat-template"])),
    (["--prompts", "x", "--num-samples", "2"], "--prompts does not go with --num-samples"),
    (["--save-prefix", "{book}x", "--questions", "{book}", "--keep", "end"], "--save-prefix does not go with --keep"),
    (["--num-samples", "2", "--compare"], "--compare does not go with --num-samples"),
    (["--save-prefix", "{book}", "--prompt", "a"], "book.txt is there, and is no prefix file; give another name"),
    (["--interactive", "--save-prefix", "talk.prefix"], "save the conversation with /save"),
    (["--prefix", "tests", "--question", "Who?"], "is a folder"), (["--prefix", ""], "'' is no name of a file"),
    (["--prefix", "no-such.prefix"], "give the name of a file that was saved"),
    (["--prefix", "a" * 300], "a is not there"),
    *(([*flags, "-"], "name the document's file") for flags in (["--questions"], ["--interactive", "--prompt-file"])),
])
def test_mistakes_are_told_in_one_line_before_a_model_is_loaded(argv, text, tmp_path, command, monkeypatch):
    monkeypatch.setattr(run, "load_engine", lambda *args: pytest.fail("loaded"))
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    shown = command(*(flag.format(book=book) for flag in argv), status=2)
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""
    assert book.read_text() == "Call me Ishmael."


@pytest.mark.parametrize("argv,text", [
    (["--budget", "4100"], "budget (4100) must be a multiple of chunk_size (8); try 4096"),
    (["--gamma", "9"], "gamma (9)"), (["--max-new-tokens", "200000"], "positions (131072)"),
    (["--resident-memory", "24", "--offload", "auto"], "write '24GiB'"),
    (["--device", "cuda:99"], "use --device cpu"), (["--system", "Be brief."], "no chat template")])
def test_what_only_a_model_can_refuse(argv, text, command):
    shown = command("--prompt", "a", "--device", "cpu", *argv, status=2)
    assert shown.out == "" and "Traceback" not in shown.err
    assert text in shown.err.splitlines()[-1] and shown.err.count("error: ") == 1


def test_a_prompt_that_looks_like_a_flag_is_left_alone():
    args = cli.parse(["--prompt", "--snake_case is a style of_names", "--gen_len=5", "--stop=--x_y", "--temp", "0.5"])
    assert args.prompt == "--snake_case is a style of_names" and args.max_new_tokens == 5 and args.stop == ["--x_y"]
    assert args.temperature == 0.5


def test_help_is_one_screen_and_all_of_it_is_asked_for(capsys):
    def said(flag):
        with pytest.raises(SystemExit) as end:
            cli.main([flag])
        assert end.value.code == 0
        return capsys.readouterr().out

    short, whole = said("--help"), said("--help-all")
    assert len(short.splitlines()) <= 50 and all(len(line) <= 80 for line in short.splitlines())
    flags = {option for action in parser()._actions for option in action.option_strings}
    assert all(flag in whole for flag in flags - {"-h", "--help"}) and flags >= {f"--{name}" for name in COMMON}
    assert all(f"--{name} " in short for name in COMMON) and "--tree-size" not in short


def test_what_the_checkpoint_chooses_is_a_default_and_is_told(tmp_path, command):
    """What the user says wins; at temperature 0 nothing is left to choose."""
    folder = tmp_path / "own"
    shutil.copytree(ROOT / "triforce" / "tiny" / "target", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.01, "top_k": 3}')
    told = []
    for flags in ([], ["--temperature", "0.01", "--top-k", "3"], ["--temperature", "5", "--min-p", "0"],
                  ["--temperature", "0"]):
        out, errors = command("--checkpoint", str(folder), *SMALL, "--json", "--seed", "5", *flags)
        told.append((json.loads(out), errors))
    chosen, given, hot, greedy = (one["stats"]["defaults"] for one, _ in told)
    assert chosen == {"temperature": 0.01, "top_k": 3} and given == {} and hot == {"top_k": 3} and greedy == {}
    assert told[0][0]["tokens"] == told[1][0]["tokens"] != told[2][0]["tokens"]
    assert re.search(r"top_k, checkpoint's +3\n", told[0][1]) and "checkpoint's" not in told[1][1]
    engine = triforce.load(folder, device="cpu", gamma=6)
    out = engine.generate([SMALL[1]], 12, seed=5, top_k=[3])[0]
    assert out.tokens == told[0][0]["tokens"] and out.stats.defaults == {"temperature": 0.01}


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(f"{sys.executable} generate.py --prompt 'The sea' --device cpu --ignore-eos | head -c 1",
                          shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_messages_that_cannot_be_written_do_not_cost_the_answer(command, capsys):
    expected, full = command(*SMALL, "--seed", "1").out, open("/dev/full", "w", buffering=1)
    with contextlib.redirect_stderr(full):
        assert cli.main([*SMALL, "--seed", "1"]) == 0
        assert cli.main([*SMALL, "--checkpoint", "nowhere"]) == 2
        assert sys.stderr is full
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().out == expected


def test_ctrl_c_ends_cleanly():
    process = subprocess.Popen([sys.executable, "generate.py", "--prompt", "The sea", "--device", "cpu", "--ignore-eos",
                                "--max-new-tokens", "20000"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONUNBUFFERED": "1"},
                               # What runs in the background may have been told to ignore Ctrl-C.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    process.stdout.read(20)  # in mid-stream
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and b"interrupted" in errors and b"Traceback" not in errors


@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("flags", [["--json", "--compare"], ["--num-samples", "1"], ["--num-samples", "1", "--json"]],
                         ids=str)
def test_ctrl_c_leaves_what_was_said(command, capsys, monkeypatch, pieces, flags):
    """As text that comes piece by piece, or as an object that says so. Nothing where no text had begun."""
    whole, following, shown = Stream.__next__, itertools.count(), []

    def interrupted(stream):
        shown.append(capsys.readouterr().out)
        if next(following) == pieces:
            raise KeyboardInterrupt
        return whole(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    rest, errors = command(*SMALL, "--ignore-eos", "--max-new-tokens", "400", *flags, status=130)
    assert errors.endswith("interrupted\n") and "comparing" not in errors
    assert bool("".join([*shown, rest]).strip()) == bool(pieces)
    if "--json" not in flags:
        assert shown[0] == "" and bool("".join(shown)) == bool(pieces)
    elif pieces:
        report = json.loads(rest)
        assert report["finish_reason"] == "interrupted" and 3 <= len(report["tokens"]) < 400 and report["text"]
        assert "tokens per second" in errors and "compare" not in report and report["stats"]["load"] > 0


@pytest.mark.parametrize("differs", [False, True])
def test_the_demonstration(differs, monkeypatch, command):
    """Without flags: all questions are answered in three ways, with the whole time of each."""
    asked, generate = [], Engine.generate

    def counted(engine, prompt, *more, **how):
        count = len(prompt) if isinstance(prompt, list) else 1
        asked.append((count, how.get("speculate", True), how["max_new_tokens"]))
        result = generate(engine, prompt, *more, **how)
        if differs and asked[-1][1:] == (False, 5):
            result.tokens[3] += 1
        return result

    small = {"DEMO": run.DEMO[:2], "DEMO_TOKENS": 6, "COMPARED_TOKENS": 5, "DEFAULT_PROMPT_LEN": 600}
    for name, value in small.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(Engine, "generate", counted)
    out, errors = command(status=int(differs))
    assert asked == [(2, True, 6), (2, False, 6), (1, False, 6), (1, False, 6), (1, True, 5), (1, False, 5)]
    rows = dict(re.findall(r"(?m)^(\S.*?)  +(\d.*)$", errors))
    ways = ["one after the other, without drafts", "side by side, without drafts", "side by side, with drafts"]
    for whole, answers in (re.findall(r"[\d.]+", rows[way]) for way in ways):
        assert float(whole) > float(answers)
    assert ("DIFFERENT from token 3" if differs else "5 tokens, speculation on and off: identical") in errors
    assert out.startswith(f"> {run.DEMO[0]}\n") and "speed-up, last beside first" in rows
    assert all(len(line) <= 80 for line in (out + errors).splitlines())


def test_a_file_of_prompts(tmp_path, command):
    """Answers in order, batch by batch, each what the prompt gets alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('"It was the best of times"\n\n{"prompt": "Call me"}\n"The"\n')
    flags = ["--prompts", str(file), "--batch-size", "2", "--max-new-tokens", "8", "--temperature", "0", "--gamma", "4"]
    out, errors = command(*flags)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert "2 of 3 after" in errors and "3 of 3 after" in errors and errors.startswith("loading tiny ...\n")
    assert json.loads(command("--prompt", "Call me", *flags[4:], "--json").out)["tokens"] == answers[1]["tokens"]
    file.write_text('\ufeff"one\u2028line"\n', encoding="utf-8")  # a BOM, and no line end
    assert [json.loads(line)["stats"]["new_tokens"] for line in command(*flags).out.splitlines()] == [8]
    file.write_bytes(b'{"prompt": "caf\xe9"}\n')
    assert "not UTF-8: 1 char" in command(*flags).err


@pytest.mark.parametrize("text,words", [
    ("not json", "line 1"), ('\n"a"\n{"text": "b"}', "line 3"), ("", "holds no prompt"), ("42", "holds no prompt"),
    ('"a"\n\n"' + "b c " * 70_000 + '"', "line 3 of"), ('{"prompt": "a", "seed": [1]}', "seed"),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "no prompt, or two"),
    ('"a"\n{"prompt": "b", "seed": 99999999999999999999}', "line 2 of --prompts"),
    ('{"prompt": "a", "question": 5}', "holds no question"), ('["a", "b"]', "is one list of JSON"),
    ('{"prompt": "a",\n "seed": 1}', "is one dict of JSON"),
    ('{"prompt": "a", "sed": 1}', "has the field 'sed', and there are prompt, messages, question, seed")],
    ids=lambda text: text[:20])
def test_what_is_no_prompt_is_named_by_its_line(text, words, tmp_path, command):
    (file := tmp_path / "prompts.jsonl").write_text(text)
    out, errors = command("--prompts", str(file), "--device", "cpu", status=2)
    assert words in errors and not out


def test_messages_of_a_line_are_not_cut(tmp_path, command):
    (file := tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "b"}]}')
    for flag, value in (("--prompt-len", "5"), ("--keep", "end")):
        errors = command("--prompts", str(file), "--device", "cpu", flag, value, status=2).err
        assert f"messages are not cut by {flag}; drop it, or give a prompt" in errors


def test_an_error_fits_a_terminal(command, monkeypatch):
    flags = ["--prompt", "x", "--checkpoint", "owner/name"]
    whole = command(*flags, status=2).err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    told = command(*flags, status=2).err.splitlines()
    assert len(whole) > 81 and len(told) > 1 and max(map(len, told)) < 80 and " ".join(told) == whole.strip()
