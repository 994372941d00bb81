"""`triforce plan` and `triforce check`: what they say is what happens, and a fault is found where it is."""

import json
import shlex

import pytest

import triforce
from triforce import cli, memory
from triforce.hf.checkpoint import TINY, open_tensors

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
    ([], {}), (["--no-retrieval", "--draft-cache", "full"], {"retrieval": False, "draft_cache": "full"}),
    (["--offload", "--num-resident-layers", "3"], {"offload": True, "num_resident_layers": 3})])
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


def test_an_8b_on_24_gib_keeps_the_layers_that_fit(llama_8b, capsys):
    flags = ["--checkpoint", llama_8b, "--prompt-len", "100000", "--memory", "24GiB", "--host-memory", "64GiB"]
    status, told = planned(capsys, *flags)
    chosen = told["ways"][told["chosen"]]
    assert status == 0 and chosen["offload"] == "auto" and 0 < chosen["resident_layers"] < 32
    layer = chosen["host_bytes"] // (32 - chosen["resident_layers"])
    assert layer == 2 * 8 * 128 * 2 * 100352 and chosen["bytes"] <= 24 * 2**30
    kept = chosen["bytes"] - chosen["parts"]["CUDA itself, about"] - chosen["parts"]["target weights"] + layer
    free = 24 * 2**30 - chosen["parts"]["CUDA itself, about"] - chosen["parts"]["target weights"]
    assert kept > 0.95 * free  # one layer more would not leave what is to be left
    program, *argv = shlex.split(told["command"])
    args = cli.parse(argv)
    assert program == "triforce" and args.offload == "auto" and args.prompt_len == 100_000
    assert told["drafts"] == ["meta-llama/Llama-3.2-1B"]
    assert cli.main(["plan", *flags]) == 0
    page = capsys.readouterr().out
    assert "| 9 of 32 |" in " ".join(page.split()) and "--offload auto" in page
    assert all(len(line) <= 80 for line in page.splitlines() if llama_8b not in line)
    status, told = planned(capsys, *flags, "--gpus", "2", "--batch-size", "1")
    assert told["ways"][told["chosen"]]["ranks"] == 2
    *start, _, _ = words = shlex.split(told["command"])
    assert start[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "triforce"]
    assert cli.parse(words[5:]).prompts == "prompts.jsonl"


def test_where_nothing_fits_both_numbers_stand(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 8}))
    flags = ["--checkpoint", str(tmp_path), "--prompt-len", "20000", "--prefill-chunk-size", "2048",
             "--chunk-size", "32", "--memory"]
    assert cli.main(["plan", *flags, "4GiB"]) == 1
    page = capsys.readouterr().out.replace("\n", " ")
    assert "**Nothing fits.**" in page and "GiB of one GPU, and 4.00 GiB are there" in page
    assert "No prompt of 1,024 tokens fits" in page
    needed = planned(capsys, *flags, "80GiB")[1]["ways"][0]["bytes"]
    flags += [str(needed - 2**26), "--host-memory", "0.1GiB"]
    status, told = planned(capsys, *flags)
    longest = told["longest_prompt"]
    assert status == 1 and told["command"] is None and 1024 <= longest < 20_000
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
    (["plan", "--prompt-len", "200000"], "a prompt of 200000 tokens and 256 new ones exceed the 131072"),
    (["plan", "--memroy", "2GiB"], "--memroy is not a known flag"),
    (["plan", "--checkpoint", "/no/such"], "no such folder"), (["plan", "--gamma", "99"], "gamma (99) must be"),
    (["plan", "--num-resident-layers", "3"], "add offload=True (--offload)"),
])
def test_mistakes_get_one_line(argv, text, capsys):
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert text in shown.err and len(shown.err.splitlines()) == 1 and shown.out == ""
