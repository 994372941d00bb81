"""What the command line makes of its flags, seen by an engine that only notes what it is asked."""

import json
from types import SimpleNamespace

import pytest
from conftest import SIZES, make_engine, random_prompt

from triforce import cli
from triforce.cli import request, run
from triforce.engine.output import Generation, Stats
from triforce.errors import UserError
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little."


class Engine:
    device, target, num_parameters = "cpu", SimpleNamespace(dtype_name="float32", group=None), 10**6
    settings, buffers = SimpleNamespace(coupled=False), SimpleNamespace(budget=lambda length: 1024)

    def __init__(self):
        self.tokenizer, self.asked = Tokenizer(TINY / "target"), []

    def encode_prompt(self, ids):
        return ids

    def room(self, count):
        return 10**6

    def check_len(self, length, count): ...

    def answer(self, ids, options):
        self.asked.append((ids, options))
        return Generation("x", [5], "length", Stats(len(ids), new_tokens=1, tbt=0.01, seed=7))

    def generate(self, ids, **options):
        if isinstance(ids[0], list):
            return [[self.answer(one, {**options, "batch": len(ids)})] for one in ids]
        return self.answer(ids, options)

    def stream(self, ids, **options):
        class Stream(list):
            result = self.answer(ids, options)

            def close(self): ...

        return Stream(["x"])


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setattr(run, "load_engine", lambda *given: made)
    return made


def test_a_prompt_is_cut_behind_and_asked_about(engine):
    ids, question = engine.tokenizer.encode(TEXT), engine.tokenizer.encode("\n\nWho?\n", bos=False)
    for flags, expected in (([], ids), (["--prompt-len", "10"], ids[:10]),
                            (["--prompt-len", "10", "--question", "Who?"], ids[:10] + question)):
        assert cli.main(["--prompt", TEXT, *flags, "--device", "cpu"]) == 0
        assert engine.asked[-1][0] == expected


def test_only_the_document_that_nobody_chose_is_cut_unasked(engine, tmp_path):
    (file := tmp_path / "long.txt").write_text(request.default_document())
    for flags in (["--prompt-file", str(file)], ["--checkpoint", "tiny"]):
        assert cli.main([*flags, "--device", "cpu"]) == 0
    assert len(engine.asked[1][0]) == 16_384 < len(engine.asked[0][0])


def test_how_to_generate(engine):
    flags = ("--max-new-tokens 9 --temperature 0.5 --top-p 0.8 --top-k 5 --min-p 0.1 --seed 3 --no-speculation "
             "--stop a --stop b --stop-token-ids 5 7 --ignore-eos --logit-bias 5=-inf --logit_bias=7=1.5")
    assert cli.main(["--prompt", TEXT, *flags.split()]) == 0
    options = engine.asked[0][1]
    options.pop("on_prefill")
    assert options == {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "seed": 3,
                       "logit_bias": {5: float("-inf"), 7: 1.5},
                       "stop": ["a", "b"], "stop_token_ids": [5, 7], "ignore_eos": True, "speculate": False,
                       "logprobs": None}
    assert cli.main(["--prompt", TEXT]) == 0
    options = engine.asked[1][1]
    assert options["speculate"] and not options["ignore_eos"] and options["stop"] is options["stop_token_ids"] is None
    assert "seed" not in options


def test_answers_to_a_file_of_prompts_do_not_depend_on_its_batches(engine, tmp_path, command):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(f"{i} {TEXT}") for i in range(5)))
    flags = ["--batch-size", "2", "--seed", "10", "--stop", "x", "--no-speculation"]
    lines = command("--prompts", str(file), *flags).out.splitlines()
    assert [options["seed"] for _, options in engine.asked] == [[10, 11], [10, 11], [12, 13], [12, 13], [14]]
    assert [options["batch"] for _, options in engine.asked] == [2, 2, 2, 2, 1]
    assert all(options["stop"] == ["x"] and not options["speculate"] for _, options in engine.asked)
    assert [ids for ids, _ in engine.asked] == [engine.tokenizer.encode(f"{i} {TEXT}") for i in range(5)]
    assert [json.loads(line)["index"] for line in lines] == list(range(5))


