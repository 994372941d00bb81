"""What others wrote reaches a terminal without its control characters, and a file as it is."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from triforce import answers, cli
from triforce.interactive import Conversation
from triforce.terminal import Console, consoles, draw, visible

EVIL = "a\x1b]0;title\x07b\x7fc\x9b2Jd\u202ee\u2066f\r\n\tg"
SEEN = "a\u241b]0;title\u2407b\ufffdc\ufffd2Jd\ufffde\ufffdf\u240d\n\tg"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminals(monkeypatch):
    """Makes both streams of this process those of a terminal; to be called in the test, after pytest has set its own.
    """
    def put() -> tuple[Terminal, Terminal]:
        monkeypatch.setattr(sys, "stdout", Terminal())
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stdout, sys.stderr

    return put


@pytest.mark.parametrize("codes", [range(0x20), range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x202A, 0x202F),
                                   range(0x2066, 0x206A)])
def test_every_control_character_is_seen(codes):
    for char in map(chr, codes):
        assert char in "\n\t" or char not in visible(f"a{char}b") and len(visible(f"a{char}b")) == 3
    assert visible("Grüße, 世界 🙂 \u00a0é") == "Grüße, 世界 🙂 \u00a0é"


def test_a_terminal_gets_pictures_and_a_file_what_there_is():
    for stream, expected in ((io.StringIO(), EVIL), (Terminal(), SEEN)):
        print(EVIL, end="", file=Console(stream, must_work=True))
        assert stream.getvalue() == expected


def test_what_draws_on_purpose_is_drawn(terminals):
    out, err = terminals()
    with consoles():
        draw("\x1b[31mred\x1b[0m", sys.stdout)
        with tqdm(total=3, file=sys.stderr, desc="of a library", mininterval=0) as bar:
            bar.update()
    assert out.getvalue() == "\x1b[31mred\x1b[0m" and "\r" in err.getvalue() and "\u240d" not in err.getvalue()
    assert (sys.stdout, sys.stderr) == (out, err)


@pytest.mark.parametrize("flags", [[], ["--show-levels"], ["--num-samples", "1"], ["--num-samples", "2"]])
def test_no_answer_controls_a_terminal(flags, terminals, monkeypatch):
    """Whichever way it is printed."""
    engine = answers.load("tiny", device="cpu")
    monkeypatch.setattr(answers, "load_engine", lambda args, group: engine)
    *_, escape = engine.tokenizer.encode("\x1b", bos=False)
    assert engine.tokenizer.decode([escape], continues=True) == "\x1b"
    out, _ = terminals()
    assert cli.main(["--prompt", "Call me", "--max-new-tokens", "4", "--device", "cpu", "--logit-bias",
                     f"{escape}=1000", *flags]) == 0
    assert out.getvalue().count("\u241b") >= 4
    assert "\x1b" not in re.sub("\x1b\\[[0-9]+m", "", out.getvalue())


def test_no_error_and_no_turn_controls_a_terminal(terminals, monkeypatch):
    out, err = terminals()
    assert cli.main(["--checkpoint", "./\x1b[2Jnowhere"]) == 2
    assert "\x1b" not in err.getvalue() and "./\u241b[2Jnowhere" in err.getvalue()
    monkeypatch.setattr(sys, "stdin", Terminal())
    with consoles():
        Conversation(SimpleNamespace(stream=lambda text, **options: iter([EVIL])), {}).answer("who?")
    assert out.getvalue() == SEEN + "\n"


def test_a_full_disk_is_told_as_one_and_other_refusals_as_they_are(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    assert cli.main(["--help"]) == 2
    assert "error: cannot write the output: No space left on device; make room" in capsys.readouterr().err
    monkeypatch.undo()

    def refused(*args):
        raise OSError(13, "Permission denied", "/a/folder")

    monkeypatch.setattr(cli, "read_request", refused)
    assert cli.main(["--prompt", "a"]) == 2
    told = capsys.readouterr().err
    assert "/a/folder: Permission denied" in told and "output" not in told


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_what_is_written_at_the_end_is_output_too():
    done = subprocess.run(f"{sys.executable} -m triforce --version > /dev/full", shell=True, text=True,
                          capture_output=True, cwd=Path(__file__).parent.parent,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})
    assert done.returncode == 2 and done.stderr.startswith("error: cannot write the output: No space")
