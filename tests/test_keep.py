"""What is kept of a prompt that is too long, in a call and on the command line."""

import json
import re

import pytest
from conftest import make_engine, random_prompt

import triforce
from triforce import answers, cli
from triforce.about import JOINTS
from triforce.hf.tokenizer import Tokenizer
from triforce.keep import Document, cut, fit

SIZES = {"flush_interval": 16, "chunk_size": 4, "budget": 64, "max_seq_len": 100}
TEXT = " ".join(f"word{i}" for i in range(400))
FLAGS = ["--prompt", TEXT, "--device", "cpu", "--max-seq-len", "200", "--max-new-tokens", "20", "--gamma", "6",
         "--ignore-eos", "--no-compare"]


@pytest.mark.parametrize("keep, room, bos, kept", [
    ("start", 4, None, [0, 1, 2, 3]), ("end", 4, None, [6, 7, 8, 9]), ("both", 4, None, [0, 1, 8, 9]),
    ("both", 5, None, [0, 1, 2, 8, 9]), ("end", 4, 0, [0, 7, 8, 9]), ("end", 4, 5, [6, 7, 8, 9]),
    ("both", 4, 0, [0, 1, 8, 9]), ("end", 1, 0, [9]), ("both", 1, 0, [0]), ("end", 10, 0, list(range(10))),
    ("start", 99, None, list(range(10)))])
def test_parts(keep, room, bos, kept):
    assert cut(list(range(10)), room, keep, bos) == kept


def test_only_the_document_is_cut():
    def fitted(finish, room, keep):
        return fit(Document("", list(range(10)), None), lambda document: finish(document.ids), room, keep)

    assert fitted(lambda ids: ids + [77, 78], 6, "start") == ([0, 1, 2, 3, 77, 78], 6)
    assert fitted(lambda ids: [55, *ids], 6, "both") == ([55, 0, 1, 2, 8, 9], 5)
    assert fitted(lambda ids: ids + [77], 11, "end") == ([*range(10), 77], 0)
    assert fitted(lambda ids: ids + [77] * 9, 6, "end") == ([*range(10)] + [77] * 9, 0)  # nothing would be left
    twice = fitted(lambda ids: ids + [77] * (1 + (len(ids) < 7)), 7, "end")  # what is added varies
    assert twice == ([5, 6, 7, 8, 9, 77, 77], 5)


ODD_TEXT = "  <s>Hello</s>  na\u00efve \U0001f600\U0001f600\u00a0\n\n Abc\u0301 <unk> x"


