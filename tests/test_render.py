"""What people see: bars, texts coloured by level, and nothing that controls a terminal."""

import html
import io
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, SIZES, make_engine, random_prompt
from tqdm import tqdm

from triforce import cli, render
from triforce.cli import run
from triforce.cli.interactive import reply
from triforce.engine.output import Generation, Stats
from triforce.render import COLOURS, Bar, Console, consoles, draw, in_notebook, visible

EVIL = "a\x1b]0;title\x07b\x7fc\x9b2Jd\u202ee\u2066f\r\n\tg"
SEEN = "a\u241b]0;title\u2407b\ufffdc\ufffd2Jd\ufffde\ufffdf\u240d\n\tg"


class Drawn:
    """In the place of a bar of tqdm: what it was told."""

    def __init__(self, desc: str, total: int, **_):
        self.what, self.total, self.n, self.closed = desc, total, 0, False

    def update(self, more):
        self.n += more

    def close(self):
        self.closed = True


@pytest.fixture
def notebook(monkeypatch):
    shell = SimpleNamespace(kernel=object(), config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_notebook_shows_bars(pair, notebook, monkeypatch):
    drawn = []
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **how: drawn.append(Drawn(**how)) or drawn[-1])
    engine = make_engine(*pair, **SIZES, max_batch_size=2, prefill_chunk_size=8)
    engine.generate([random_prompt(40), random_prompt(30), random_prompt(60)], 20)
    assert {bar.what for bar in drawn} == {"prefill", "decode"} and all(bar.closed for bar in drawn)
    assert [bar.n for bar in drawn if bar.what == "decode"] == [60]  # of both groups
    drawn.clear()
    list(engine.stream(random_prompt(50, seed=1), 5))
    assert [bar.what for bar in drawn] == ["prefill"]  # what is said shows how far it is
    drawn.clear()
    engine.generate(random_prompt(45), 5, on_decode=lambda count: None)
    assert drawn == []  # the caller has his own


def test_progress_is_of_all_prompts(pair):
    """However many of them run side by side."""
    engine, shares, counts = make_engine(*pair, **SIZES, max_batch_size=2, prefill_chunk_size=8), [], []
    engine.generate([random_prompt(40), random_prompt(30), random_prompt(60)], 20, on_prefill=shares.append,
                    on_decode=counts.append)
    assert counts == sorted(counts) and counts[-1] == 60
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] == 1.0


