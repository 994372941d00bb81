"""`triforce plan` and `triforce check`: what they say is what happens, and a fault is found where it is."""

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_engine, random_prompt, slow

import triforce
from triforce import acceptance, cli, memory, request
from triforce.config import Placement, Sampling, Settings
from triforce.errors import UserError
from triforce.graphs import SPARE
from triforce.hf.checkpoint import open_tensors, read_config
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer
from triforce.kit import agreement, check, report, trials, ways
from triforce.plan import Plan

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import published  # noqa: E402

CPU = torch.device("cpu")

LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}


@pytest.fixture
def llama_8b(tmp_path):
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def planned(capsys, *argv) -> tuple[int, dict]:
    status = cli.main(["plan", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("flags,options", [
    (["--offload", "--num-resident-layers", "3"], {"offload": True, "num_resident_layers": 3}), *slow(
        ([], {}), (["--no-retrieval", "--draft-cache", "full"], {"retrieval": False, "draft_cache": "full"}))])
def test_the_plan_is_what_is_allocated(flags, options, capsys):
    status, told = planned(capsys, "--device", "cpu", "--prompt-len", "2500", "--max-new-tokens", "40", *flags)
    [way] = told["ways"]
    assert status == 0 and told["fits"]
    engine = triforce.load("tiny", device="cpu", max_batch_size=8, **options)
    engine.prepare([list(range(5, 255)) * 10], 40)
    of_caches = {"tail", "chunk keys", "retrieval view", "draft cache"}
    parts = sum(size for name, size in way["parts"].items() if name.startswith("KV cache") or name in of_caches)
    assert parts == engine.caches.state.nbytes
    numbers = sum(tensor.numel() for tensor in open_tensors(TINY / "target" / "model.safetensors").values())
    assert way["parts"]["target weights"] == 4 * numbers
    assert way["resident_layers"] == options.get("num_resident_layers", 8)


@pytest.mark.parametrize("flags", [["--num-samples", "3"], ["--questions", "FILE", "--question", "Why?"]])
def test_a_plan_for_one_document_is_what_is_allocated(flags, tmp_path, capsys):
    """The document once, and behind it rows with a question and an answer each."""
    (tmp_path / "questions.txt").write_text("Who?\nWhat?\n")
    flags = [str(tmp_path / "questions.txt") if flag == "FILE" else flag for flag in flags]
    status, told = planned(capsys, "--device", "cpu", "--prompt-len", "2500", "--max-new-tokens", "40", *flags)
    [way] = told["ways"]
    assert status == 0 and told["shares"] and told["rows"] == way["rows"] == 3 and told["rows_that_fit"] >= 3
    engine, ids = triforce.load("tiny", device="cpu", max_batch_size=8), list(range(5, 255)) * 10
    book = engine.prefill(ids)
    engine.generate([random_prompt(ways.QUESTION, seed=row, vocab_size=2000) for row in range(3)], 40, prefix=book)
    parts, alone = dict(way["parts"]), planned(capsys, "--device", "cpu", "--prompt-len", "2500")[1]["ways"][0]["parts"]
    assert parts["prefill activations"] > 0.9 * alone["prefill activations"]  # of the document
    document = parts.pop("KV cache of the shared prefix") + parts.pop("its chunk keys")
    assert document == book.nbytes
    of_caches = {"tail", "chunk keys", "retrieval view", "draft cache"}
    rows = sum(size for name, size in parts.items() if name.startswith("KV cache") or name in of_caches)
    assert rows == engine.caches.state.nbytes
    assert planned(capsys, *shlex.split(told["command"])[1:], "--device", "cpu")[1]["rows"] == 3


def test_a_plan_says_how_many_rows_fit(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "122880", "--memory"]
    _, told = planned(capsys, *flags, "36GiB", "--num-samples", "32", "--host-memory", "1GiB")
    fit, chosen = told["rows_that_fit"], told["ways"][told["chosen"]]
    assert chosen["rows"] == fit and 1 < fit < 32 and chosen["left"] >= SPARE and chosen["budget"] == 512
    _, larger = planned(capsys, *flags, "36GiB", "--num-samples", "32", "--host-memory", "1GiB", "--budget", "1024")
    assert larger["rows_that_fit"] < fit
    for count in (fit, fit + 1):
        _, other = planned(capsys, *flags, "36GiB", "--num-samples", str(count), "--host-memory", "1GiB")
        assert other["ways"][other["chosen"]]["rows"] == other["rows_that_fit"] == fit
    assert cli.main(["plan", *flags, "36GiB", "--num-samples", "32", "--host-memory", "1GiB"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"{fit} of 32 answers run side by side" in page and f"; {fit} would fit." in page
    assert planned(capsys, *flags, "80GiB", "--num-samples", "4")[1]["rows_that_fit"] == 32
    _, told = planned(capsys, *flags, "80GiB", "--num-samples", "1")
    assert not told["shares"] and told["rows_that_fit"] is None
    # A short document is not shared by more rows than are wanted side by side anyway.
    status, told = planned(capsys, *flags[:2], "--prompt-len", "100", "--memory", "80GiB", "--num-samples", "40",
                           "--batch-size", "4")
    assert status == 0 and not told["shares"] and told["rows"] == 4
    program, *argv = shlex.split(told["command"])
    args = cli.parse(argv)
    assert (args.num_samples, args.batch_size, args.prompt_file, args.prompts) == (40, 4, "book.txt", None)


def test_an_8b_on_24_gib_keeps_the_layers_that_fit(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "100000", "--memory", "24GiB", "--host-memory", "64GiB"]
    status, told = planned(capsys, *flags)
    chosen = told["ways"][told["chosen"]]
    assert status == 0 and chosen["offload"] == "auto" and 0 < chosen["resident_layers"] < 32
    layer = chosen["host_bytes"] // (32 - chosen["resident_layers"])
    assert layer == 2 * 8 * 128 * 2 * 100352 and chosen["bytes"] <= 24 * 2**30
    kept = chosen["bytes"] - chosen["parts"]["CUDA itself, about"] - chosen["parts"]["target weights"] + layer
    free = 24 * 2**30 - chosen["parts"]["CUDA itself, about"] - chosen["parts"]["target weights"]
    # One layer more would not leave what is to be left (with views as they are before any is cut).
    assert kept + layer / 2 > min(0.95 * free, free - SPARE)
    program, *argv = shlex.split(told["command"])
    args = cli.parse(argv)
    assert program == "triforce" and args.offload == "auto" and args.prompt_len == 100_000
    assert told["drafts"] == ["meta-llama/Llama-3.2-1B"]
    assert cli.main(["plan", *flags]) == 0
    page = capsys.readouterr().out
    assert "| 6 of 32 |" in " ".join(page.split()) and "--offload auto" in page
    assert all(len(line) <= 80 for line in page.splitlines() if llama_8b not in line)
    status, told = planned(capsys, *flags, "--gpus", "2", "--batch-size", "1")
    assert told["ways"][told["chosen"]]["ranks"] == 2
    *start, _, _ = words = shlex.split(told["command"])
    assert start[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "triforce"]
    assert cli.parse(words[5:]).prompts == "prompts.jsonl"


def test_where_nothing_fits_both_numbers_stand(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 8}))
    flags = ["--checkpoint", str(tmp_path), "--prompt-len", "40000", "--prefill-chunk-size", "2048",
             "--chunk-size", "32", "--memory"]
    assert cli.main(["plan", *flags, "4GiB"]) == 1
    page = capsys.readouterr().out.replace("\n", " ")
    assert "**Nothing fits.**" in page and "GiB of one GPU, and 4.00 GiB are there" in page
    assert "No prompt of 1,024 tokens fits" in page
    needed = planned(capsys, *flags, "80GiB")[1]["ways"][0]["bytes"]
    flags += [str(needed - 2**26), "--host-memory", "0.1GiB"]
    status, told = planned(capsys, *flags)
    longest = told["longest_prompt"]
    assert status == 1 and told["command"] is None and 1024 <= longest < 40_000
    assert planned(capsys, *flags, "--prompt-len", str(longest))[0] == 0
    assert planned(capsys, *flags, "--prompt-len", str(longest + 1024))[0] == 1
    assert cli.main(["plan", *flags]) == 1
    assert "of the host, and 0.10 GiB are there" in capsys.readouterr().out.replace("\n", " ")


def test_settings_that_save_memory_are_tried_before_the_host(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "60000", "--memory"]
    usual = planned(capsys, *flags, "80GiB")[1]["ways"][0]
    size = str(usual["bytes"] - 2**20)
    _, told = planned(capsys, *flags, size)
    assert told["chosen"] == 0 and "--prefill-chunk-size 2048" in told["command"]
    _, told = planned(capsys, *flags, size, "--prefill-chunk-size", "8192", "--chunk-size", "16")
    assert told["ways"][told["chosen"]]["flags"] == []  # the user's own chunks save enough, and nothing overrides them


def test_what_this_machine_has_is_the_default(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    status, told = planned(capsys, "--device", "cpu", "--prompt-len", "2000")
    assert status == 1 and told["memory"] == 2**20 and told["is_here"]


@pytest.mark.parametrize("argv,text", [
    (["plan", "--memory", "2q"], "--memory ('2q') must be a number of bytes or a size such as '20GiB'"),
    (["plan", "--memory", "2GiB", "--device", "tpu"], "device 'tpu' is unknown; use 'cpu', 'cuda' or 'cuda:1'"),
    (["plan", "--gpus", "0"], "--gpus (0) must be a whole number, at least 1"),
    (["plan", "--device", "cpu", "--gpus", "3"], "--gpus (3) is more than the 1"),
    (["plan", "--save-every", "0"], "--save-every (0) must be a whole number, at least 1"),
    (["plan", "--prompt-len", "0"], "--prompt-len (0) must be a whole number, at least 1"),
    (["plan", "--prompt-len", "200000"], "a prompt of 200000 tokens and 256 new ones exceed the 131072"),
    (["plan", "--memroy", "2GiB"], "--memroy is not a known flag"),
    (["plan", "--checkpoint", "/no/such"], "no such folder"), (["plan", "--gamma", "99"], "gamma (99) must be"),
    (["plan", "--num-resident-layers", "3"], "add offload=True (--offload)"),
])
def test_mistakes_get_one_line(argv, text, capsys):
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""


@pytest.mark.parametrize("setup", published.SETUPS, ids=lambda setup: setup.name)
def test_the_papers_set_ups_are_commands(setup):
    args = cli.parse(setup.command(argparse.Namespace(stand_in=None, prompt_len=None)))
    settings, placement = (one(**request.given(args, one)) for one in (Settings, Placement))
    resolved = settings.resolve("cuda", has_model=setup.draft is not None, offload=placement.offload,
                                max_batch_size=setup.rows)
    assert args.checkpoint == setup.target and args.prompt_len == setup.prompt_len
    assert resolved.view_tokens(setup.prompt_len, placement.offload) <= 12288


def test_a_set_up_runs_with_and_without_speculation(tmp_path, monkeypatch):
    """What does the work is a process of generate.py, which other tests start."""
    asked = []

    def generate(setup, flags):
        args = cli.parse(flags)
        asked.append((args.no_speculation, len(request.read_prompts(args.prompts))))
        return {"tbt": 0.4 if args.no_speculation else 0.1, "prefill": 1.0, "acceptance_rate": {"full": 0.5},
                "block_efficiency": 2.0}

    monkeypatch.setattr(published, "_generate", generate)
    file = tmp_path / "book.txt"
    file.write_text(request.default_document()[:8000])
    args = argparse.Namespace(stand_in="tiny", prompt_len=400, text=str(file), new=4)
    [setup] = [setup for setup in published.SETUPS if setup.name == "self-8b"]
    assert published.obstacle(setup, args) is None
    row = published.run(setup, args, tmp_path)
    assert asked == [(False, 8), (True, 8)] and row["speedup"] == 4 and row["off_ms"] == 50

    def absent(name):
        raise UserError("absent")

    monkeypatch.setattr(published, "resolve", absent)
    args.stand_in = None
    assert published.obstacle(setup, args) == f"not here: triforce download --repo-id {setup.target}"


# -- check -------------------------------------------------------------------------------------------------------------

def checked(capsys, tmp_path, *argv) -> tuple[int, dict, str]:
    file = tmp_path / "check.json"
    status = cli.main(["check", "--device", "cpu", *argv, "--out", str(file)])
    shown = capsys.readouterr()
    assert file.exists(), shown.err
    return status, json.loads(file.read_text()), shown.out


@pytest.fixture
def brief(monkeypatch):
    """Fewer tokens to compare."""
    for module, name, count in ((agreement, "TOKENS", 256), (trials, "GREEDY", 16)):
        monkeypatch.setattr(module, name, count)


def test_the_embedded_pair_passes_every_check(brief, capsys, tmp_path):
    status, told, page = checked(capsys, tmp_path, "--lengths", "200", "700", "--far", "600", "--new", "12")
    records = {record["name"]: record for record in told["records"]}
    assert status == 0 and told["passed"] and told["failed"] == []
    ways = ["draft + view", "draft model", "retrieval view", "n-grams"]
    assert records.keys() == {
        "machine", "checkpoint", "draft", "text", "load", "logits, first text", "logits, far end", "memory", "advice",
        "on, 200", "off, 200", "on, 700", "off, 700", "run, first", "run, second", *(f"greedy, {way}" for way in ways),
        "step, verify", "step, autoregression", "step, view", "step, draft",
        *(f"acceptance, {way}, T {t}" for way in [*ways, "streaming view", "snapkv view"] for t in ("0", "0.6"))}
    assert {name for name, record in records.items() if record["passed"]} == {
        "logits, first text", "logits, far end", "memory", *(f"greedy, {way}" for way in ways)}
    assert records["logits, far end"]["tokens"] == 600 and records["logits, far end"]["positions"] == 64
    for name in ("logits, first text", "logits, far end"):
        assert 0 < records[name]["mean_difference"] < records[name]["max_difference"] < records[name]["max_allowed"]
    for way in ways:
        assert records[f"greedy, {way}"]["drafted"] > 0, way
    trial = records["acceptance, retrieval view, T 0.6"]
    assert sum(trial["kept"]) / sum(trial["drafted"]) == pytest.approx(trial["acceptance"]["full"])
    assert trial["drafted"] == sorted(trial["drafted"], reverse=True) and len(trial["drafted"]) == 7
    about = records["checkpoint"]
    cache = 2 * about["layers"] * about["kv_heads"] * about["head_dim"] * 700
    assert records["step, verify"]["bytes"] == 4 * (about["parameters"] + cache)  # its embedding is the output layer's
    assert records["step, verify"]["bytes"] >= records["step, view"]["bytes"] > records["step, draft"]["bytes"] > 0
    assert records["on, 200"]["prefill"] > 0 and records["run, first"]["milliseconds_a_token"] > 0
    assert "a view holds the whole prompt of 700 tokens" in " ".join(page.split())  # 1,024 is the least by default
    loops = [record["repeats"] > report.LOOPS for record in records.values() if "repeats" in record]
    assert ("texts repeat themselves" in page) is any(loops) and len(loops) == 12
    assert "**All 7 checks passed.**" in page and "| retrieval view | 0 |" in " ".join(page.split())
    assert all(len(line) <= 80 for line in page.splitlines() if not line.startswith("#"))


@pytest.mark.slow
def test_weights_in_fp8_are_not_set_beside_wider_ones(brief, capsys, tmp_path):
    """All else is checked, and a step reads a byte a weight."""
    status, told, _ = checked(capsys, tmp_path, "--lengths", "300", "--new", "8", "--quick", "--weights", "fp8")
    records = {record["name"]: record for record in told["records"]}
    assert status == 0 and "weights are in fp8" in records["logits"]["skipped"] and records["memory"]["passed"]
    assert records["greedy, retrieval view"]["passed"]
    config = read_config(TINY / "target", weights="fp8")
    cache = 300 * config.kv_elements_per_token * 4
    held = memory.weight_parts(config, None, torch.float32)[0].bytes
    assert records["step, autoregression"]["bytes"] == pytest.approx(held + cache, abs=4 * 4 * config.n_layer)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small random model as transformers saves it; the same with a damaged layer; the same with a damaged word."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096))
    ids = first_ids(300)
    word = next(i for i in range(40, 300) if ids[i] not in ids[:i])
    damages = {"good": lambda: None, "layer": lambda: model.model.layers[1].mlp.down_proj.weight[5].add_(0.5),
               "word": lambda: model.model.embed_tokens.weight[ids[word]].add_(0.5)}
    with torch.no_grad():
        for name, damage in damages.items():
            kept = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            damage()
            model.save_pretrained(made / name)
            for file in ("tokenizer.model", "tokenizer_config.json"):
                if (TINY / "target" / file).exists():
                    shutil.copy(TINY / "target" / file, made / name)
            model.load_state_dict(kept)
    return made, word


def first_ids(count: int) -> list[int]:
    return Tokenizer(TINY / "target").encode(request.default_document()[: 16 * count])[:count]


def test_a_damaged_layer_is_named(folders, brief, capsys, tmp_path):
    made, _ = folders
    status, told, page = checked(capsys, tmp_path, "--checkpoint", str(made / "layer"), "--reference",
                                 str(made / "good"), "--lengths", "200", "--quick", "--new", "8")
    [logits] = [record for record in told["records"] if record["name"] == "logits, first text"]
    assert status == 1 and told["failed"] == ["logits, first text"]
    assert logits["layer"] == 1 and logits["position"] == 0 and logits["max_difference"] > logits["max_allowed"]
    assert "part first behind layer 1, at position 0" in " ".join(page.split()) and "FAILED" in page
    assert "model.layers.1.*" in page


def test_the_position_where_logits_part(folders):
    made, word = folders
    engine = triforce.load(made / "word", device="cpu")
    ids = first_ids(300)
    for keeps, where in ((True, (0, word)), (False, (None, word))):
        text = agreement.Text("first text", ids, 300, keeps)
        agreement.of_transformers(made / "good", [text], ids, engine.target.config, torch.float32, CPU, 0)
        told = agreement.compare(engine, text)
        assert (told["layer"], told["position"]) == where and not told["passed"]
    text = agreement.Text("first text", ids, 300, True)
    agreement.of_transformers(made / "word", [text], ids, engine.target.config, torch.float32, CPU, 0)
    assert agreement.compare(engine, text)["passed"]


def test_inexact_output_and_unplanned_memory_are_failures(brief, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "is_accepted", lambda draft_prob, target_prob, u: draft_prob >= 0)
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, told, page = checked(capsys, tmp_path, "--lengths", "300", "--quick", "--new", "32")
    assert status == 1 and {"greedy, draft model", "greedy, n-grams"} <= set(told["failed"])
    assert "memory" not in told["failed"] and "pip install transformers" in page
    [record] = [record for record in told["records"] if record["name"] == "greedy, draft model"]
    assert record["first_difference"] is not None and "DIFFERENT from token" in page and "please report" in page
    engine = triforce.load("tiny", device="cpu")
    engine.prepare([first_ids(300)], 96)
    args = cli.parse(["--device", "cpu", "--max-new-tokens", "96"])
    for length, holds in ((300, True), (1500, False)):
        assert check.memory_of(engine, check._job(args, length), CPU, 0)["passed"] is holds


def test_a_trial_draws_with_its_seed(pair):
    engine, plan = make_engine(*pair, gamma=2), Plan(2, "model")
    laws = [Sampling(temperature=1.0, top_p=1.0, seed=seed) for seed in (None, 0, 1)]
    usual, first, second = (trials.run(engine, random_prompt(50), 20, "draft model", plan, law, 16).tokens
                            for law in laws)
    assert usual == first != second


def test_a_text_that_repeats_itself_is_noticed():
    assert trials.repeated([1, 2, 3, 4, 5, 6, 7, 8]) == 0 and trials.repeated([1, 2, 3]) == 0
    assert trials.repeated([1, 2] * 50) == 1 - 2 / 97
    trial = trials.Trial("n-grams", Plan(2, "ngram"), 0.6, [1, 2] * 50, 1.0, [10, 9], [9, 3], {"full": 12 / 19}, 1.0,
                         1.0)
    shown = " ".join(report.page_of_acceptance([trial.record() | {"budget": 8, "prompt_len": 9}]).split())
    assert "whole prompt" not in shown and "repeat themselves" in shown
    assert "n-grams, T 0.6, 98%" in shown and "| .63 | .90 | .33 |" in shown
    assert trial.rate == 12 / 19  # 10 first tokens and the 9 behind kept ones were looked at


def test_a_short_text_is_begun_anew(tmp_path):
    tokenizer, file = Tokenizer(TINY / "target"), tmp_path / "text"
    file.write_text("Call me Ishmael.")
    ids, repeated = check.read_ids(tokenizer, str(file), 50)
    once = tokenizer.encode("Call me Ishmael.")
    assert len(ids) == 50 and ids[len(once) : 2 * len(once)] == once and repeated == -(-50 // len(once)) - 1


@pytest.mark.parametrize("argv,text", [
    (["--lengths", "0"], "--lengths (0) must be a whole number, at least 1"),
    (["--new", "3"], "--new (3) must be a whole number, at least 8"),
    (["--lengths", "131000"], "--lengths 131000 and 96 new tokens exceed the 131072"),
    (["--far", "200000"], "--far (200000) exceeds the 131072"), (["--reference", "/no/such"], "no such folder"),
    (["--out", "/no/such/file"], "there is no folder /no/such"), (["--prompt-file", "/no/such"], "cannot read"),
    (["--qiuck"], "--qiuck is not a known flag"), (["--device", "tpu"], "device 'tpu' is unknown"),
    (["--gamma", "99", "--lengths", "99"], "gamma (99) must be"),
    (["--prefix", "x"], "asks its own questions; drop --prefix"),
])
def test_mistakes_in_a_check_get_one_line(argv, text, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "load", lambda *args, **kw: pytest.fail("loaded"))
    assert cli.main(["check", *argv, *(["--out", str(tmp_path / "x")] if "--out" not in argv else [])]) == 2
    shown = capsys.readouterr()
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""


@pytest.mark.parametrize("command", ["plan", "check"])
def test_help_fits_the_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) < 80 and f"\n    triforce {command} " in shown
