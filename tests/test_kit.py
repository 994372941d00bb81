"""`triforce plan` and `triforce check`: what they say is what happens, and a fault is found where it is."""

import json
import shutil
import sys

import pytest
import torch
from conftest import slow

import triforce
from triforce.cli import check, request
from triforce.decode import acceptance
from triforce.engine import memory
from triforce.hf.checkpoint import open_tensors
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer
from triforce.model import ModelConfig
from triforce.runtime.graphs import SPARE

CPU = torch.device("cpu")
WAYS = ["draft + view", "draft model", "retrieval view", "n-grams"]

LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}


def planned(command, *argv, fits: bool = True) -> dict:
    told = json.loads(command("plan", *argv, "--json", status=int(not fits)).out)
    assert told["fits"] == fits
    return told


def test_layers_with_a_window_stay_on_the_device(tmp_path, command):
    """Where all have one there is nothing to offload."""
    config = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = planned(command, "--checkpoint", str(tmp_path), "--prompt-len", "100000", "--memory", "17GiB", fits=False)
    assert (told["resident_layers"], told["layers"], told["host_bytes"]) == (0, 0, 0)
    assert told["parts"]["sliding windows"] == 2 * 32 * 5120 * 4096 and "KV cache" not in told["parts"]
    kinds = [f"{kind}_attention" for kind in (*["sliding"] * 3, "full")] * 8
    config |= {"architectures": ["MinistralForCausalLM"], "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = planned(command, "--checkpoint", str(tmp_path), "--prompt-len", "100000", "--memory", "22GiB",
                   "--host-memory", "64GiB")
    assert told["offload"] == "auto" and told["layers"] == 8 > told["resident_layers"]
    capacity = told["host_bytes"] // (4096 * (8 - told["resident_layers"]))
    assert 100_000 < capacity < 103_000


@pytest.mark.parametrize("flags,options", [
    (["--offload", "--num-resident-layers", "3"], {"offload": True, "num_resident_layers": 3}), *slow(
        ([], {}), (["--no-retrieval"], {"retrieval": False}))])
def test_the_plan_is_what_is_allocated(flags, options, command):
    told = planned(command, "--device", "cpu", "--prompt-len", "2500", "--max-new-tokens", "40", *flags)
    engine = triforce.load("tiny", device="cpu", max_batch_size=8, **options)
    engine.prepare([list(range(5, 255)) * 10], 40)
    of_caches = {"tail", "chunk keys", "retrieval view", "draft cache"}
    parts = sum(size for name, size in told["parts"].items() if name.startswith("KV cache") or name in of_caches)
    assert parts == engine.buffers.state.nbytes
    numbers = sum(tensor.numel() for tensor in open_tensors(TINY / "target" / "model.safetensors").values())
    assert told["parts"]["target weights"] == 4 * numbers
    assert told["resident_layers"] == options.get("num_resident_layers", 8)


def test_a_file_of_prompts_says_how_many_there_are(tmp_path, command):
    (tmp_path / "prompts.jsonl").write_text('"a"\n' * 3)
    flags = ["--prompts", str(tmp_path / "prompts.jsonl"), "--prompt-len", "500"]
    assert planned(command, *flags)["rows"] == 3 and planned(command, *flags, "--batch-size", "2")["rows"] == 2


