"""The command line as a user meets it: in a process of its own, piped, and with mistakes.

Of cli.py, with the library behind it; test_cli_flags.py has it without.
"""

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
from pathlib import Path
from unittest import mock

import pytest

import triforce
from triforce import acceptance, answers, cli, request
from triforce.engine import Stream
from triforce.errors import UserError

ROOT = Path(__file__).parent.parent
SMALL = ["--prompt", "The sea was calm and the wind", "--max-new-tokens", "12", "--device", "cpu", "--gamma", "6"]


def run(*args, stdin=None, program=("generate.py",)):
    given = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run([sys.executable, *program, *args], cwd=ROOT, capture_output=True, text=True, **given)


def test_text_to_stdout_and_the_rest_to_stderr():
    done = run(*SMALL, "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "tokens per second" not in done.stdout
    assert "tokens per second" in done.stderr and "seed" in done.stderr
    assert "of these tokens" not in done.stderr  # a budget of all of it is no part
    assert all(len(line) <= 80 for line in done.stderr.splitlines())
    again = subprocess.run([sys.executable, "-m", "triforce", *SMALL, "--seed", "1"], cwd=ROOT, capture_output=True,
                           text=True)
    assert again.stdout == done.stdout


def test_json(capsys):
    assert cli.main([*SMALL, "--json", "--compare", "--gen_len=9", "--temp", "0.5", "--top_p", "0.8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["tokens"]) == 9 and report["compare"]["greedy_first_difference"] is None
    assert report["stats"]["prompt_len"] > 3 and report["compare"]["autoregression"]["tbt"] > 0


def test_compare_reports_a_difference_when_acceptance_is_broken(capsys, monkeypatch):
    argv = ["--prompt", "It was a dark night. " * 60, "--max-new-tokens", "32", "--device", "cpu", "--compare",
            "--gamma", "6"]  # what is drafted is no matter of times, and is often wrong
    assert cli.main(argv) == 0
    shown = capsys.readouterr().err
    assert "identical" in shown and "autoregression" in shown and "speed-up" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    monkeypatch.setattr(acceptance, "is_accepted", lambda draft_prob, target_prob, u: draft_prob >= 0)
    assert cli.main(argv) == 1
    assert "DIFFERENT from token" in capsys.readouterr().err


def test_prompts_from_files_and_stdin(tmp_path, capsys):
    document = tmp_path / "book.txt"
    document.write_text("Call me Ishmael. " * 50)
    common = ["--max-new-tokens", "4", "--device", "cpu", "--json", "--seed", "0"]
    assert cli.main(["--prompt-file", str(document), "--prompt-len", "100", *common]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["prompt_len"] == 100
    assert cli.main(["--prompt-file", str(document), "--prefill", "100", "--question", "Who?", *common]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["prompt_len"] > 102
    piped = run("--prompt-file", "-", "--max-new-tokens", "4", "--device", "cpu", stdin="Once upon a time")
    assert piped.returncode == 0 and piped.stdout
    document.write_bytes("\ufeffOnce upon\r\na time\rthere".encode())
    with open(document) as stdin, mock.patch.object(sys, "stdin", stdin):
        assert request.read_document(cli.parse(["--prompt-file", "-"])) == "Once upon\na time\nthere"
    assert request.read_document(cli.parse(["--prompt-file", str(document)])) == "Once upon\na time\nthere"
    with mock.patch.object(sys, "stdin", None), pytest.raises(UserError, match="standard input, and that is closed"):
        request.read_document(cli.parser().parse_args(["--prompt-file", "-"]))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    chat = ["--prompt", "Hello", "--chat", "--chat-template", str(template), *common]
    assert cli.main(chat) == 0
    short = json.loads(capsys.readouterr().out)["stats"]["prompt_len"]
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ names | join(' ') }}{% endfor %}")
    assert cli.main([*chat, "--chat-template-kwargs", '{"names": ["Ishmael", "Ahab", "Queequeg"]}']) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["prompt_len"] > short + 3


def test_a_pipe_is_read_as_the_prompt(tmp_path, capsys):
    """Also a file behind `<`; a prompt that is given goes before; what brings nothing is no prompt."""
    def said(*argv, stdin=os.devnull):
        with open(stdin) as file, mock.patch.object(sys, "stdin", file):
            return cli.main(argv), *capsys.readouterr()

    flags = ["--max-new-tokens", "4", "--device", "cpu", "--json", "--seed", "0", "--gamma", "4"]  # for the same text
    piped = run(*flags, stdin="Once upon a time")
    _, by_flag, _ = said("--prompt", "Once upon a time", *flags)
    tokens = json.loads(by_flag)["tokens"]
    assert json.loads(piped.stdout)["tokens"] == tokens and "standard input" in piped.stderr
    document, other, empty = (tmp_path / name for name in ("text", "other", "empty"))
    for file, text in ((document, "Once upon a time"), (other, "Other"), (empty, "")):
        file.write_text(text)
    assert json.loads(said(*flags, stdin=document)[1])["tokens"] == tokens
    assert json.loads(said("--prompt", "Once upon a time", *flags, stdin=other)[1])["tokens"] == tokens
    for stdin, words in ((os.devnull, "error: there is no prompt; give a text with --prompt"),
                         (empty, "error: standard input is empty; did the command before the pipe fail?")):
        status, _, errors = said("--checkpoint", str(ROOT / "triforce/tiny/target"), "--device", "cpu", stdin=stdin)
        assert status == 2 and words in errors


def test_the_demo_says_what_it_is(capsys):
    flags = ["--device", "cpu", "--prompt-len", "2000", "--max-new-tokens", "8", "--gamma", "3"]
    assert cli.main(flags) == 0
    shown = capsys.readouterr()
    assert "toy of 7.5 million" in shown.err and "drafts read 1,024 of these tokens" in shown.err
    end = shown.err.split("It ends:")[1].split("\n\n")[0].split("... ")[1]
    assert " ".join(end.split())[-30:] in " ".join(request.default_document().split())
    assert "acceptance: of the tokens" in shown.err and "target forward: " in shown.err
    assert all(len(line) <= 80 for line in shown.err.splitlines())


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")  # other tests have imported them
def test_commands_and_their_modules(capsys, monkeypatch):
    """`triforce download`, `triforce convert`, and the modules by name: each runs, none does nothing."""
    def said(program, *argv):
        monkeypatch.setattr(sys, "argv", [program, *argv])
        with pytest.raises(SystemExit) as end:  # as Python runs a file, or a module behind -m
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        return end.value.code or 0, capsys.readouterr().out

    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    for program in ("triforce", "generate.py"):
        assert said(program, "--version")[1].startswith("triforce 0.")
        for command in cli.COMMANDS:
            status, text = said(program, command, "--help")
            assert status == 0 and f"usage: triforce {command}" in text
    for command in ("download", "convert"):
        assert said(f"triforce.hf.{command}")[0] == 2


@pytest.mark.parametrize("argv,text", [
    (["--temprature", "1"], "--temprature is not a known flag; did you mean --temperature?"),
    (["--gama=3"], "--gama is not a known flag; did you mean --gamma?"),
    (["--frobnicate"], "--frobnicate is not a known flag; triforce --help-all lists all"),
    (["--prompt", "Once", "upon"], "'upon' stands without a flag; give a text with --prompt"),
    (["--gamma", "x"], "'x' is neither a number of tokens nor 'auto'"),
    (["--logit-bias", "5:2"], "argument --logit-bias: '5:2' must be ID=BIAS, such as 5=-100 or 5=-inf"),
    (["--logit-bias", "5=inf"], "logit_bias of token 5 (inf) must be a number"),
    (["--max-new-tokens"], "expected one argument; triforce --help-all lists all flags"),
    (["--top-p", "1.5"], "top_p (1.5) must be above 0"), (["--max-new-tokens", "0"], "at least 1; try 256"),
    (["--prompts", "/no/such/file"], "cannot read --prompts"),
    (["--checkpoint", "/no/such/folder"], "no such folder"), (["--draft", "some/draft"], "triforce download --repo-id"),
    (["--prompts", "x", "--prompt", "x"], "drop one"),
    (["--prompt", "a", "--chat", "--chat-template", "/no/such"], "cannot read --chat-template"),
])
def test_mistakes_are_found_before_a_model_is_loaded(argv, text, capsys, monkeypatch):
    monkeypatch.setattr(answers, "load_engine", lambda *args: pytest.fail("loaded"))
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""


def test_a_prompt_that_looks_like_a_flag_is_left_alone(monkeypatch):
    seen = []

    def stop_here(args, group):
        seen.append(args)
        raise cli.UserError("enough")

    monkeypatch.setattr(answers, "load_engine", stop_here)
    cli.main(["--prompt", "--snake_case is a style of_names", "--max_new_tokens", "5", "--stop=--x_y"])
    assert seen[0].prompt == "--snake_case is a style of_names" and seen[0].max_new_tokens == 5
    assert seen[0].stop == ["--x_y"]


@pytest.mark.slow
def test_binary_input_is_read_as_text(capsys):
    argv = ["--prompt-file", "-", "--max-new-tokens", "4", "--device", "cpu"]
    done = subprocess.run([sys.executable, "generate.py", *argv], cwd=ROOT, capture_output=True,
                          input=bytes(range(256)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv,text", [
    (["--checkpoint", "no/such/folder/here"], "no such folder"),
    (["--checkpoint", "someone/some-model"], "triforce download --repo-id someone/some-model"),
    (["--prompt", ""], "prompt is empty"),
    (["--prompt", "a", "--prompt-file", "b"], "both"),
    (["--prompt-file", "/no/such/file"], "cannot read --prompt-file"),
    (["--prompt", "a", "--budget", "4100"], "budget (4100) must be a multiple of chunk_size (8); try 4096"),
    (["--prompt", "a", "--gamma", "9"], "gamma (9)"),
    (["--prompt", "a", "--max-new-tokens", "200000"], "positions (131072)"),
    (["--prompt", "a", "--temperature", "-1"], "temperature (-1.0)"),
    (["--prompt", "a", "--prompt-len", "0"], "--prompt-len (0)"),
    (["--prompt", "a", "--chat", "--chat-template", "/no/such"], "cannot read --chat-template"),
    (["--prompt", "a", "--device", "cuda:99"], "use --device cpu"),
    (["plna"], "plna is not a known command; did you mean triforce plan?"),
    (["some text"], "give a text with --prompt, in quotes"),
    (["--prompt", "a", "--resident-memory", "24", "--offload", "auto"], "write '24GiB'"),
    (["--prompt", "a", "--seed", "9" * 20], "seed (99999999999999999999)"),
    (["--prompt", "a", "--chat-template", "x"], "add --chat"),
    (["--prompt", "a", "--chat-template-kwargs", "{}"], "add --chat"),
    (["--prompt", "a", "--chat", "--chat-template-kwargs", "[1]"], "([1]) is not an object in JSON; try"),
    (["--prompt", "a", "--chat", "--chat-template-kwargs", "{x}"], "({x}) is not an object in JSON"),
])
def test_mistakes_get_one_line_and_no_traceback(argv, text, capsys):
    assert cli.main(argv if "--device" in argv else [*argv, "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and text in errors[0] and "Traceback" not in shown.err


def test_help_is_one_screen_and_all_of_it_is_asked_for(capsys):
    def said(flag):
        with pytest.raises(SystemExit) as end:
            cli.main([flag])
        assert end.value.code == 0
        return capsys.readouterr().out

    short, whole = said("--help"), said("--help-all")
    assert len(short.splitlines()) <= 50 and all(len(line) <= 80 for line in short.splitlines())
    flags = {option for action in cli.parser()._actions for option in action.option_strings}
    assert all(flag in whole for flag in flags - {"-h", "--help"}) and cli.COMMON <= flags
    assert all(flag in short for flag in cli.COMMON) and "--tree-size" not in short


def test_what_the_checkpoint_chooses_is_a_default_and_is_told(tmp_path, capsys, caplog):
    """What the user says wins; at temperature 0 nothing is left to choose."""
    folder = tmp_path / "own"
    shutil.copytree(ROOT / "triforce" / "tiny" / "target", folder)
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": 2, "temperature": 0.01, "top_k": 3, "repetition_penalty": 1.2, "num_beams": 1}')
    told = []
    for flags in ([], ["--temperature", "0.01", "--top-k", "3"], ["--temperature", "5", "--min-p", "0"],
                  ["--temperature", "0"]):
        assert cli.main(["--checkpoint", str(folder), *SMALL, "--json", "--seed", "5", *flags]) == 0
        out, errors = capsys.readouterr()
        told.append((json.loads(out), errors))
    chosen, given, hot, greedy = (one["stats"]["defaults"] for one, _ in told)
    assert chosen == {"temperature": 0.01, "top_k": 3} and given == {} and hot == {"top_k": 3} and greedy == {}
    assert told[0][0]["tokens"] == told[1][0]["tokens"] != told[2][0]["tokens"]
    assert re.search(r"top_k, checkpoint's +3\n", told[0][1]) and "checkpoint's" not in told[1][1]
    assert "repetition_penalty of generation_config.json (1.2) is not applied" in caplog.text
    assert "num_beams" not in caplog.text
    engine = triforce.load(folder, device="cpu", gamma=6)
    out = engine.generate([SMALL[1]], 12, seed=5, top_k=[3])[0]
    assert out.tokens == told[0][0]["tokens"] and out.stats.defaults == {"temperature": 0.01}
    for how in ({"temperature": 0}, {"temperature": 1.0, "top_k": None}):
        assert engine.generate(SMALL[1], 2, **how).stats.defaults == {}


def test_piped_answers_have_their_questions(tmp_path):
    done = run("--interactive", "--max-new-tokens", "5", "--device", "cpu", stdin="Who?\n\n/stats\nAnd where?\n")
    assert done.returncode == 0 and re.fullmatch(r"> Who\?\n.*\n\n> And where\?\n.*\n\n", done.stdout, re.S)


def test_a_closed_pipe_is_no_error():
    done = subprocess.run(f"{sys.executable} generate.py --prompt 'The sea' --device cpu --ignore-eos | head -c 1",
                          shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_messages_that_cannot_be_written_do_not_cost_the_answer(capsys):
    assert cli.main([*SMALL, "--seed", "1"]) == 0
    expected, begun = capsys.readouterr().out, sys.stderr
    full = open("/dev/full", "w", buffering=1)
    with contextlib.redirect_stderr(full):
        assert cli.main([*SMALL, "--seed", "1"]) == 0
        assert cli.main([*SMALL, "--checkpoint", "nowhere"]) == 2
        assert sys.stderr is full
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().out == expected and sys.stderr is begun


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_the_start_is_that_of_the_command(monkeypatch):
    """Under torchrun, which takes seconds to start its processes, that of torchrun."""
    with subprocess.Popen(["sleep", "30"]) as launcher:
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        own = answers.age()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        time.sleep(0.2)
        found = answers.age()
        launcher.kill()
    assert 0.1 < found < min(own, 5)


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
def test_ctrl_c_leaves_what_was_said(capsys, monkeypatch, pieces):
    """With --json, too: as an object that says so. Nothing where no text had begun."""
    whole, following, count = Stream.__next__, itertools.count(), pieces

    def interrupted(stream):
        if next(following) == count:
            raise KeyboardInterrupt
        return whole(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    assert cli.main([*SMALL, "--json", "--compare", "--ignore-eos", "--max-new-tokens", "400"]) == 130
    out, errors = capsys.readouterr()
    assert errors.endswith("interrupted\n") and "comparing" not in errors
    if pieces:
        report = json.loads(out)
        assert report["finish_reason"] == "interrupted" and 3 <= len(report["tokens"]) < 400 and report["text"]
        assert "tokens per second" in errors and "compare" not in report
    else:
        assert not out


@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
def test_a_single_answer_about_a_document_comes_as_it_is_said(capsys, monkeypatch, pieces, json_too):
    """And Ctrl-C leaves what there is of it."""
    whole, following, shown = Stream.__next__, itertools.count(), []

    def interrupted(stream):
        shown.append(capsys.readouterr().out)
        if next(following) == pieces:
            raise KeyboardInterrupt
        return whole(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    flags = ["--prompt-len", "300", "--device", "cpu", "--num-samples", "1", "--question", "Who?", "--seed", "3"]
    assert cli.main([*flags, "--ignore-eos", "--max-new-tokens", "400", *json_too]) == 130
    rest, errors = capsys.readouterr()
    out = "".join(shown) + rest
    assert errors.endswith("interrupted\n")
    if json_too:
        assert not any(shown) and len(rest.splitlines()) == bool(pieces)
        if pieces:
            report = json.loads(rest)
            assert report["finish_reason"] == "interrupted" and report["question"] == "Who?" and report["stats"]["load"]
    else:
        assert shown[0] == "" and bool(out.strip()) == bool(pieces) == bool("".join(shown))


def test_a_document_says_how_long_it_took(tmp_path, capsys):
    file = tmp_path / "book.prefix"
    flags = ["--device", "cpu", "--max-new-tokens", "3", "--question", "Who?"]
    assert cli.main([*flags, "--prompt-len", "300", "--save-prefix", str(file)]) == 0
    assert "a document of 300 tokens, computed in " in capsys.readouterr().err
    assert cli.main([*flags, "--prefix", str(file)]) == 0
    said = capsys.readouterr().err
    assert "a document of 300 tokens, opened in " in said and "start and load                     -" not in said


def test_fields_that_nothing_reads_are_named(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "sed": 5}\n"b"\n')
    assert cli.main(["--prompts", str(file), "--max-new-tokens", "2", "--device", "cpu"]) == 0
    assert "fields that are not read: sed; those that are: messages, prompt" in capsys.readouterr().err
    assert request.read_questions('[{"question": "a", "seed": 1}]', "q") and not capsys.readouterr().err


def test_bars_begin_when_work_is_reported(capsys, monkeypatch):
    """Before that, other lines may be printed."""
    made, real = [], answers.Bar.__init__
    monkeypatch.setattr(answers.Bar, "__init__", lambda bar, *args, **more: real(bar, *args, **more) or
                        made.append(bar.bar is None))
    assert cli.main([*SMALL]) == 0
    assert made and all(made)


def test_a_file_of_prompts(tmp_path, capsys):
    """Answers in order, batch by batch, each what the prompt gets alone; what is no prompt is named by its line."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('"It was the best of times"\n\n{"prompt": "Call me"}\n"The"\n')
    flags = ["--prompts", str(file), "--batch-size", "2", "--max-new-tokens", "8", "--temperature", "0", "--gamma", "4"]
    assert cli.main(flags) == 0
    out, errors = capsys.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert "3 of 3 prompts, 24 new tokens" in errors
    assert errors.startswith("loading tiny ...\ntiny on cpu, float32: 3 prompts, ") and "2 side by side" in errors
    assert cli.main(["--prompt", "Call me", *flags[4:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == answers[1]["tokens"]
    file.write_text('\ufeff"one\u2028line"\n', encoding="utf-8")  # a BOM, and no line end
    assert cli.main(flags) == 0
    assert [json.loads(line)["stats"]["new_tokens"] for line in capsys.readouterr().out.splitlines()] == [8]
    for text, words in (("not json", "line 1"), ('"a"\n{"text": "b"}', "line 2"), ("", "holds no prompt"),
                        ('"a"\n\n"' + "b c " * 70_000 + '"', "line 3 of"),
                        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "drop one of them"),
                        ('{"prompt": "a", "seed": true}', "a seed a whole number")):
        file.write_text(text)
        assert cli.main(flags) == 2 and words in capsys.readouterr().err
    assert cli.main([*flags, "--prompt", "x"]) == 2 and "drop one" in capsys.readouterr().err


def test_a_text_that_is_not_utf8_is_read_and_told(tmp_path, capsys):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait\r\nth\xe9\r\n")
    assert request.read_file("--prompt-file", str(path)) == "caf\ufffd au lait\nth\ufffd\n"
    assert "latin.txt is not UTF-8 from byte 3 on: 2 characters are read as" in capsys.readouterr().err
    path.write_bytes("\ufeffcaf\xe9\r\n".encode())
    assert request.read_file("--prompt-file", str(path)) == "caf\xe9\n" and not capsys.readouterr().err


@pytest.mark.parametrize("flags,message", [
    (["--interactive", "--keep", "end"], "--interactive does not go with --keep; cut the document with --prompt-len"),
    (["--prefix", "{book}", "--keep", "end"], "--prefix does not go with --keep; drop one of them"),
    (["--save-prefix", "{book}x", "--questions", "{book}", "--keep", "end"], "--save-prefix does not go with --keep"),
    (["--question", " \n"], "--question is empty; give a value, or drop the flag"),
    (["--prefix", "{book}", "--chat-template", "{book}"], "drop --chat-template"),
    (["--interactive", "--prompt-file", "{book}", "--chat-template-kwargs", "{{}}"],
     "--chat-template-kwargs was given without --chat; add --chat"),
    (["--num-samples", "2", "--compare"], "--num-samples does not go with --compare; drop one of them"),
    (["--save-prefix", "{book}", "--prompt", "a"], "book.txt is there, and is no prefix file; give another name"),
])
def test_flags_that_do_not_go_together_are_named(flags, message, tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    assert cli.main([flag.format(book=book) for flag in flags]) == 2
    assert message in capsys.readouterr().err and book.read_text() == "Call me Ishmael."
