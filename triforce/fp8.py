"""Weights in fp8: the layers that keep them, and how a model gets such layers.

A weight is e4m3 times a scale, which some columns of a row share. Where the device multiplies in fp8 and a row
has one scale, the product is taken in fp8, with activations scaled row by row. Elsewhere the weight is widened to the
activations' dtype as it is used.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import cpu
from .errors import UserError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
STEP = 1024  # rows at a time, where a whole matrix in float32 may be gigabytes
# A block's linear layers: our name, theirs where one tensor holds all of it, and theirs of its parts.
LAYERS = {"attention.qkv": ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
          "attention.out": ("self_attn.o_proj", ("self_attn.o_proj",)),
          "mlp.gate_up": ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
          "mlp.down": ("mlp.down_proj", ("mlp.down_proj",))}


@dataclass(frozen=True)
class Float8:
    """Which of a model's linear layers are in fp8, and how many weights share a scale."""

    rows: int  # of a matrix in the checkpoint that share a scale; 0: all
    columns: int
    wide: tuple[str, ...] = ("output",)  # linear layers that are not in fp8, by the names of `Transformer`
    made: bool = False  # the checkpoint's weights are wider, and rounded as they are read

    def spread(self, scale: Tensor, shape: tuple[int, int], columns: int) -> Tensor | None:
        """A checkpoint's scales in float32, [shape]: each is for a row and `columns` columns of a weight. None: their
        number does not fit, or they are no floating-point numbers."""
        blocks = [torch.arange(count) * size // step if step else torch.zeros(count, dtype=torch.long)
                  for count, size, step in zip(shape, (1, columns), (self.rows, self.columns), strict=True)]
        implied = [int(block[-1]) + 1 for block in blocks]
        fits = scale.numel() == math.prod(implied) and (scale.dim() != 2 or list(scale.shape) == implied)
        if not (fits and scale.is_floating_point()):
            return None
        return scale.reshape(implied)[blocks[0]][:, blocks[1]].float()


MADE = Float8(1, 0, made=True)  # a scale an output channel


def has_nan(weight: Tensor) -> bool:
    """Whether e4m3 numbers are nan: of all bytes, 0x7f and 0xff are."""
    return int(weight.view(torch.int8).max()) == 0x7F or int(weight.view(torch.uint8).max()) == 0xFF