def test_a_text_is_cut_where_its_tokens_end(tiny_engine):
    """And between characters, of which a token may be a part. What is left is spelled as it was."""
    tokenizer = tiny_engine.tokenizer
    ids = tokenizer.encode(ODD_TEXT)
    document, seen = Document(ODD_TEXT, ids, tokenizer.offsets), set()
    assert document.cut(len(ids), "end") is document and document.text == ODD_TEXT
    for room in range(1, len(ids)):
        start, end, both = (document.cut(room, keep) for keep in ("start", "end", "both"))
        assert [one.ids for one in (start, end, both)] == [cut(ids, room, keep) for keep in ("start", "end", "both")]
        assert ODD_TEXT.startswith(start.text) and ODD_TEXT.endswith(end.text)
        assert start.text + document.cut(len(ids) - room, "end").text == ODD_TEXT
        assert both.text == document.cut(room - room // 2, "start").text + document.cut(room // 2, "end").text
        assert document.cut(room, "start").cut(max(room - 2, 1), "end").text == start.text[
            len(document.cut(room - max(room - 2, 1), "start").text) :]
        assert len(tokenizer.encode(start.text)) <= room  # no character more
        seen.add(start.text)
    assert len(seen) > 20


@pytest.mark.parametrize("flags", [[], ["--questions", "FILE"], ["--num-samples", "1", "--question", "Who?"]], ids=str)
def test_a_chat_has_the_text_as_it_is(flags, tmp_path, monkeypatch):
    """Also what is spelled as a special token is; with --prompt-len and --keep, a part of it."""
    questions, template, seen = tmp_path / "questions", tmp_path / "chat.jinja", []
    questions.write_text("Who?\n")
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")

    def rendered(self, messages, *args):
        seen.append(messages[0]["content"])
        return apply(self, messages, *args)

    apply = Tokenizer.apply_chat_template
    monkeypatch.setattr(Tokenizer, "apply_chat_template", rendered)
    text = f"{ODD_TEXT} {TEXT} {ODD_TEXT}"
    flags = ["--prompt", text, "--chat", "--chat-template", str(template), "--device", "cpu", "--max-new-tokens", "2",
             "--no-compare", *(str(questions) if flag == "FILE" else flag for flag in flags)]
    assert cli.main(flags) == 0
    assert seen and all(one.startswith(text) for one in seen if len(one) > 100) and max(map(len, seen)) >= len(text)
    for more, begin, end in ((["--prompt-len", "60"], ODD_TEXT, None), (["--keep", "end", "--max-seq-len", "150"], None,
                                                                        ODD_TEXT)):
        seen.clear()
        assert cli.main([*flags, *more]) == 0
        content = max((one for one in seen if len(one) < len(text)), key=len).removesuffix("\n\nWho?")
        content = content.removesuffix("\n\na?").removesuffix("\n\nThe b.")
        assert begin is None or content.startswith(begin) and text.startswith(content)
        assert end is None or content.endswith(end) and text.endswith(content)
        assert "\ufffd" not in content and 100 < len(content)


@pytest.mark.parametrize("keep", ["start", "end", "both"])
def test_a_generation_goes_on_from_what_is_kept(pair, keep):
    engine, prompt = make_engine(*pair, **SIZES), random_prompt(150)
    out = engine.generate(prompt, 30, temperature=0.0, keep=keep)
    kept = {"start": prompt[:70], "end": prompt[-70:], "both": prompt[:35] + prompt[-35:]}[keep]
    assert out.tokens == engine.generate(kept, 30, temperature=0.0).tokens and len(out.tokens) == 30
    assert (out.stats.prompt_len, out.stats.dropped_tokens) == (70, 80)
    assert dict(out.stats.rows())["dropped prompt tokens"] == "80"
    whole = engine.generate(prompt[:70], 30, keep=keep)
    assert whole.stats.dropped_tokens == 0 and "dropped prompt tokens" not in dict(whole.stats.rows())


def test_prompts_of_a_batch_are_cut_each_by_itself(pair):
    engine = make_engine(*pair, **SIZES, max_batch_size=2)
    outs = engine.generate([random_prompt(length) for length in (40, 120, 90, 10, 101)], 10, keep="end")
    assert [out.stats.dropped_tokens for out in outs] == [0, 30, 0, 0, 11]
    assert [out.stats.prompt_len for out in outs] == [40, 90, 90, 10, 90]


def test_the_bos_of_a_text_stays(tiny_engine, monkeypatch):
    ids, asked = tiny_engine.tokenizer.encode(TEXT * 5), []
    assert ids[0] == tiny_engine.tokenizer.bos_id
    monkeypatch.setattr(tiny_engine, "prepare", lambda prompts, *args, **more: asked.extend(prompts) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny_engine.generate(TEXT * 5, 96, keep="end")
    assert asked == [[ids[0], *ids[-3999:]]]


@pytest.mark.parametrize("options, text", [
    ({}, "cut the prompt by 80 tokens to 70"), ({"keep": "middle"}, "keep ('middle') must be one of start, end, both"),
    ({"keep": "end", "max_new_tokens": 100}, "exceed max_seq_len (100)")])
def test_what_cannot_be_kept(pair, options, text):
    with pytest.raises(triforce.UserError) as error:
        make_engine(*pair, **SIZES).generate(random_prompt(150), **{"max_new_tokens": 30, **options})
    assert text in str(error.value)


@pytest.mark.parametrize("chat", [False, True])
def test_the_command_line_keeps_the_question(chat, tmp_path, capsys, monkeypatch):
    asked, lengths, template = [], [], tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")

    def stopped(engine, ids, *args):
        asked.append(engine.tokenizer.decode(ids))
        lengths.append(len(ids))
        raise ZeroDivisionError

    monkeypatch.setattr(answers, "stream_text", stopped)
    flags = [*FLAGS, "--question", "Which word is the last?", *(["--chat", "--chat-template", str(template)] * chat)]
    for keep, there in (("start", "word0 "), ("end", "word399"), ("both", "word0 "), ("both", "word399")):
        with pytest.raises(ZeroDivisionError):
            cli.main([*flags, "--keep", keep])
        assert "Which word is the last?" in asked[-1] and there in asked[-1]
        assert not chat or asked[-1].startswith("[user]") and asked[-1].endswith("[end]")
        assert 175 < lengths[-1] <= 180 and "word200" not in asked[-1]
        shown = capsys.readouterr().err
        assert "tokens were dropped" in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert cli.main(flags) == 2 and "exceed max_seq_len (200)" in capsys.readouterr().err


@pytest.mark.parametrize("chat", [False, True])
def test_a_document_of_several_questions_is_cut(chat, tmp_path, capsys):
    """Beside the longest of them, which are answered whole."""
    questions, template = tmp_path / "questions", tmp_path / "chat.jinja"
    questions.write_text("Which word is the last?\nWhich word comes before word300, and which one after it?\n")
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")
    flags = [*FLAGS, "--questions", str(questions), *(["--chat", "--chat-template", str(template)] * chat)]
    assert cli.main(flags) == 2 and "exceed max_seq_len (200)" in capsys.readouterr().err
    assert cli.main([*flags, "--keep", "end", "--json"]) == 0
    shown = capsys.readouterr()
    stats = [json.loads(line)["stats"] for line in shown.out.splitlines()]
    room = 180 - JOINTS * chat
    assert room - 3 <= max(one["prompt_len"] for one in stats) <= 180 and len({one["prompt_len"] for one in stats}) == 2
    assert {one["dropped_tokens"] for one in stats} == {stats[0]["dropped_tokens"]} and stats[0]["dropped_tokens"] > 500
    assert f"note: {stats[0]['dropped_tokens']:,} of the text's" in shown.err


@pytest.mark.parametrize("more", [
    [], ["--question", "Which word is the last?"], ["--question", "Which?", "--num-samples", "2"],
    ["--num-samples", "2"], ["--questions", "FILE"], ["--chat"], ["--system", "1 2 3 4 5 6", "--num-samples", "2"],
    ["--system", "1 2 3 4 5 6"], ["--chat", "--questions", "FILE"]])
def test_a_length_that_is_advised_fits(more, tmp_path, capsys):
    """Beside what is asked, and what a template puts around it. So does what --keep leaves."""
    files = {"FILE": tmp_path / "questions", "TEMPLATE": tmp_path / "chat.jinja"}
    files["FILE"].write_text("Which?\nWhich word comes before word300, and which one after it?\nWho?\n")
    files["TEMPLATE"].write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")
    more = [*more, *(["--chat-template", "TEMPLATE"] if {"--chat", "--system"} & {*more} else [])]
    flags = [*FLAGS, *(str(files.get(flag, flag)) for flag in more)]
    assert cli.main(flags) == 2
    told = " ".join(capsys.readouterr().err.split())
    [length] = re.findall(r"with --prompt-len (\d+), or with --keep start, end or both", told)
    assert cli.main([*flags, "--prompt-len", length]) == 0
    assert cli.main([*flags, "--prompt-len", str(int(length) + 9)]) == 2
    assert cli.main([*flags, "--keep", "end"]) == 0


@pytest.mark.parametrize("flags, told", [
    (["--max-new-tokens", "250"], "exceed max_seq_len (200); cut the text below 200 tokens and ask for fewer new ones"),
    (["--question", "why " * 300], "shorten what is asked, which takes 3.. tokens beside the text$"),
    (["--question", "why " * 300, "--num-samples", "1"], "^error: --question: .* shorten what is asked, which takes 3"),
    (["--question", "why " * 300, "--num-samples", "1", "--keep", "end"], "^error: --question: .* shorten what is "),
    (["--question", "why " * 300, "--max-new-tokens", "250"], "beside the text and ask for fewer new ones$")])
def test_where_no_length_of_the_text_would_fit(flags, told, capsys):
    assert cli.main([*FLAGS, *flags]) == 2
    error = " ".join(capsys.readouterr().err.split("error: ")[-1].split())
    assert re.search(told.replace("(200)", r"\(200\)"), f"error: {error}"), error


def test_the_command_line_says_how_much_was_dropped(capsys, tmp_path):
    assert cli.main([*FLAGS, "--keep", "both", "--json", "--compare"]) == 0
    shown = capsys.readouterr()
    stats = json.loads(shown.out)["stats"]
    assert stats["prompt_len"] == 180 and stats["dropped_tokens"] > 500
    assert f"note: {stats['dropped_tokens']:,} of the text's" in shown.err and "(--keep both)" in " ".join(
        shown.err.split())
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(TEXT) + '\n"short"\n')
    assert cli.main(["--prompts", str(file), *FLAGS[2:], "--keep", "end"]) == 0
    lines = [json.loads(line)["stats"] for line in capsys.readouterr().out.splitlines()]
    assert [line["dropped_tokens"] > 500 for line in lines] == [True, False] and lines[0]["prompt_len"] == 180
