"""What is kept of a prompt that is too long, in a call and on the command line."""

import json
import re
from types import SimpleNamespace

import pytest
from conftest import SIZES, make_engine, random_prompt, slow

import triforce
from triforce import cli
from triforce.cli.run import fitted
from triforce.engine.keep import cut

SHORT = {**SIZES, "max_seq_len": 100}
TEXT = " ".join(f"word{i}" for i in range(400))
FLAGS = ["--prompt", TEXT, "--device", "cpu", "--max-seq-len", "200", "--max-new-tokens", "20", "--gamma", "6",
         "--ignore-eos"]


@pytest.mark.parametrize("keep, room, bos, kept", [
    ("start", 4, None, [0, 1, 2, 3]), ("end", 4, None, [6, 7, 8, 9]), ("both", 4, None, [0, 1, 8, 9]),
    ("both", 5, None, [0, 1, 2, 8, 9]), ("end", 4, 0, [0, 7, 8, 9]), ("end", 4, 5, [6, 7, 8, 9]),
    ("both", 4, 0, [0, 1, 8, 9]), ("end", 1, 0, [9]), ("both", 1, 0, [0]), ("end", 10, 0, list(range(10))),
    ("start", 99, None, list(range(10)))])
def test_parts(keep, room, bos, kept):
    assert cut(list(range(10)), room, keep, bos) == kept


def test_a_character_that_prompt_len_cuts_is_no_dropped_token(capsys):
    """A chat is cut between characters, here of three tokens each."""
    def encode(text, **how):
        return [*str(text).encode()]

    engine = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode), encode_prompt=encode, room=lambda new: 999,
                             check_len=lambda *lengths: None)
    args = SimpleNamespace(max_new_tokens=9, prompt_len=101, chat=True, system=None, keep=None)
    document, _, dropped = fitted(engine, args, SimpleNamespace(is_demo=False, chat={}), 80 * "日", None)
    assert document == 33 * "日" and dropped == 0 and "dropped" not in capsys.readouterr().err


@pytest.mark.parametrize("keep", ["start", "end", "both"])
def test_a_generation_goes_on_from_what_is_kept(pair, keep):
    engine, prompt = make_engine(*pair, **SHORT), random_prompt(150)
    out = engine.generate(prompt, 30, temperature=0.0, keep=keep)
    kept = {"start": prompt[:70], "end": prompt[-70:], "both": prompt[:35] + prompt[-35:]}[keep]
    assert out.tokens == engine.generate(kept, 30, temperature=0.0).tokens and len(out.tokens) == 30
    assert (out.stats.prompt_len, out.stats.dropped_tokens) == (70, 80)
    assert dict(out.stats.rows())["dropped prompt tokens"] == "80"
    whole = engine.generate(prompt[:70], 30, keep=keep)
    assert whole.stats.dropped_tokens == 0 and "dropped prompt tokens" not in dict(whole.stats.rows())


def test_prompts_of_a_batch_are_cut_each_by_itself(pair):
    engine = make_engine(*pair, **SHORT, max_batch_size=2)
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


@pytest.mark.parametrize("chat", [False, True])
def test_the_command_line_keeps_the_question(chat, tmp_path, command, capsys, monkeypatch):
    asked, lengths, template = [], [], tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")

    def stopped(engine, ids, **options):
        asked.append(engine.tokenizer.decode(ids))
        lengths.append(len(ids))
        raise ZeroDivisionError

    monkeypatch.setattr(triforce.Engine, "stream", stopped)
    flags = [*FLAGS, "--question", "Which word is the last?", *(["--chat", "--chat-template", str(template)] * chat)]
    for keep, there in (("start", "word0 "), ("end", "word399"), ("both", "word0 "), ("both", "word399")):
        with pytest.raises(ZeroDivisionError):
            cli.main([*flags, "--keep", keep])
        assert "Which word is the last?" in asked[-1] and there in asked[-1]
        assert not chat or asked[-1].startswith("[user]") and asked[-1].endswith("[end]")
        assert 175 < lengths[-1] <= 180 and "word200" not in asked[-1]
        shown = capsys.readouterr().err
        assert "tokens were dropped" in shown and all(len(line) <= 80 for line in shown.splitlines())
    assert "exceed max_seq_len (200)" in command(*flags, status=2).err


@pytest.mark.parametrize("more", [
    ["--question", "Which word is the last?"], ["--num-samples", "2"], ["--system", "1 2 3 4 5 6"],
    ["--chat", "--questions", "FILE"], *slow([], ["--questions", "FILE"], ["--chat"])])
def test_a_length_that_is_advised_fits(more, tmp_path, command):
    """Beside the longest question, and what a template puts around it. So does what --keep leaves."""
    files = {"FILE": tmp_path / "questions", "TEMPLATE": tmp_path / "chat.jinja"}
    files["FILE"].write_text("Which?\nWhich word comes before word300, and which one after it?\nWho?\n")
    files["TEMPLATE"].write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}")
    more = [*more, *(["--chat-template", "TEMPLATE"] if {"--chat", "--system"} & {*more} else [])]
    flags = [*FLAGS, "--json", *(str(files.get(flag, flag)) for flag in more)]
    [length] = re.findall(r"\(the text: --prompt-len (\d+), or --keep\)", command(*flags, status=2).err)
    command(*flags, "--prompt-len", length)
    command(*flags, "--prompt-len", str(int(length) + 9), status=2)
    shown = command(*flags, "--keep", "end")
    stats = [json.loads(line)["stats"] for line in shown.out.splitlines()]
    assert 175 <= max(one["prompt_len"] for one in stats) <= 180
    assert {one["dropped_tokens"] for one in stats} == {stats[0]["dropped_tokens"]} and stats[0]["dropped_tokens"] > 500
    assert f"note: {stats[0]['dropped_tokens']:,} of the text's" in shown.err and "(--keep end)" in shown.err


def test_where_no_length_of_the_text_would_fit(command):
    told = command(*FLAGS, "--question", "why " * 300, "--num-samples", "1", "--keep", "end", status=2).err
    told = told.splitlines()[-1]
    assert told.startswith("error: --question: ") and "exceed max_seq_len (200); " in told and "--keep" not in told
