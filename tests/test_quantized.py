"""Weights of 4 and 8 bits: a folder that packs them loads as the folder of the wide weights that they stand for."""

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import refused, slow
from families import build, config_json, edit, save, storing
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from triforce.hf.checkpoint import load_model

GROUP = 16  # inputs that share a scale
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # in the order of a word's bits


def pack(numbers: torch.Tensor, bits: int, order=None) -> torch.Tensor:
    """[R, N] numbers -> [R, N * bits / 32] int32, the first in the lowest bits; a short word is filled up."""
    per = 32 // bits
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per)).unflatten(1, (-1, per))
    numbers = numbers[..., order or list(range(per))]
    words = (numbers.long() << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass
class Kind:
    """How weights are packed, and what config.json says of it."""

    method: str
    bits: int = 4
    shuffled: bool = False  # the groups of a layer's inputs
    version: str = "gptq"
    spelt: str = "checkpoint_format"  # of the version
    symmetric: bool = True
    group: int = GROUP
    biases: bool = False

    @property
    def config(self) -> dict:
        if self.method == "gptq":
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.shuffled,
                    "sym": False, self.spelt: self.version}
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False,
                   "strategy": "channel" if self.group == -1 else "group", "actorder": None,
                   "group_size": None if self.group == -1 else self.group}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}

    def packed(self, weight: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weight that is stored in its place, [O, I], and how."""
        outputs, inputs = weight.shape
        size, middle = inputs if self.group == -1 else self.group, 2 ** (self.bits - 1)
        group = torch.arange(inputs) // size
        group = group[torch.randperm(inputs)] if self.shuffled else group
        scales = (torch.rand(outputs, inputs // size) / middle).half()  # [O, G]
        has_middle = self.method == "compressed-tensors" and self.symmetric
        zeros = torch.full(scales.shape, middle) if has_middle else torch.randint(0, 2 * middle, scales.shape)
        numbers = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, 2 * middle - 1).int()
        wide = (numbers - zeros[:, group]).half() * scales[:, group]
        if self.method == "gptq":
            less = int(self.version == "gptq")
            return wide, {"qweight": pack(numbers, self.bits).T, "scales": scales.T, "g_idx": group.int(),
                          "qzeros": pack(zeros.T, self.bits) - less * (0xFFFFFFFF // (2 * middle - 1))} | (
                              {"bias": torch.zeros(outputs).half()} if self.biases else {})
        if self.method == "awq":
            return wide, {"qweight": pack(numbers.T, 4, AWQ_COLUMNS), "qzeros": pack(zeros.T, 4, AWQ_COLUMNS),
                          "scales": scales.T}
        more = {} if self.symmetric else {"weight_zero_point": pack(zeros.T, self.bits).T}
        return wide, {"weight_packed": pack(numbers, self.bits), "weight_scale": scales,
                      "weight_shape": torch.tensor([outputs, inputs])} | more


def folders(kind: Kind, family: str, place) -> tuple:
    """A folder whose layers are packed, and one with the same weights in float16."""
    torch.manual_seed(0)
    packed, wide = (save(build(family), config_json(family), place / name) for name in ("packed", "wide"))
    tensors, both = load_file(packed / "model.safetensors"), ({}, {})
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == "weight" and "_proj" in layer:
            both[1][name], parts = kind.packed(tensor.float())
            both[0].update({f"{layer}.{part}": x.contiguous() for part, x in parts.items()})
        else:
            both[0][name] = both[1][name] = tensor.half()
    for folder, found in zip((packed, wide), both, strict=True):
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    edit(packed, quantization_config=kind.config)
    return packed, wide


KINDS = {"GPTQ": Kind("gptq"), "GPTQ, version 2": Kind("gptq", version="gptq_v2"), "GPTQ, 8 bits": Kind("gptq", bits=8),
         "GPTQ, version 2 of transformers 5": Kind("gptq", version="gptq_v2", spelt="format"),
         "GPTQ, biases of zeros": Kind("gptq", biases=True), "GPTQ, all inputs": Kind("gptq", group=-1),
         "GPTQ, shuffled": Kind("gptq", shuffled=True), "AWQ": Kind("awq"),
         "symmetric": Kind("compressed-tensors"), "with zeros": Kind("compressed-tensors", symmetric=False),
         "8 bits": Kind("compressed-tensors", bits=8), "a scale a row": Kind("compressed-tensors", group=-1)}


@pytest.mark.parametrize("name, family", [
    *((name, "Llama 3") for name in KINDS), ("AWQ", "Phi-3-mini-4k"),
    *slow(*((name, "Phi-3-mini-4k") for name in KINDS if name != "AWQ"))])
def test_packed_weights_are_the_wide_ones(name, family, tmp_path):
    packed, wide = (load_model(folder, dtype="float16") for folder in folders(KINDS[name], family, tmp_path))
    same = dict(wide.named_parameters())
    assert all(torch.equal(tensor, same[name]) for name, tensor in packed.named_parameters())
    assert packed.config == wide.config  # so it takes as much memory
    assert packed.config.float8 is None and len({tensor.std().item() for tensor in same.values()}) > 5


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_a_packed_head_is_what_it_is_whatever_is_said_of_ties(method, tmp_path):
    (packed, _), kind = folders(Kind(method), "Llama 3", tmp_path), Kind(method)
    tensors = load_file(packed / "model.safetensors")
    head, parts = kind.packed(tensors.pop("lm_head.weight").float())
    save_file(tensors | {f"lm_head.{name}": part.contiguous() for name, part in parts.items()},
              packed / "model.safetensors", metadata={"format": "pt"})
    edit(packed, tie_word_embeddings=True, quantization_config={**kind.config, "lm_head": True, "ignore": []})
    assert torch.equal(load_model(packed, dtype="float16").output.weight, head)


@pytest.fixture
def in_mxfp4(tmp_path):
    """A gpt-oss folder as published, with random bytes, and one with what transformers makes of them."""
    torch.manual_seed(0)
    more = {"intermediate_size": 96}
    config = {**config_json("gpt-oss"), **more}
    packed, wide = (save(build("gpt-oss", **more), config, tmp_path / name) for name in ("packed", "wide"))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(packed / "model.safetensors").items()}
    blocks, widened = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = tensor.shape
            bits = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 125, (count, rows, columns // 32), dtype=torch.uint8)
            widened[name] = convert_moe_packed_tensors(bits, scales).contiguous()
            del blocks[name]
            blocks |= {f"{name}_blocks": bits, f"{name}_scales": scales}
    for folder, found in ((packed, blocks), (wide, widened)):
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    edit(packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return packed, wide


def test_mxfp4_is_widened_as_transformers_does(in_mxfp4):
    packed, wide = (load_model(folder, dtype="bfloat16") for folder in in_mxfp4)
    same = dict(wide.named_parameters())
    assert all(torch.equal(tensor, same[name]) for name, tensor in packed.named_parameters())
    assert packed.layers[0].mlp.gate_up.weight.abs().max() <= 6 * 2**-3 and packed.config == wide.config


def test_mxfp4_without_its_scales(in_mxfp4):
    storing("model.layers.1.mlp.experts.down_proj_scales", None)(in_mxfp4[0])
    refused("a packed weight has no scales .*down_proj_scales.*download", load_model, in_mxfp4[0])


@pytest.mark.parametrize("change", [lambda x: x[..., :1], lambda x: x[:, :, :1], lambda x: x.float()])
def test_mxfp4_of_other_shapes(change, in_mxfp4):
    """Which would be spread over the scales without a word."""
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    blocks = load_file(in_mxfp4[0] / "model.safetensors")[name]
    storing(name, change(blocks).contiguous())(in_mxfp4[0])
    refused(r"MXFP4 has .* blocks .* and torch.uint8 scales .*; download it again", load_model, in_mxfp4[0])


def saying(**config):
    return lambda folder: edit(folder, quantization_config={"group_size": 16, **config})


@pytest.mark.parametrize("change, says", [
    (saying(quant_method="gptq", bits=3), "bits 3, which is not supported"),
    (saying(quant_method="gptq", bits=4, dynamic={"+:.*": {"bits": 8}}), "dynamic"),
    (saying(quant_method="awq", bits=4, zero_point=True, version="gemv"), "version 'gemv'"),
    (saying(quant_method="awq", bits=4, zero_point=True, group_size="16"), "group_size is '16'.*must be"),
    (saying(quant_method="gptq", bits=4, format="marlin"), "format 'marlin'"),
    (saying(quant_method="gptq", bits=4, is_marlin_format=True), "is_marlin_format True"),
    (saying(quant_method="awq", bits=4, zero_point=True, format="gemv"), "format 'gemv'"),
    *((storing(f"model.layers.0.mlp.up_proj.{name}", value), says) for name, value, says in (
        ("g_idx", torch.zeros(9, dtype=torch.int32), "do not fit Packing"),
        ("g_idx", torch.zeros(64, dtype=torch.int32), r"scales \(112, 4\) .* do not fit Packing"),
        ("scales", torch.full((4, 112), math.nan).half(), "do not fit Packing"),
        ("qzeros", torch.zeros(1, 14, dtype=torch.int32), "zeros .112, 1., which do not fit Packing"),
        ("qweight", torch.zeros(8, 112), "packed numbers are torch.float32, where words of int32 belong"))),
    *((storing(f"model.layers.0.mlp.up_proj.{missing}", None), r"layers.0.mlp.up_proj is packed, and has only .*; "
       "download it again") for missing in ("scales", "qzeros"))])
def test_what_is_refused(change, says, tmp_path):
    packed, _ = folders(Kind("gptq"), "Llama 3", tmp_path)
    change(packed)
    refused(says, load_model, packed)
