"""`triforce plan` and `triforce check`: what they say is what happens, and a fault is found where it is."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import random_prompt, slow

import triforce
from triforce import acceptance, cli, memory, request
from triforce.graphs import SPARE
from triforce.hf.checkpoint import open_tensors, read_config
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer
from triforce.kit import check, plan

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
    assert status == 0 and told["shares"] and told["rows"] == way["rows"] == 3
    engine, ids = triforce.load("tiny", device="cpu", max_batch_size=8), list(range(5, 255)) * 10
    book = engine.prefill(ids)
    engine.generate([random_prompt(plan.QUESTION, seed=row, vocab_size=2000) for row in range(3)], 40, prefix=book)
    parts, alone = dict(way["parts"]), planned(capsys, "--device", "cpu", "--prompt-len", "2500")[1]["ways"][0]["parts"]
    assert parts["prefill activations"] > 0.9 * alone["prefill activations"]  # of the document
    document = parts.pop("KV cache of the shared prefix") + parts.pop("its chunk keys")
    assert document == book.nbytes
    of_caches = {"tail", "chunk keys", "retrieval view", "draft cache"}
    rows = sum(size for name, size in parts.items() if name.startswith("KV cache") or name in of_caches)
    assert rows == engine.caches.state.nbytes


def test_a_plan_says_how_many_rows_fit(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "122880", "--memory", "36GiB", "--host-memory", "1GiB"]
    _, told = planned(capsys, *flags, "--num-samples", "32")
    chosen = told["ways"][told["chosen"]]
    fit = chosen["rows"]
    assert 1 < fit < 32 and chosen["budget"] == 512 and 36 * 2**30 - chosen["bytes"] >= SPARE
    _, larger = planned(capsys, *flags, "--num-samples", "32", "--budget", "1024")
    assert larger["ways"][larger["chosen"]]["rows"] < fit
    for count in (fit, fit + 1):
        _, other = planned(capsys, *flags, "--num-samples", str(count))
        assert other["ways"][other["chosen"]]["rows"] == fit
    assert cli.main(["plan", *flags, "--num-samples", "32"]) == 0
    assert f"{fit} of 32 rows side by side" in capsys.readouterr().out
    # A short document is not shared by more rows than are wanted side by side anyway.
    status, told = planned(capsys, *flags, "--prompt-len", "100", "--num-samples", "40", "--batch-size", "4")
    assert status == 0 and not told["shares"] and told["rows"] == 4


def test_a_file_of_prompts_says_how_many_there_are(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('"a"\n' * 3)
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--prompt-len", "500"]
    assert planned(capsys, *flags)[1]["rows"] == 3 and planned(capsys, *flags, "--batch-size", "2")[1]["rows"] == 2


def test_an_8b_on_24_gib_keeps_the_layers_that_fit(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "100000", "--memory", "24GiB", "--host-memory", "64GiB"]
    status, told = planned(capsys, *flags)
    on_chip, chosen = told["ways"]
    assert status == 0 and told["chosen"] == 1 and not on_chip["fits"] and told["dtype"] == "bfloat16"
    assert chosen["offload"] == "auto" and 0 < chosen["resident_layers"] < 32
    layer = chosen["host_bytes"] // (32 - chosen["resident_layers"])
    assert layer == 2 * 8 * 128 * 2 * 100352 and chosen["bytes"] <= 24 * 2**30
    fixed = chosen["parts"]["CUDA itself, about"] + chosen["parts"]["target weights"]
    kept, free = chosen["bytes"] - fixed + layer, 24 * 2**30 - fixed
    # One layer more would not leave what is to be left (with views as they are before any is cut).
    assert kept + layer / 2 > min(0.95 * free, free - SPARE)
    assert cli.main(["plan", *flags]) == 0
    page = capsys.readouterr().out
    assert all(len(line) <= 80 for line in page.splitlines())
    page = " ".join(page.split())
    assert "| 32 of 32 | 6 of 32 |" in page and "fits with --offload auto" in page and "| 3,328 | 6,400 |" in page
    status, told = planned(capsys, *flags, "--gpus", "2")
    assert status == 0 and told["chosen"] == 0 and len(told["ways"]) == 1
    shared = told["ways"][0]["parts"]["KV cache"], on_chip["parts"]["KV cache"]
    assert 2 * shared[0] == shared[1]


def test_where_nothing_fits_both_numbers_stand(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 8}))
    flags = ["--checkpoint", str(tmp_path), "--prompt-len", "40000", "--memory"]
    assert cli.main(["plan", *flags, "4GiB"]) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits: this takes" in page and "GiB of one GPU, and 4.00 GiB are there" in page
    assert "target weights (--dtype, --weights fp8)" in page and "| longest prompt that fits | 0 | 0 |" in page
    needed = planned(capsys, *flags, "80GiB")[1]["ways"][0]["bytes"]
    flags += [str(needed - 2**26), "--host-memory", "0.1GiB"]
    status, told = planned(capsys, *flags)
    longest = max(way["longest_prompt"] for way in told["ways"])
    assert status == 1 and told["chosen"] is None and 1024 <= longest < 40_000 and longest % 1024 == 0
    assert planned(capsys, *flags, "--prompt-len", str(longest))[0] == 0
    assert planned(capsys, *flags, "--prompt-len", str(longest + 1024))[0] == 1
    assert cli.main(["plan", *flags]) == 1
    assert "of the host, and 0.10 GiB are there" in " ".join(capsys.readouterr().out.split())


def test_the_longest_prompt_may_be_all_that_the_model_attends_over(llama_8b, capsys):
    _, told = planned(capsys, "--checkpoint", llama_8b, "--prompt-len", "1000", "--memory", "80GiB")
    assert told["ways"][0]["longest_prompt"] == 131072 - 256


@pytest.mark.parametrize("flags,length,says", [
    (["--prompt-len", "900"], 900, "the first 900 tokens are read"),
    ([], 1792, "more than 1,792 tokens is refused; --keep"),
    (["--prompt-len", "5000", "--keep", "end"], 1792, "1,792 tokens are kept, those at the end"),
    (["--keep", "both"], 1792, "half from the start and half from the end")])
def test_what_of_a_longer_text_is_dropped(flags, length, says, capsys):
    """As generating does it: so many of a text's tokens are in the prompt."""
    flags = ["--device", "cpu", "--max-seq-len", "2048", *flags]
    assert planned(capsys, *flags)[1]["prompt_len"] == length
    cli.main(["plan", *flags])
    assert says in " ".join(capsys.readouterr().out.split())


