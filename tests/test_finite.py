"""A model whose numbers are not finite: a text ends with one line that says whose weights are the cause, if any are."""

import copy
import re
import shutil

import pytest
import torch
from conftest import SIZES, make_engine, random_pair, random_prompt, refused
from safetensors.torch import load_file, save_file

from triforce.errors import UserError
from triforce.hf.folders import TINY

NAN, INF = float("nan"), float("inf")
CHUNKS = {**SIZES, "prefill_chunk_size": 32}


def broken(part: str, value: float, index: int = 3, dtype=torch.float32, **options):
    """An engine of a random pair, one weight of whose target is not what it should be."""
    target, draft = (copy.deepcopy(model) for model in random_pair(dtype))
    with torch.no_grad():
        dict(target.named_parameters())[f"{part}.weight"].view(-1)[index] = value
    return make_engine(target, draft, **CHUNKS, **options)


@pytest.mark.parametrize("part, value, options", [
    ("layers.0.attention.qkv", NAN, {}), ("layers.1.mlp.down", INF, {"offload": True}),
    ("layers.1.attention_norm", NAN, {"retrieval": False}), ("norm", INF, {"sampling": "coupled"}),
    ("output", NAN, {"offload": True})])
def test_a_weight_that_is_no_number_is_named(part, value, options):
    engine = broken(part, value, **options)
    told = rf"logits after 9\d tokens are not finite: weights of {re.escape(part)} are no finite numbers"
    for law in ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.0, "speculate": False}):
        refused(told, engine.generate, random_prompt(90), 8, **law)
    refused(told, list, engine.stream(random_prompt(90), 8))
    with torch.no_grad():
        dict(engine.target.named_parameters())[f"{part}.weight"].view(-1)[3] = 1.0
    assert len(engine.generate(random_prompt(90), 8).tokens) == 8  # the engine serves on


def test_what_float16_does_not_reach_is_no_fault_of_a_weight():
    engine = broken("layers.1.mlp.gate_up", 6e4, dtype=torch.float16)
    with torch.no_grad():
        engine.target.layers[1].mlp.gate_up.weight.fill_(6e4)
    with pytest.raises(UserError, match=r"they exceed float16 \(float16 ends at 65,504\); load .* --dtype bfloat16"):
        engine.generate(random_prompt(90), 8)


def test_one_row_of_several():
    engine = broken("embedding", NAN, index=7 * 32, max_batch_size=2, retrieval=False)
    prompts = [[token if token != 7 else 8 for token in random_prompt(90, seed)] for seed in range(2)]
    prompts[1][20] = 7
    refused("weights of embedding are no finite numbers", engine.generate, prompts, 4, seed=0)


@pytest.mark.parametrize("flags", [["--compare"], ["--json"], []], ids=str)
def test_a_command_ends_with_that_line(tmp_path, command, flags):
    folder = shutil.copytree(TINY / "target", tmp_path / "target")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"].view(-1)[5] = NAN
    save_file(weights, file, metadata={"format": "pt"})
    said = command("--checkpoint", str(folder), "--device", "cpu", "--prompt", "Once upon a time", "--max-new-tokens",
                   "4", *flags, status=2)
    assert "weights of layers.1.mlp.down are no finite numbers" in said.err and "identical" not in said.out