def test_an_8b_on_24_gib_keeps_the_layers_that_fit(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    flags = ["--checkpoint", str(tmp_path), "--prompt-len", "100000", "--memory", "24GiB", "--host-memory", "64GiB"]
    told = planned(command, *flags)
    assert told["offload"] == "auto" and told["on_chip_bytes"] > 24 * 2**30
    assert told["dtype"] == "bfloat16" and 0 < told["resident_layers"] < 32 and told["longest_prompt"] == 131072 - 256
    layer = told["host_bytes"] // (32 - told["resident_layers"])
    assert layer == 2 * 8 * 128 * 2 * 100352 and told["bytes"] <= 24 * 2**30
    fixed = told["parts"]["CUDA itself, about"] + told["parts"]["target weights"]
    kept, free = told["bytes"] - fixed + layer, 24 * 2**30 - fixed
    # One layer more would not leave what is to be left (with views as they are before any is cut).
    assert kept + layer / 2 > min(0.95 * free, free - SPARE)
    page = " ".join(command("plan", *flags).out.split())
    assert "| 4 of 32 |" in page and "fits with --offload auto; without it 31.33 GiB" in page and " 12,288 |" in page
    assert "| longest prompt (model ends it) | 130,816 |" in page
    kept = planned(command, *flags[:4], "--memory", "80GiB")["parts"]["KV cache"]
    told = planned(command, *flags, "--gpus", "2")
    assert not told["offload"] and 2 * told["parts"]["KV cache"] == kept
    # The view has half of a prompt, or what is free beside the weights.
    views = [planned(command, *flags[:4], "--offload", "--host-memory", "64GiB", "--memory", size)["budget"]
             for size in ("80GiB", "24GiB", "22GiB")]
    assert views == [49_152, 24_576, 8192]


def test_where_nothing_fits_both_numbers_stand(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 8}))
    flags = ["--checkpoint", str(tmp_path), "--prompt-len", "40000", "--memory"]
    page = " ".join(command("plan", *flags, "4GiB", status=1).out.split())
    assert "| memory of one GPU | 4.00 |" in page and "| longest prompt (memory ends it) | 0 |" in page
    assert "It does not fit" in page and "- target weights: --dtype, --weights fp8" in page
    needed = planned(command, *flags, "80GiB")["bytes"]
    flags += [str(needed - 2**26), "--host-memory", "0.1GiB"]
    longest = planned(command, *flags, fits=False)["longest_prompt"]
    assert 1024 <= longest < 40_000 and longest % 1024 == 0
    planned(command, *flags, "--prompt-len", str(longest))
    planned(command, *flags, "--prompt-len", str(longest + 1024), fits=False)


def test_settings_that_fit_no_offloaded_cache_are_planned_on_the_gpu(tmp_path, command):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    flags = ["--checkpoint", str(tmp_path), "--draft", "none", "--draft-cache", "snapkv", "--prompt-len", "100000"]
    for size, fits in (("80GiB", True), ("24GiB", False)):
        assert planned(command, *flags, "--memory", size, fits=fits)["offload"] is False
    assert "use 'retrieval' or 'streaming' with offload" in command("plan", *flags, "--offload", status=2).err


def test_what_is_kept_of_a_longer_prompt_is_planned(command):
    flags = ["--device", "cpu", "--max-seq-len", "2048", "--prompt-len", "5000"]
    assert planned(command, *flags, "--keep", "end")["prompt_len"] == 1792


def test_what_this_machine_has_is_the_default(command, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 2**20)
    told = planned(command, "--device", "cpu", "--prompt-len", "2000", fits=False)
    assert told["memory"] == 2**20 and told["is_here"]