@torch.no_grad()
def quantize(weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (e4m3 [N, K], a scale a row [N, 1]), on a device."""
    quantized = torch.empty(weight.shape, dtype=FP8, device=device)
    scales = torch.empty(len(weight), 1, device=device)
    # Divided in float32, where no scale rounds to zero: in float16 that of a matrix of zeros does, and 0 / 0 is nan.
    for rows, own, given in zip(*(x.split(STEP) for x in (quantized, scales, weight)), strict=True):
        given = given.to(device).float()
        own.copy_(row_scales(given))
        rows.copy_((given / own).clamp(-LARGEST, LARGEST))
    return quantized, scales


def row_scales(x: Tensor) -> Tensor:
    """[..., K] -> [..., 1] float32: with which each row's largest element is the largest of e4m3."""
    return (x.float().abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-12)


@functools.cache
def multiplies(device: torch.device) -> bool:
    """Whether a device multiplies in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class ScaledLinear(nn.Module):
    """nn.Linear whose weight is kept in fp8: weight [N, K] e4m3, scale [N, K / columns] float32.

    Args:
        columns: of a row that share a scale. They divide K.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=FP8), requires_grad=False)
        scales = torch.empty(out_features, in_features // columns, dtype=torch.float32)
        self.scale = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_buffer("one", torch.ones(()), persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> "ScaledLinear":
        """A linear layer, rounded, with a scale for each output channel. They share the bias."""
        layer = cls(linear.in_features, linear.out_features, False, linear.in_features)
        quantized = quantize(linear.weight.detach(), linear.weight.device)
        layer.weight, layer.scale = (nn.Parameter(x, requires_grad=False) for x in quantized)
        layer.bias, layer.one = linear.bias, torch.ones((), device=linear.weight.device)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        if not (multiplies(x.device) and self.fits_products):
            return F.linear(x, self.widened(x.dtype), self.bias)
        # A long prompt by parts: their products are in float32.
        parts = [self.multiplied(part) for part in x.flatten(0, -2).split(STEP)]
        y = (torch.cat(parts) if len(parts) > 1 else parts[0]).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias

    @property
    def fits_products(self) -> bool:
        """Whether each row has one scale, and products in fp8 exist for these sizes."""
        return self.scale.shape[1] == 1 and not any(size % 16 for size in self.weight.shape)

    def multiplied(self, x: Tensor) -> Tensor:
        """x [R, K] -> [R, N], both in fp8. Scales multiply the product: itself it is fast with one scale a tensor."""
        scale = row_scales(x)
        rows = (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
        y = torch._scaled_mm(rows, self.weight.t(), scale_a=self.one, scale_b=self.one, out_dtype=torch.float32)
        return (y * scale * self.scale.t()).to(x.dtype)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight as the scales make it, rounded once: [N, K]."""
        weight, scale = self.weight, self.scale
        if weight.device.type == "cpu":
            # PyTorch converts e4m3 number by number there, which takes ten times as long. Shifted, the bits of e4m3 are
            # those of its 256th part in float16; nan would not be, and no weight is.
            bits = weight.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
            weight, scale = bits.view(torch.float16), scale * 256
        weight = weight.to(dtype)
        weight.view(*scale.shape, -1).mul_(scale[..., None])
        return weight


def linear_shape(config, layer: str) -> tuple[int, int]:
    """Rows and columns of a block's linear layer, or of `output`. config: a `ModelConfig`."""
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    return {"attention.qkv": (q + 2 * kv, config.dim), "attention.out": (config.dim, q),
            "mlp.gate_up": (2 * config.ffn_dim, config.dim), "mlp.down": (config.dim, config.ffn_dim),
            "output": (config.vocab_rows, config.dim)}[layer]


def scale_columns(config, layer: str, shards: int = 1) -> int:
    """Columns of a linear layer that share a scale: as many as in the checkpoint, or fewer where the share of one of so
    many ranks ends within a block."""
    _, columns = linear_shape(config, layer)
    return math.gcd(config.float8.columns, columns // shards if layer in ("attention.out", "mlp.down") else columns)


def put_in(model: nn.Module) -> None:
    """Puts layers in fp8 in the place of those that are, by the model's config."""
    config = model.config
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        layer = ".".join(name.split(".")[-2:])  # the same in every block
        if name not in config.float8.wide:
            rows, columns = linear_shape(config, layer)
            bias = model.get_submodule(name).bias is not None
            model.set_submodule(name, ScaledLinear(columns, rows, bias, scale_columns(config, layer)))


def place(model: nn.Module, device) -> None:
    """A model's parameters were allocated on a device: the constants of its layers in fp8 are put there, too."""
    for module in model.modules():
        if isinstance(module, ScaledLinear):
            module.one = torch.ones((), device=device)


@torch.no_grad()
def widen(model: nn.Module) -> nn.Module:
    """Without fp8: layers that are in it are widened for good, one after the other."""
    for name in [name for name, module in model.named_modules() if isinstance(module, ScaledLinear)]:
        scaled = model.get_submodule(name)
        linear = nn.Linear(*reversed(scaled.weight.shape), False, device="meta")
        linear.weight, linear.bias = nn.Parameter(scaled.widened(model.dtype), requires_grad=False), scaled.bias
        model.set_submodule(name, linear)
    model.config = replace(model.config, float8=None)
    if model.device.type == "cpu":
        cpu.adapt(model)
    return model


@torch.no_grad()
def fp8_copy(target: nn.Module) -> nn.Module:
    """A copy for the retrieval level alone, which only drafts: the linear layers of its blocks are in fp8, and the
    rest, the output layer too, is the target's own. Ranks still have to share its blocks: see `parallel.share`."""
    with torch.device("meta"):
        copy = type(target)(target.config)
    copy.rope, copy.embedding, copy.norm, copy.output = target.rope, target.embedding, target.norm, target.output
    for mine, theirs in zip(copy.layers, target.layers, strict=True):
        for name, module in theirs.named_modules():
            if isinstance(module, nn.RMSNorm):
                mine.set_submodule(name, module)
        for name in LAYERS:
            mine.set_submodule(name, ScaledLinear.of(theirs.get_submodule(name)))
    copy.group = target.group
    return copy.eval()


def check_copy(config, device: torch.device | None = None) -> None:
    """Raises UserError where `fp8_copy` cannot serve: the weights are fp8 already, or the device cannot multiply in
    fp8. device: None: one that can."""
    if config.float8 is not None:
        raise UserError("draft_dtype 'fp8' copies wider weights, and this target's are fp8 already; leave it out")
    if device is not None and not multiplies(device):
        found = torch.cuda.get_device_properties(device).name if device.type == "cuda" else f"a {device.type}"
        raise UserError(f"draft_dtype 'fp8' needs a CUDA GPU of compute capability 8.9 or later, and this is {found}; "
                        "leave it out")


def copy_bytes(config) -> int:
    """Memory of `fp8_copy` beyond the target's own: a byte a weight of the blocks' linear layers."""
    return config.n_layer * sum(math.prod(linear_shape(config, layer)) for layer in LAYERS)


def work_bytes(shape: tuple[int, int], chunk: int, itemsize: int) -> int:
    """The most that a layer holds besides, for `chunk` rows: its weight in float16 and widened, or products."""
    n, k = shape
    return max(n * k * (2 + itemsize), chunk * n * itemsize + min(chunk, STEP) * (8 * n + 5 * k))
