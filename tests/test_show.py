"""A text with its tokens coloured by level, as HTML and for a terminal."""

import re
from html.parser import HTMLParser

from triforce import answers, cli, levels
from triforce.generation import Generation, Stats
from triforce.levels import LEVELS


def made(pieces, levels=None):
    levels = levels or ["draft"] * len(pieces)
    return Generation("".join(pieces), [*range(len(pieces))], "length", Stats(5, new_tokens=len(pieces), seed=77),
                      levels, pieces)


class Page(HTMLParser):
    """Reads a page: the texts of its coloured parts with their tooltips, and the names of its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.spans, self.tags, self.open, self.text = [], set(), None, ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "span":
            about = dict(attributes)
            self.open = ["", about["title"], about["style"]]

    def handle_endtag(self, tag):
        if tag == "span":
            self.spans.append(tuple(self.open))
            self.open = None

    def handle_data(self, data):
        self.text += data
        if self.open is not None:
            self.open[0] += data


def test_a_notebook_shows_text_levels_and_statistics():
    page = Page(made(["The", " sea", "\n"], ["draft", "retrieval", "target"])._repr_html_())
    legend, tokens = page.spans[:3], page.spans[3:]
    assert [text.strip() for text, _, _ in legend] == ["draft", "retrieval", "target"]
    assert [text for text, _, _ in tokens] == ["The", " sea", "\n"]
    assert [title for _, title, _ in tokens] == ["draft", "retrieval", "target"]
    for (_, _, style), (_, _, of_level) in zip(tokens, legend, strict=True):
        assert style == of_level and "rgba" in style and not re.search(r"(^|;)color:", style)
    assert len({style for _, _, style in legend}) == 3
    for name, value in Stats(5, new_tokens=3, seed=77).rows():
        assert name.strip() in page.text and value in page.text


def test_whatever_a_model_says_is_escaped():
    for evil in ("<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "&lt;b&gt;"):
        page = Page(made([evil, "x"])._repr_html_())
        assert not page.tags & {"script", "img", "b"}
        assert page.spans[-1][0] == evil + "x"
    out = made(["a\x1b[31m\x00"])
    assert "\x1b" not in out._repr_html_() and "\u241b[31m\u2400" in out._repr_html_()
    out.finish_reason = "<b>"
    assert "<b>" not in out._repr_html_()


def test_a_generation_made_by_hand_is_shown():
    assert "x&lt;y" in Generation("x<y", [5], "length", Stats(1))._repr_html_()


def test_every_level_has_its_colours():
    assert set(levels.RGB) == set(levels.ANSI) == set(LEVELS)
    assert len(set(levels.RGB.values())) == len(set(levels.ANSI.values())) == len(LEVELS)


FLAGS = ["--prompt", "one two three four five. " * 9, "--max-new-tokens", "40", "--device", "cpu", "--gamma", "6",
         "--temperature", "0", "--ignore-eos", "--no-compare"]


def plain(text: str) -> str:
    return re.sub(r"\033\[\d+m", "", text)


def test_a_terminal_shows_levels(capsys, monkeypatch):
    assert cli.main(FLAGS) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(answers, "wants_colours", lambda file: True)
    assert cli.main([*FLAGS, "--show-levels"]) == 0
    shown = capsys.readouterr()
    assert plain(shown.out) == expected
    spans = re.findall(r"\033\[(\d+)m(.*?)\033\[0m", shown.out, re.S)
    assert "".join(text for _, text in spans) == expected.removesuffix("\n")
    assert {int(code) for code, _ in spans} == {levels.ANSI[level] for level in ("draft", "retrieval", "target")}
    assert re.search(r"levels: draft \d+%", plain(shown.err))
    assert "\033[" in shown.err and all(len(plain(line)) <= 80 for line in shown.err.splitlines())


def test_a_file_gets_no_codes_unless_they_are_forced(capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert cli.main([*FLAGS, "--show-levels"]) == 0
    shown = capsys.readouterr()
    assert "\033" not in shown.out + shown.err and "FORCE_COLOR=1" in shown.err and "levels: draft" in shown.err
    assert all(len(line) <= 80 for line in shown.err.splitlines())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert cli.main([*FLAGS, "--show-levels"]) == 0
    assert plain(forced := capsys.readouterr().out) == shown.out != forced


def test_each_piece_leaves_the_usual_colour_behind(tiny_engine):
    """A stream may be broken off after any of them."""
    stream = tiny_engine.stream("one two three. " * 9, 30, temperature=0.0, ignore_eos=True)
    parts = [levels.as_ansi(stream.spans) for _ in stream]
    assert len(parts) > 3 and all(part.endswith("\033[0m") for part in parts)
    assert plain("".join(parts)) == stream.result.text