@pytest.mark.parametrize("argv,text", [
    (["plan", "--memory", "2q"], "--memory ('2q') must be a number of bytes or a size such as '20GiB'"),
    (["plan", "--memory", "2GiB", "--device", "tpu"], "device 'tpu' is unknown; use 'cpu', 'cuda' or 'cuda:1'"),
    (["plan", "--gpus", "0"], "--gpus: '0' must be a whole number, at least 1"),
    (["plan", "--device", "cpu", "--gpus", "3"], "--gpus (3) is more than the 1"),
    (["plan", "--prompt-len", "200000"], "a prompt of 200000 tokens and 256 new ones exceed the 131072"),
    (["plan", "--memroy", "2GiB"], "--memroy is not a known flag"),
    (["plan", "--checkpoint", "/no/such"], "no such folder"), (["plan", "--gamma", "99"], "gamma (99) must be"),
    (["plan", "--num-resident-layers", "3"], "add offload=True (--offload)"),
    (["plan", "--offload", "--num-resident-layers", "9"], "is more than the 8 layers that see all keys"),
    (["plan", "--max-seq-len", "999999"], "exceeds the model's positions; use at most 131072"),
    (["plan", "--prompt-file", "book.txt"], "--prompt-file names one; say how many tokens it has with --prompt-len"),
    (["check", "--lengths", "0"], "--lengths: '0' must be a whole number, at least 1"),
    (["check", "--lengths", "131000"], "--lengths 131000 and 96 new tokens exceed the 131072"),
    (["check", "--far", "200000"], "--far (200000) must lie between 0 and the 131072"),
    (["check", "--reference", "/no/such"], "no such folder"),
    (["check", "--prompt-file", "/no/such"], "cannot read"),
    (["check", "--qiuck"], "--qiuck is not a known flag"), (["check", "--device", "tpu"], "device 'tpu' is unknown"),
    (["check", "--gamma", "99", "--lengths", "99"], "gamma (99) must be"),
    (["check", "--prefix", "x"], "asks its own questions; drop --prefix"),
    (["check", "--save_every", "5"], "asks its own questions; drop --save-every"),
    (["check", "--prompt_file", "nowhere.txt"], "nowhere.txt"),
    *((["check", *flags], f"asks its own questions; drop {flags[0]}") for flags in (
        ["--max-new-tokens", "9"], ["--batch-size", "4"], ["--no-speculation"], ["--keep", "end"], ["--stop", "x"])),
    (["check", "--new", "1"], "--new (1) must be at least 2"),
    *((["plan", "--prompt-len", "9", *flags], f"(--batch-size); drop {flags[0]}") for flags in (
        ["--num-samples", "4"], ["--questions", "x"])),
])
def test_mistakes_get_one_line(argv, text, command, monkeypatch):
    monkeypatch.setattr(check, "load", lambda *args, **kw: pytest.fail("loaded"))
    shown = command(*argv, status=2)
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""


def checked(command, *argv, passes: bool = True) -> tuple[dict, str]:
    told = json.loads(command("check", "--device", "cpu", *argv, "--json", status=int(not passes)).out)
    return told, check.page(told)


@pytest.fixture
def brief(monkeypatch):
    """Fewer tokens to compare."""
    monkeypatch.setattr(check, "LAST", 256)
    monkeypatch.setattr(check, "GREEDY", 16)


@pytest.mark.parametrize("parameters,says", [(10**6, "512, 2,048 tokens, some 1"), (10**9, "512 tokens, some 2"),
                                             (7 * 10**9, "512 tokens, some 12")])
def test_it_says_beforehand_how_long_it_takes(parameters, says, monkeypatch, command):
    """By 8,704 tokens that go through the model, or by 2,048 where those take minutes. A core has 40 billion operations
    a second."""
    monkeypatch.setitem(check.RATES, "cpu", 4e10)
    monkeypatch.setattr(ModelConfig, "num_parameters", parameters)
    monkeypatch.setattr(check, "examine", lambda *args: [])
    assert f"at {says} min; less with" in command("check", "--device", "cpu").err


def test_the_embedded_pair_passes_every_check(brief, command):
    told, page = checked(command, "--lengths", "200", "500", "--new", "6")
    records = {record["name"]: record for record in told["records"]}
    assert told["passed"] and told["begun_anew"] == 0
    checks = {"logits", *(f"greedy, {way}" for way in WAYS)}
    assert records.keys() == checks | {"times, 200", "times, 500"}
    assert {name for name, record in records.items() if record["passed"]} == checks
    logits = records["logits"]
    assert logits["tokens"] == 500 and 0 < logits["mean_difference"] < logits["max_difference"] < logits["max_allowed"]
    for way in WAYS:
        assert records[f"greedy, {way}"]["drafted"] >= records[f"greedy, {way}"]["kept"] > 0, way
    for length in (200, 500):
        times = records[f"times, {length}"]
        assert times["prefill"] > 0 and times["on_ms"] > 0 and times["off_ms"] > 0 and times["new_tokens"] == 6
    assert "**All is well**" in page and "- greedy, retrieval view: ok. 16 tokens, " in page