def test_what_this_machine_has_is_the_default(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    status, told = planned(capsys, "--device", "cpu", "--prompt-len", "2000")
    assert status == 1 and told["memory"] == 2**20 and told["is_here"]


@pytest.mark.parametrize("argv,text", [
    (["plan", "--memory", "2q"], "--memory ('2q') must be a number of bytes or a size such as '20GiB'"),
    (["plan", "--memory", "2GiB", "--device", "tpu"], "device 'tpu' is unknown; use 'cpu', 'cuda' or 'cuda:1'"),
    (["plan", "--gpus", "0"], "--gpus (0) must be a whole number, at least 1"),
    (["plan", "--device", "cpu", "--gpus", "3"], "--gpus (3) is more than the 1"),
    (["plan", "--save-every", "0"], "--save-every: '0' must be a whole number"),
    (["plan", "--prompt-len", "0"], "--prompt-len: '0' must be a whole number"),
    (["plan", "--prompt-len", "200000"], "a prompt of 200000 tokens and 256 new ones exceed the 131072"),
    (["plan", "--memroy", "2GiB"], "--memroy is not a known flag"),
    (["plan", "--checkpoint", "/no/such"], "no such folder"), (["plan", "--gamma", "99"], "gamma (99) must be"),
    (["plan", "--num-resident-layers", "3"], "add offload=True (--offload)"),
    (["plan", "--offload", "--num-resident-layers", "9"], "is more than the model's 8 layers"),
    (["plan", "--prompt-file", "book.txt"], "--prompt-file names one; say how many tokens it has with --prompt-len"),
])
def test_mistakes_get_one_line(argv, text, capsys):
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""


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
    monkeypatch.setattr(check, "LAST", 256)
    monkeypatch.setattr(check, "GREEDY", 16)


WAYS = ["draft + view", "draft model", "retrieval view", "n-grams"]


def test_the_embedded_pair_passes_every_check(brief, capsys, tmp_path):
    status, told, page = checked(capsys, tmp_path, "--lengths", "200", "700", "--new", "12")
    records = {record["name"]: record for record in told["records"]}
    assert status == 0 and told["passed"] and told["begun_anew"] == 0
    checks = {"logits", *(f"greedy, {way}" for way in WAYS)}
    assert records.keys() == checks | {"times, 200", "times, 700"}
    assert {name for name, record in records.items() if record["passed"]} == checks
    logits = records["logits"]
    assert logits["tokens"] == 700 and 0 < logits["mean_difference"] < logits["max_difference"] < logits["max_allowed"]
    for way in WAYS:
        assert records[f"greedy, {way}"]["drafted"] >= records[f"greedy, {way}"]["kept"] > 0, way
    for length in (200, 700):
        times = records[f"times, {length}"]
        assert times["prefill"] > 0 and times["on_ms"] > 0 and times["off_ms"] > 0 and times["new_tokens"] == 12
    assert "**5 passed.**" in page and "| retrieval view |" in " ".join(page.split())
    assert all(len(line) <= 80 for line in page.splitlines() if not line.startswith("#"))


def test_the_estimate_comes_first_and_grows_with_the_work(brief, capsys, tmp_path, monkeypatch):
    config, seconds = read_config(TINY / "target"), []
    monkeypatch.setattr(check, "_seconds", lambda function, device: 1e-3)
    for lengths, far, new in (([200], 0, 8), ([200, 20_000], 0, 8), ([200, 20_000], 20_000, 8), ([200], 0, 800)):
        seconds.append(check.estimate(config, lengths, far, new, CPU, torch.float32))
    assert 10 < seconds[0] < seconds[1] - 8 < seconds[2] - 24 and seconds[3] > seconds[0] + 8
    monkeypatch.setattr(check, "ask_transformers", lambda *args: 1 / 0)  # the first that reads weights
    said = []
    for lengths in (["200"], ["200", "100000"]):
        with pytest.raises(ZeroDivisionError):
            check.main(["--device", "cpu", "--out", str(tmp_path / "x"), "--lengths", *lengths])
        shown = capsys.readouterr().err
        assert "this takes about" in shown.splitlines()[0]
        said.append(shown.split("about ")[1].split(",")[0])
    assert said[0].endswith("seconds") and said[1].endswith("minutes")


@pytest.mark.parametrize("flags,lengths", [([], [512, 1000]), (["--quick"], [1000]), (["--new", "400"], [512, 1000]),
                                           (["--lengths", "3000", "200"], [200, 3000])])
def test_lengths_are_as_long_as_they_fit(flags, lengths, monkeypatch):
    monkeypatch.setitem(check.LENGTHS, "cpu", (512, 1000, 2048, 4096))
    monkeypatch.setattr(check.plan, "need", lambda job, *rest: SimpleNamespace(fits=job.prompt_len <= 1000))
    assert check.lengths_of(*check.read(flags), 4096, CPU) == lengths
    monkeypatch.setattr(check.plan, "need", lambda job, *rest: SimpleNamespace(fits=False))
    assert check.lengths_of(*check.read([]), 4096, CPU) == [512]
    assert check.lengths_of(*check.read([]), 300, CPU) == [204]


def test_a_check_without_transformers_says_what_it_skipped(brief, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, told, page = checked(capsys, tmp_path, "--lengths", "200", "--quick", "--new", "8")
    assert status == 0 and "**5 passed, 1 skipped: pip install transformers.**" in page
    assert [one["name"] for one in told["records"] if "skipped" in one] == ["logits"]


def test_text_that_repeats_itself_is_said_to(brief, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text").write_text("Call me Ishmael. ")
    _, told, page = checked(capsys, tmp_path, "--prompt-file", str(tmp_path / "text"), "--lengths", "400", "--quick",
                            "--new", "40")
    page = " ".join(page.split())
    assert told["begun_anew"] > 10 and f"begins anew {told['begun_anew']} times" in page
    assert "repeats itself" not in page
    monkeypatch.setattr(check, "repeated", lambda tokens: 0.5)
    _, _, page = checked(capsys, tmp_path, "--lengths", "200", "--quick", "--new", "8")
    assert "repeats itself (up to 50% of" in " ".join(page.split())


def test_how_much_of_a_text_repeats():
    assert check.repeated([1, 2, 3, 4, 5, 6, 7, 8]) == 0 == check.repeated([1, 2, 3])
    assert check.repeated([1, 2] * 50) == 1 - 2 / 97


@pytest.mark.slow
def test_weights_in_fp8_are_not_set_beside_wider_ones(brief, capsys, tmp_path):
    status, told, _ = checked(capsys, tmp_path, "--lengths", "300", "--new", "8", "--quick", "--weights", "fp8")
    records = {record["name"]: record for record in told["records"]}
    assert status == 0 and "weights are in fp8" in records["logits"]["skipped"]
    assert records["greedy, retrieval view"]["passed"]


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
               "word": lambda: model.model.embed_tokens.weight[ids[word]].add_(0.5),
               "nan": lambda: [weight[5, 3].fill_(torch.nan) for weight in (model.model.layers[1].mlp.down_proj.weight,
                                                                            model.lm_head.weight)],
               "nan output": lambda: model.lm_head.weight[ids[word]].fill_(torch.nan),
               "large": lambda: model.model.embed_tokens.weight[ids[word]].fill_(torch.inf),
               "overflow": lambda: model.model.layers[2].mlp.down_proj.weight.mul_(1e7)}
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


def test_a_damaged_layer_is_a_failure(folders, brief, capsys, tmp_path):
    made, _ = folders
    status, told, page = checked(capsys, tmp_path, "--checkpoint", str(made / "layer"), "--reference",
                                 str(made / "good"), "--lengths", "200", "--quick", "--new", "8")
    [failed] = [record for record in told["records"] if record["passed"] is False]
    assert status == 1 and failed["name"] == "logits" and failed["max_difference"] > failed["max_allowed"]
    assert "at position 0;" in failed["why"]
    assert "**1 failed, 2 passed.**" in page and "FAILED" in page


@pytest.mark.parametrize("last", [300, 280, 64])
def test_the_position_where_logits_part(folders, last, monkeypatch):
    """Of a text that transformers computes in one go, or in stretches."""
    made, word = folders
    monkeypatch.setattr(check, "LAST", last)
    engine, ids = triforce.load(made / "word", device="cpu"), first_ids(300)
    theirs = check.ask_transformers(made / "good", ids, torch.float32, CPU)
    told = check.compare(engine, ids, theirs)
    assert theirs.shape[0] == last and not told["passed"]
    assert f"at position {max(word, 300 - last)};" in told["why"]
    theirs = check.ask_transformers(made / "word", ids, torch.float32, CPU)
    assert check.compare(engine, ids, theirs)["passed"]


@pytest.mark.parametrize("damaged,dtype,where,cause", [
    ("nan", "float32", "from layers.1.mlp.down on, at position 0 of", "weights of it are not finite"),
    ("large", "float32", "from embedding on, at position WORD of", "weights of it are not finite"),
    ("nan output", "float32", "from output on, at position 0 of", "weights of it are not finite"),
    ("overflow", "float16", "from layers.2.mlp.down on, at position 0 of", "")])
def test_the_first_value_that_is_not_finite_is_named(folders, brief, damaged, dtype, where, cause, capsys, tmp_path):
    """And nothing is timed that says nothing."""
    made, word = folders
    status, told, page = checked(capsys, tmp_path, "--checkpoint", str(made / damaged), "--dtype", dtype, "--lengths",
                                 "200", "--quick", "--new", "8")
    [record] = told["records"]
    assert status == 1 and where.replace("WORD", str(word)) in record["why"] and cause in record["why"]
    assert "**1 failed, 0 passed.**" in page


def test_inexact_output_is_a_failure(brief, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "is_accepted", lambda draft_prob, target_prob, u: draft_prob >= 0)
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, told, page = checked(capsys, tmp_path, "--lengths", "300", "--quick", "--new", "32")
    failed = {record["name"]: record for record in told["records"] if record["passed"] is False}
    assert status == 1 and {"greedy, draft model", "greedy, n-grams"} <= failed.keys()
    assert "DIFFERENT" in page and "please report" in page


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
