"""When a row's text ends and what of it is shown, with a tokenizer whose tokens are what a test says."""

import json

import pytest
from conftest import refused

from triforce.engine.output import Generation, RowOutput, Stats, as_json, stop_strings, totals

EOS = 0


class Spelt:
    """Token i is the i-th string; `rest` is what a stream holds back until it is finished."""

    def __init__(self, *strings: str, rest: str = ""):
        self.strings, self.rest = strings, rest

    def stream(self, continues):
        assert continues
        return self

    def push(self, tokens):
        return "".join(self.strings[i] for i in tokens)

    def finish(self):
        return self.rest


def output(*strings, stop=(), most=100, rest=""):
    return RowOutput(Spelt("", *strings, rest=rest), (EOS,), list(stop), most)


def test_nothing_of_a_stop_string_is_shown():
    row = output("x", "a", "b", "c", stop=["abc", "never"])
    assert [row.push([i]) for i in (1, 2, 3, 2, 3, 4)] == ["x", "", "", "ab", "", ""]
    assert (row.text, row.finish_reason, row.tokens) == ("xab", "stop", [1, 2, 3, 2, 3, 4])
    row = output("xa", "b", "c", stop=["ab"])
    assert row.push([1, 2, 3, EOS]) == "x" and row.tokens == [1, 2]  # in the midst of a block


def test_the_texts_of_tokens_join_to_the_text():
    """Also where the text ends in the midst of a token, or several tokens before the last."""
    for pieces, expected in ((["xa", "b", "cx"], ["x", "", ""]), (["x", "zabc"], ["x", "z"]), (["abc"], [""]),
                             (["a", "bc"], ["", ""]), (["ab", "c"], ["", ""])):
        row = output(*pieces, stop=["abc"])
        shown = "".join(row.push([i + 1]) for i in range(len(pieces)))
        assert row.pieces == expected and shown == "".join(expected) == row.text and row.finish_reason == "stop"
    row = output("a", most=2, rest="?")
    row.push([1, EOS])
    assert row.pieces == ["a", "?"]


def test_the_first_of_several_stop_strings_ends_the_text():
    for stop in (["two", "one"], ["one", "two"]):
        row = output("zero one two", stop=stop)
        assert row.push([1]) == row.text == "zero "


def test_the_end_of_a_row():
    row = output("a", "b", most=3)
    assert row.push([1, 2, 1, 2]) == "aba"
    assert (row.tokens, row.finish_reason) == ([1, 2, 1], "length")
    row = output("a", "b")
    assert row.push([1, EOS, 2, EOS]) == "a"
    assert (row.tokens, row.text, row.finish_reason) == ([1, EOS], "a", "stop")


def test_what_was_held_back_comes_at_the_end():
    for tokens in ([1, EOS], [1, 1]):
        row = output("a", most=2, rest="\ufffd")
        assert row.push(tokens) == row.text == "a" * tokens.count(1) + "\ufffd"
    row = output("a", most=2, rest="!", stop=["a!"])
    assert row.push([1, 1]) == "a" and row.finish_reason == "stop"  # though it is as long as it may be


def test_stop_strings():
    assert stop_strings(None) == [] and stop_strings("end") == ["end"] and stop_strings(("a", "b")) == ["a", "b"]
    for wrong in ("", ["a", ""], 5, [5]):
        refused("none of them empty", stop_strings, wrong)


def test_statistics_are_shown_in_their_units():
    stats = Stats(1000, new_tokens=20, tbt=0.0123, peak_memory=3 * 2**30, acceptance_rate={"full": 0.5})
    rows = dict(stats.rows())
    assert rows["time per token"] == "12.30 ms" and rows["tokens per second"] == "81.3"
    assert rows["peak memory"] == "3.00 GiB" and rows["acceptance at full"] == "0.500"
    assert "dropped prompt tokens" not in rows and rows["seed"] == "0" and Stats(5).tokens_per_second == 0


def test_a_special_token_ends_a_text_as_a_stop_id_does(tiny_engine):
    """Where decoding leaves it out. What mixes one with text would never be found: it is refused."""
    special = "</s>"
    [end] = [i for i in tiny_engine.tokenizer.special_ids if tiny_engine.tokenizer.token_of[i] == special]
    how = {"temperature": 0.0, "ignore_eos": True, "logit_bias": {end: 1000.0}}
    assert tiny_engine.generate("Call me", 5, **how).finish_reason == "length"
    for stop in (special, ["never", special]):
        out = tiny_engine.generate("Call me", 5, stop=stop, **how)
        assert (out.tokens, out.text, out.finish_reason) == ([end], "", "stop")
    for stop in ("Ishmael</s>", "</s>\n"):
        refused("holds the special token '</s>'.* as two stops", tiny_engine.generate, "Call me", 5, stop=stop, **how)


def test_json_holds_no_number_that_json_does_not_know():
    found = as_json({"a": [float("nan"), 1.5, (float("-inf"), 2)], "b": {"c": float("inf"), "d": None}, "e": "NaN"})
    assert json.loads(found, parse_constant=lambda name: pytest.fail(name)) == {
        "a": [None, 1.5, [None, 2]], "b": {"c": None, "d": None}, "e": "NaN"}


def test_several_answers_are_told_as_one_call():
    rows = [Generation("", [5] * count, "length", Stats(9, new_tokens=count, target_forwards=forwards, seed=seed,
                                                        peak_memory=2**30, defaults={"top_k": 20}))
            for count, forwards, seed in ((30, 10, 4), (10, 6, 5))]
    told = dict(line.rsplit(None, 1) for line in totals(rows, 8.0).splitlines() if not line.endswith(("ms", " s", "B")))
    told = {name.strip(): value for name, value in told.items()}
    assert told["tokens per second of all"] == "5.0" and told["tokens per target forward"] == "2.50"
    assert told["new tokens of all"] == "40" and told["answers"] == "2" and told["top_k, checkpoint's"] == "20"
    assert "8.00 s" in totals(rows, 8.0)