def test_a_check_where_one_round_says_all(brief, command):
    """Then a token after the first takes no time with speculation, and there is no speed-up to tell."""
    told, _ = checked(command, "--gamma", "4", "--new", "2", "--lengths", "470", "--far", "0", "--temperature", "0")
    [times] = (record for record in told["records"] if record["name"] == "times, 470")
    assert times["on_ms"] == 0 < times["off_ms"]


@pytest.mark.parametrize("flags,lengths", [([], [512, 1000]), (["--new", "400"], [512, 1000]),
                                           (["--lengths", "3000", "200"], [200, 3000])])
def test_lengths_are_as_long_as_they_fit(flags, lengths, monkeypatch):
    monkeypatch.setitem(check.LENGTHS, "cpu", (512, 1000, 2048, 4096))
    monkeypatch.setattr(check.plan, "need", lambda job, _: {"fits": job.prompt_len <= 1000})
    assert check.lengths_of(*check.read(flags), 4096, CPU) == lengths
    assert check.lengths_of(*check.read([]), 300, CPU) == [204]
    monkeypatch.setitem(check.RATES, "cpu", 3e8)  # operations a second: 1,000 tokens take more than 180 s
    assert check.lengths_of(*check.read([]), 4096, CPU) == [512]


def test_a_check_without_transformers_says_what_it_skipped(brief, command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text").write_text("Call me Ishmael. ")
    told, page = checked(command, "--lengths", "200", "--new", "8", "--prompt-file", str(tmp_path / "text"))
    assert told["begun_anew"] > 10 and f"begins anew {told['begun_anew']} times" in page
    assert "- logits: -.  transformers failed: " in page and "pip install transformers" in page
    assert [one["name"] for one in told["records"] if "why" in one] == ["logits"]


@pytest.mark.slow
def test_weights_in_fp8_are_not_set_beside_wider_ones(brief, command):
    told, _ = checked(command, "--lengths", "300", "--new", "8", "--weights", "fp8")
    records = {record["name"]: record for record in told["records"]}
    assert "multiplies in fp8 in another way" in records["logits"]["why"]
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


def test_a_damaged_layer_is_a_failure(folders, brief, command):
    made, _ = folders
    told, page = checked(command, "--checkpoint", str(made / "layer"), "--reference", str(made / "good"), "--lengths",
                         "200", "--new", "8", passes=False)
    [failed] = [record for record in told["records"] if record["passed"] is False]
    assert failed["name"] == "logits" and failed["max_difference"] > failed["max_allowed"]
    assert "at position 0;" in failed["why"]
    assert "**NOT all is well**" in page and "- logits: FAILED" in page


@pytest.mark.parametrize("last", [300, 64])
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


@pytest.mark.parametrize("damaged,dtype,cause", [
    ("nan", "float32", "weights of layers.1.mlp.down are no finite numbers"),
    ("large", "float32", "weights of embedding are no finite numbers"), ("overflow", "float16", "(float16 ends at")])
def test_what_is_not_finite_is_named(folders, brief, damaged, dtype, cause, command):
    """And nothing is timed that says nothing."""
    made, _ = folders
    told, page = checked(command, "--checkpoint", str(made / damaged), "--dtype", dtype, "--lengths", "200", "--new",
                         "8", passes=False)
    [record] = told["records"]
    assert cause in record["why"]
    assert "NOT all is well" in page


@pytest.mark.slow
def test_inexact_output_is_a_failure(brief, command, monkeypatch):
    monkeypatch.setattr(acceptance, "is_accepted", lambda draft_prob, target_prob, u: draft_prob >= 0)
    monkeypatch.setitem(sys.modules, "transformers", None)
    told, page = checked(command, "--lengths", "300", "--new", "32", passes=False)
    failed = {record["name"]: record for record in told["records"] if record["passed"] is False}
    assert {"greedy, draft model", "greedy, n-grams"} <= failed.keys()
    assert "DIFFERENT" in page and "please report" in page
