"""Weights of 4 or 8 bits, widened as they are read: in words of 32 by GPTQ, AWQ and compressed-tensors, or MXFP4.

Shapes: O outputs and I inputs of a linear layer; G groups of inputs that share a scale and a zero.

Sources: GPTQ arXiv 2210.17323 and the files of AutoGPTQ; AWQ arXiv 2306.00978, its "gemm" layout; the format
"pack-quantized" of compressed-tensors.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from .files import Fields, about, guarded, read_json, whole
from .quantization import expect, only_group

WORD = 32
PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
         "weight_g_idx")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word eight neighbours stand
E2M1 = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]  # numbers of 4 bits
# The values that a key may have; None: it may be absent.
RULES = {
    "gptq": {"bits": (4, 8), "dynamic": ({}, None), "is_marlin_format": (False, None),
             **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2", None))},
    "awq": {"bits": (4,), "version": ("gemm", "GEMM", None), "format": ("gemm", None), "zero_point": (True,)},
    "compressed-tensors": {"format": ("pack-quantized",), "kv_cache_scheme": (None,), "transform_config": ({}, None)},
    "mxfp4": {}}
GROUP = {"input_activations": (None,), "output_activations": (None,), "format": ("pack-quantized", None)}
WEIGHTS = {"num_bits": (4, 8), "type": ("int",), "strategy": ("group", "channel"), "dynamic": (False, None)}


@dataclass(frozen=True)
class Packing:
    """How a checkpoint packs its weights."""

    method: str
    bits: int
    group_size: int  # inputs of a group; -1: all
    less: int = 0  # by so much are zeros stored smaller


def packing_of(quantization: Fields) -> Packing | None:
    """Of a quantization_config; None: its weights are not packed. Raises UserError for what is packed otherwise."""
    method = quantization.values.get("quant_method")
    if method == "compressed-tensors" and quantization.values.get("format") != "pack-quantized" or method not in RULES:
        return None
    expect(quantization, RULES[method])
    if method == "mxfp4":
        return Packing(method, 4, 32)
    if method != "compressed-tensors":
        said = quantization.values
        less = method == "gptq" and (said.get("checkpoint_format") or said.get("format")) != "gptq_v2"
        return Packing(method, said["bits"], quantization.get("group_size", whole(-1, 2**20)), int(less))
    group = only_group(quantization, GROUP)
    weights = group.part("weights")
    expect(weights, WEIGHTS)
    size = weights.get("group_size", whole(-1, 2**20)) if weights.values["strategy"] == "group" else -1
    return Packing(method, weights.values["num_bits"], size)


class PackedWeight:
    """A weight [O, I] as it is stored. It stands where a tensor would, until `wide` makes one."""

    def __init__(self, packing: Packing, parts: dict[str, Tensor], name: str):
        self.packing, self.parts = packing, parts
        needs_zeros = packing.method != "compressed-tensors"  # whose zeros are the middle where it stores none
        self.words, self.scales = (parts.get(name, parts.get(other)) for name, other in (
            ("qweight", "weight_packed"), ("scales", "weight_scale")))
        if self.words is None or self.scales is None or needs_zeros and "qzeros" not in parts:
            raise UserError(f"{name} is packed, and has only {', '.join(sorted(parts))}; download it again")
        self.dtype, per = self.scales.dtype, WORD // packing.bits
        rows, columns = self.words.shape
        self.shape = torch.Size({"gptq": (columns, rows * per), "awq": (columns * per, rows)}.get(
            packing.method, parts.get("weight_shape", torch.tensor([rows, columns * per])).tolist()))

    def wide(self) -> Tensor:
        """[O, I] in the dtype of the scales: (number - zero) * scale."""
        method, inputs = self.packing.method, self.shape[1]
        scales = self.scales if method == "compressed-tensors" else self.scales.T
        if method == "awq":
            numbers, zeros = (self._unpacked(self.parts[name]).T for name in ("qweight", "qzeros"))
        elif method == "gptq":
            # A 1 was taken off each number of a word at once: a zero of 0 borrowed from the next one.
            ones = self.packing.less * (0xFFFFFFFF // ((1 << self.packing.bits) - 1))
            numbers, zeros = self._unpacked(self.words.T), self._unpacked(self.parts["qzeros"] + ones).T
        else:
            numbers, zeros = self._unpacked(self.words), self._zeros()
        group = next((self.parts[name].long() for name in ("g_idx", "weight_g_idx") if name in self.parts), None)
        if group is None or bool((group < 0).any()):
            size = inputs if self.packing.group_size == -1 else self.packing.group_size
            group = torch.arange(inputs) // size
        if not (0 <= numbers.shape[1] - inputs < WORD // self.packing.bits and len(group) == inputs
                and group.max() + 1 == scales.shape[1] and zeros.shape in (scales.shape, (1, 1))
                and scales.isfinite().all()):
            raise UserError(f"a weight of {inputs} inputs has {numbers.shape[1]} numbers, scales {tuple(scales.shape)} "
                            f"and zeros {tuple(zeros.shape)}, which do not fit {self.packing}; download it again")
        return (numbers[:, :inputs] - zeros.expand_as(scales)[:, group]).to(scales.dtype) * scales[:, group]

    def split(self, sizes: list[int]) -> tuple[Tensor, ...]:
        return self.wide().split(sizes)

    def _zeros(self) -> Tensor:
        """Of compressed-tensors, which packs outputs: [O, G], or one for all."""
        zeros = self.parts.get("weight_zero_point")
        if zeros is None:
            return torch.tensor([[2 ** (self.packing.bits - 1)]])
        return self._unpacked(zeros.T).T[: self.shape[0]]

    def _unpacked(self, words: Tensor) -> Tensor:
        """[..., N] words -> [..., N * numbers of a word], int32."""
        if words.dtype != torch.int32:
            raise UserError(f"packed numbers are {words.dtype}, where words of int32 belong; download it again")
        bits = self.packing.bits
        numbers = words[..., None] >> torch.arange(0, WORD, bits, dtype=torch.int32) & (1 << bits) - 1
        return (numbers[..., AWQ_ORDER] if self.packing.method == "awq" else numbers).flatten(-2)


class Mxfp4:
    """Numbers of 4 bits with a power of two for every 32 (the MX formats of the Open Compute Project), two in a byte:
    blocks [..., G, 16] and scales [..., G], uint8. It stands where a tensor [..., 32 * G] would."""

    dtype = torch.bfloat16  # which holds each number exactly

    def __init__(self, blocks: Tensor, scales: Tensor):
        if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.shape != (*scales.shape, 16):
            raise UserError(f"MXFP4 has {blocks.dtype} blocks {tuple(blocks.shape)} and {scales.dtype} scales "
                            f"{tuple(scales.shape)}, where bytes [..., G, 16] and [..., G] belong; download it again")
        self.blocks, self.scales = blocks, scales
        self.shape = torch.Size((*scales.shape[:-1], 32 * scales.shape[-1]))

    def __getitem__(self, key) -> "Mxfp4":
        return Mxfp4(self.blocks[key], self.scales[key])

    def wide(self) -> Tensor:
        numbers = torch.stack([self.blocks & 15, self.blocks >> 4], -1).flatten(-2).int()  # the low half comes first
        scaled = torch.ldexp(torch.tensor(E2M1)[numbers], self.scales[..., None].int() - 127)
        return scaled.flatten(-2).to(self.dtype)


def unpacked(folder: Path, stored: list[tuple[str, Tensor]],
             known) -> list[tuple[str, "Tensor | PackedWeight | Mxfp4"]]:
    """The tensors of a folder, each packed weight as one. known: names that have a place. AutoGPTQ gives layers without
    biases some of zeros: those go."""
    path = Path(folder) / "config.json"
    with about(path):
        packing = packing_of(Fields(read_json(path)).part("quantization_config"))
    if packing is None:
        return stored
    if packing.method == "mxfp4":
        found = dict(stored)
        with about(folder), guarded("a packed weight has no scales"):
            return [(name.removesuffix("_blocks"), Mxfp4(one, found[name.replace("_blocks", "_scales")]))
                    if name.endswith("_blocks") else (name, one) for name, one in stored if name[-7:] != "_scales"]
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored:
        layer, _, part = name.rpartition(".")
        if part in PARTS:
            layers.setdefault(layer, {})[part] = tensor
    rest = [(name, tensor) for name, tensor in stored if name.rpartition(".")[2] not in PARTS
            and not (name.endswith(".bias") and name not in known and not tensor.any())]
    with about(folder):
        return rest + [(f"{layer}.weight", PackedWeight(packing, parts, layer)) for layer, parts in layers.items()]
