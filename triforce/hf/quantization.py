"""quantization_config of a config.json to `Float8`."""

import re

from ..errors import UserError
from ..fp8 import LAYERS, Float8
from .files import TEXT, Fields, several, shown, whole

# The values that a key may have; None: it may be absent.
METHOD = {"quant_method": ("fp8", "compressed-tensors"), "kv_cache_scheme": (None,), "fmt": ("e4m3", None),
          "activation_scheme": ("dynamic", "static", None), "format": ("float-quantized", "naive-quantized", None),
          "transform_config": ({}, None)}
GROUP = {"targets": (["Linear"],), "output_activations": (None,)}
NUMBERS = {"num_bits": (8,), "type": ("float",)}
WEIGHTS = {**NUMBERS, "strategy": ("tensor", "channel", "block"), "symmetric": (True, None), "dynamic": (False, None)}
IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert")  # each lists layers that are left as they are


def float8_from_hf(given: Fields, n_layer: int, tied: bool) -> Float8:
    """Raises UserError for anything else than fp8 with a scale a tensor, a channel or a block, and where a part of a
    layer is in fp8."""
    expect(given, METHOD)
    by_method, rows, columns = given.values["quant_method"] == "fp8", 0, 0
    if by_method and given.values.get("weight_block_size"):
        rows, columns = _block(given, "weight_block_size")
    elif not by_method:
        expect(given.part("sparsity_config"), {"format": ("dense", None)})
        group = only_group(given, GROUP)
        weights, inputs = group.part("weights"), group.part("input_activations")
        expect(weights, WEIGHTS)
        expect(inputs, NUMBERS if inputs.values else {})
        strategy = weights.values["strategy"]
        rows, columns = _block(weights, "block_structure") if strategy == "block" else (int(strategy == "channel"), 0)
    patterns = [pattern for key in IGNORED for pattern in given.get(key, several(TEXT), ())]
    wide = [f"layers.{i}.{ours}" for i in range(n_layer) for ours, (fused, parts) in LAYERS.items()
            if _is_ignored(f"model.layers.{i}.", fused, parts, patterns)]
    # What writes "fp8" leaves the output layer as it is, whatever it lists.
    return Float8(rows, columns, (*wide, *["output"] * (tied or by_method or _names("lm_head", patterns))))


def refuse(key: str, value) -> None:
    raise UserError(f"quantization_config has {key} {shown(value)}, which is not supported; use bf16, or e4m3")


def only_group(given: Fields, allowed: dict[str, tuple]) -> Fields:
    """The one entry of config_groups: weights of one kind are supported."""
    groups = given.part("config_groups").values
    if len(groups) != 1:
        refuse("config_groups", sorted(groups))
    group = Fields(next(iter(groups.values())))
    expect(group, allowed)
    return group


def expect(given: Fields, allowed: dict[str, tuple]) -> None:
    for key, values in allowed.items():
        if given.values.get(key) not in values:
            refuse(key, given.values.get(key))


def _block(given: Fields, key: str) -> tuple[int, ...]:
    sizes = given.get(key, several(whole(1, 2**22)))
    given.expect(key, len(sizes) == 2, "two sizes")
    return sizes


def _names(layer: str, patterns: list[str]) -> bool:
    """Whether a checkpoint's list names a layer: by a regular expression, its name, or some parts of that."""
    return any(re.match(pattern[3:], layer) if pattern.startswith("re:") else f".{pattern}." in f".{layer}."
               for pattern in patterns)


def _is_ignored(block: str, fused: str, parts: tuple[str, ...], patterns: list[str]) -> bool:
    named = [part for part in parts if _names(block + part, patterns)]
    if named and len(named) < len(parts):
        raise UserError(f"quantization_config leaves {block}{named[0]} as it is, but not all of {', '.join(parts)}, "
                        "which are multiplied as one; use a checkpoint that treats them alike")
    return bool(named) or _names(block + fused, patterns)
