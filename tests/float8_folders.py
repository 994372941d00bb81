"""Checkpoints in fp8, rounded here by their definitions: a scale at a time, element by element. Knows nothing of how
triforce reads them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUP = {"targets": ["Linear"], "output_activations": None,
         "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
         "weights": {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "channel",
                     "group_size": None, "block_structure": None}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
              "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": GROUP}}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(strategy: str, **more) -> dict:
    """quantization_config of compressed-tensors. more: of its weights."""
    weights = {**GROUP["weights"], "strategy": strategy, **more}
    return {**COMPRESSED, "config_groups": {"group_0": {**GROUP, "weights": weights}}}


# name: (quantization_config, rows and columns that share a scale (0: all), the end of a scale's name, its dtype)
LAYOUTS = {
    "blocks": (BLOCKS, (128, 128), "_scale_inv", torch.float32),
    "small blocks": ({**BLOCKS, "weight_block_size": [24, 40]}, (24, 40), "_scale_inv", torch.float32),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]}, (0, 0),
               "_scale", torch.float32),
    "compressed tensor": (compressed("tensor"), (0, 0), "_scale", torch.bfloat16),
    "compressed channel": (compressed("channel"), (1, 0), "_scale", torch.bfloat16),
    "compressed block": (compressed("block", block_structure=[24, 40]), (24, 40), "_scale", torch.float32),
    "output": ({**compressed("channel"), "ignore": []}, (1, 0), "_scale", torch.float32),
    "some layers": ({**compressed("channel"), "ignore": ["lm_head", "re:.*layers\\.1\\.self_attn", "layers.0.mlp"]},
                    (1, 0), "_scale", torch.float32),
}


def rounded(weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple:
    """(e4m3, scales, what the two stand for) of a matrix."""
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    quantized, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns), dtype=dtype)
    for i, band in enumerate(weight.float().split(rows)):
        for j, block in enumerate(band.split(columns, 1)):
            scales[i, j] = block.abs().max() / 448
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            quantized[here] = (block / scales[i, j].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[here] = quantized[here].float() * scales[i, j].float()
    return quantized, scales, meant


def stays(name: str, layout: str) -> bool:
    """Whether a tensor is no weight of a layer in fp8."""
    if not name.endswith("_proj.weight") and not (layout == "output" and name == "lm_head.weight"):
        return True
    return layout == "some layers" and ("layers.1.self_attn" in name or "layers.0.mlp" in name)


def save(state: dict, config: dict, layout: str, folder: Path) -> dict:
    """Writes a checkpoint in fp8, and returns its state as the reference widens it."""
    quantization, (rows, columns), ending, dtype = LAYOUTS[layout]
    stored, meant = {}, {}
    for name, tensor in state.items():
        if stays(name, layout):
            stored[name] = meant[name] = tensor.clone()
            continue
        stored[name], scales, meant[name] = rounded(tensor, rows, columns, dtype)
        stored[name + ending] = scales if layout != "tensor" else scales.reshape(())
        if layout == "tensor":
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return meant