@pytest.mark.parametrize("coupled, differs", [(False, False), (True, False), (True, True)])
def test_the_comparison(engine, command, monkeypatch, coupled, differs):
    """Of times, by the same seed and law; then greedy tokens, and where levels share their draws, drawn ones."""
    monkeypatch.setattr(engine, "settings", SimpleNamespace(coupled=coupled))
    answer = engine.answer

    def changed(ids, options):
        result = answer(ids, options)
        result.stats.tbt = 0.02 if options.get("one_row") else 0.01
        if differs and len(engine.asked) > 13 and options["speculate"]:
            result.tokens = [6]
        return result

    monkeypatch.setattr(engine, "answer", changed)
    shown = command("--prompt", TEXT, "--compare", "--json", "--top-k", "5", status=int(differs))
    report = json.loads(shown.out)["compare"]
    assert report["speedup"] == pytest.approx(2) and report["greedy_first_difference"] is None
    assert "2.00x" in shown.err and "greedy check, 1 tokens, speculation on and off: identical" in shown.err
    asked = [options for _, options in engine.asked[1:]]
    assert all(one["max_new_tokens"] == 64 and one["ignore_eos"] for one in asked)
    assert [one.get("one_row", False) for one in asked[:10]] == [False, True] * 5
    assert all((one["seed"], one["top_k"]) == (7, 5) for one in asked[:10] + asked[12:])
    assert [one["speculate"] for one in asked[10:]] == [True, False] * (1 + coupled)
    assert asked[10]["temperature"] == asked[11]["temperature"] == 0
    assert report.get("drawn_first_difference") == (0 if differs else None)
    verdict = "drawn check, 1 tokens, speculation on and off: " + ("DIFF" if differs else "identical")
    assert (verdict in shown.err) == coupled


def test_the_speeds_of_a_comparison():
    """The whole run has what both ways have in common, and then the tokens of each."""
    stats = Stats(100, new_tokens=101, load=2.0, ttft=8.0)
    lines, report = run.speeds({"speculation": [0.2, 0.1, 0.3], "autoregression": [0.4, 0.4, 0.5]}, stats)
    assert report["speedup"] == pytest.approx(2) and report["speedup_of_run"] == pytest.approx(50 / 30)
    assert "200.0 ms a token (100.0 to 300.0); whole run 30.0 s" in lines[0] and "whole run 50.0 s" in lines[1]
    assert "2.00x a token, 1.67x the whole run of 101 tokens" in lines[2] and all(len(line) <= 80 for line in lines)


def test_too_few_tokens_to_compare(pair):
    engine, args = make_engine(*pair, **SIZES), cli.parse(["--max-new-tokens", "1"])
    stats = engine.generate(random_prompt(60), 1, temperature=0.0).stats
    lines, report = run.compare(engine, random_prompt(60), args, {"temperature": 0.0}, stats)
    assert "too few" in lines[0] and "speedup" not in report and report["greedy_first_difference"] is None


def test_how_to_load(monkeypatch, tmp_path):
    asked = []

    def load(checkpoint, **options):
        asked.append({"checkpoint": checkpoint, **options})
        raise UserError("enough")

    monkeypatch.setattr(run, "load", load)
    for look_for in ("resolve", "find_draft"):  # the folders, which are not there
        monkeypatch.setattr(request, look_for, lambda *args: None)
    flags = {"checkpoint": "a", "draft": "b", "device": "cpu", "dtype": "float16", "max_seq_len": 100, "budget": 64,
             "chunk_size": 4, "gamma": 5, "gamma_inner": 3, "block_size": 12, "draft_dtype": "fp8", "weights": "wide",
             "draft_cache": "snapkv", "offload": "auto", "num_resident_layers": 2, "resident_memory": "1GB",
             "draft_ranks": [0], "prefill_chunk_size": 77}
    argv = [word for name, value in flags.items()
            for word in ("--" + name.replace("_", "-"), str(value[0] if isinstance(value, list) else value))]
    assert cli.main(["--prompt", TEXT, *argv, "--num-samples", "4", "--batch-size", "3", "--no-compile"]) == 2
    assert asked[0] == {**flags, "max_batch_size": 3, "compile": False, "group": None}
    assert cli.main(["--prompt", TEXT, "--draft", "none", "--no-retrieval", "--offload", "--budget", "0.1"]) == 2
    assert asked[1]["draft"] is False and asked[1]["retrieval"] is False and asked[1]["offload"] is True
    assert asked[1]["budget"] == 0.1 and "gamma" not in asked[1]
    assert cli.main(["--prompt", TEXT]) == 2  # what is not said is left to `load`
    assert asked[2] == {"checkpoint": "tiny", "group": None, "max_batch_size": 1, "device": None}
    # A single row has wider blocks than each of eight: no more than there are.
    (tmp_path / "lines").write_text('"a"\n' * 9)
    for more, rows in (("--prompts", 8), ("--question a --prompt", 1), ("--question a --num-samples 2 --prompt", 2),
                       ("--batch-size 3 --prompts", 3), ("--prompt b --questions", 8), ("--interactive --prompt", 1)):
        assert cli.main([*more.split(), str(tmp_path / "lines")]) == 2
        assert asked[-1]["max_batch_size"] == rows