@pytest.mark.parametrize("shell", [None, SimpleNamespace(config={})])
def test_a_shell_of_ipython_is_no_notebook(monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert not in_notebook()


def test_a_notebook_without_widgets_gets_text(notebook, monkeypatch, capsys, recwarn):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    bar = Bar("prefill", 100)
    for step in range(1, 5):
        time.sleep(0.4)  # a bar is drawn after a second
        bar(step / 5)
    assert "prefill" in (shown := capsys.readouterr().err) and "80%" in shown
    bar.close()
    assert not recwarn.list


def made(pieces, levels=None):
    levels = levels or ["draft"] * len(pieces)
    return Generation("".join(pieces), [*range(len(pieces))], "length", Stats(5, new_tokens=len(pieces), seed=77),
                      levels, pieces)


def spans_of(page: str) -> list[tuple[str, str, str]]:
    """Text, level and style of each coloured part."""
    found = re.findall('<span style="([^"]*)" title="([^"]*)">(.*?)</span>', page, re.S)
    return [(html.unescape(text), level, style) for style, level, text in found]


def test_a_notebook_shows_text_levels_and_statistics():
    page = made(["The", " sea", "\n"], ["draft", "retrieval", "target"])._repr_html_()
    legend, tokens = spans_of(page)[:3], spans_of(page)[3:]
    assert [part[:2] for part in tokens] == [("The", "draft"), (" sea", "retrieval"), ("\n", "target")]
    assert [part[1:] for part in legend] == [part[1:] for part in tokens]
    assert len({style for _, _, style in legend}) == 3 and not re.search(r"(^|;)color:", legend[0][2])
    for name, value in Stats(5, new_tokens=3, seed=77).rows():
        assert f"<td>{html.escape(name)}</td><td>{value}</td>" in page
    assert len(set(COLOURS.values())) == len({ansi for _, ansi in COLOURS.values()}) == len(COLOURS)


def test_whatever_a_model_says_is_escaped():
    for evil in ("<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "&lt;b&gt;"):
        page = made([evil, "x"])._repr_html_()
        assert not set(re.findall(r"<(\w+)", page)) & {"script", "img", "b"} and spans_of(page)[-1][0] == evil + "x"
    out = made(["a\x1b[31m\x00"])
    assert "\x1b" not in out._repr_html_() and "\u241b[31m\u2400" in out._repr_html_()
    out.finish_reason = "<b>"
    assert "<b>" not in out._repr_html_()
    assert "x&lt;y" in Generation("x<y", [5], "length", Stats(1))._repr_html_()  # made by hand


FLAGS = ["--prompt", "one two three four five. " * 9, "--max-new-tokens", "24", "--device", "cpu", "--gamma", "6",
         "--temperature", "0", "--ignore-eos"]


def plain(text: str) -> str:
    return re.sub(r"\033\[\d+m", "", text)


def test_show_levels(command, monkeypatch):
    """Colours on a terminal, and where they are forced; none in a file."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    expected = command(*FLAGS).out
    out, err = command(*FLAGS, "--show-levels")
    assert out == expected and "\033" not in err and "FORCE_COLOR=1" in err and "levels: draft" in err
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, err = command(*FLAGS, "--show-levels")
    parts = re.findall(r"\033\[(\d+)m(.*?)\033\[0m", out, re.S)
    assert "".join(text for _, text in parts) == expected.removesuffix("\n") and plain(out) == expected
    assert {int(code) for code, _ in parts} == {COLOURS[level][1] for level in ("draft", "retrieval", "target")}
    assert re.search(r"levels: draft \d+%", plain(err)) and "\033[" in err
    assert all(len(plain(line)) <= 80 for line in err.splitlines())


def test_each_piece_leaves_the_usual_colour_behind(tiny_engine):
    """A stream may be broken off after any of them."""
    stream = tiny_engine.stream("one two three. " * 9, 30, temperature=0.0, ignore_eos=True)
    parts = [render.as_ansi(stream.spans) for _ in stream]
    assert len(parts) > 3 and all(part.endswith("\033[0m") for part in parts)
    assert plain("".join(parts)) == stream.result.text


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


def test_a_terminal_gets_pictures_and_what_is_drawn_on_purpose(terminals):
    out, err = terminals()
    with consoles():
        print(EVIL, end="")
        draw("\x1b[31mred\x1b[0m", sys.stdout)
        with tqdm(total=3, file=sys.stderr, desc="of a library", mininterval=0) as bar:
            bar.update()
    assert out.getvalue() == SEEN + "\x1b[31mred\x1b[0m" and "\r" in err.getvalue() and "\u240d" not in err.getvalue()
    assert (sys.stdout, sys.stderr) == (out, err)


def test_a_file_gets_what_there_is(capsys):
    with consoles():
        print(EVIL, end="")
        assert not isinstance(sys.stdout, Console)
    assert capsys.readouterr().out == EVIL


@pytest.mark.parametrize("flags", [[], ["--show-levels"], ["--num-samples", "1"], ["--num-samples", "2"]])
def test_no_answer_controls_a_terminal(flags, terminals, monkeypatch):
    engine = run.load("tiny", device="cpu")
    monkeypatch.setattr(run, "load_engine", lambda *given: engine)
    *_, escape = engine.tokenizer.encode("\x1b", bos=False)
    assert engine.tokenizer.decode([escape], continues=True) == "\x1b"
    out, _ = terminals()
    assert cli.main(["--prompt", "Call me", "--max-new-tokens", "4", "--device", "cpu", "--logit-bias",
                     f"{escape}=1000", *flags]) == 0
    assert out.getvalue().count("\u241b") >= 4 and "\x1b" not in plain(out.getvalue())


def test_no_error_and_no_turn_controls_a_terminal(terminals, monkeypatch):
    out, err = terminals()
    assert cli.main(["--checkpoint", "./\x1b[2Jnowhere"]) == 2
    assert "\x1b" not in err.getvalue() and "./\u241b[2Jnowhere" in err.getvalue()
    monkeypatch.setattr(sys, "stdin", Terminal())
    with consoles():
        reply(SimpleNamespace(stream=lambda text, **options: iter([EVIL])), "who?", {})
    assert out.getvalue() == SEEN + "\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("flags", ["--version", "--help"])
def test_a_full_disk_is_told_as_one(flags):
    """Also where what is written at the end does not fit."""
    done = subprocess.run(f"{sys.executable} -m triforce {flags} > /dev/full", shell=True, text=True,
                          capture_output=True, cwd=ROOT,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"})
    assert done.returncode == 2 and done.stderr == (
        "error: the output: No space left on device; mend that, and run the command again\n")
