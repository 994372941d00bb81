"""Which tensor of a Hugging Face checkpoint goes where in the model, and which part of it a rank gets."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fp8 import FP8, LAYERS, quantize, scale_columns
from ..model import ModelConfig
from ..parallel import Group

FUSED = {fused: parts for fused, parts in LAYERS.values() if len(parts) > 1}  # what Phi-3 and GLM store as one
SCALE = ".scale"  # ends our name of a weight's scales
SCALES = (".weight_scale", ".weight_scale_inv")  # theirs; by both the weight is multiplied
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
STAGED = 2**25  # bytes that are copied to a GPU at a time


@dataclass(frozen=True)
class Place:
    """Where one tensor of a checkpoint goes: rows `start` to `start + shape[0]` of a parameter of `Transformer`.

    order: of the tensor's rows within a head, which one stands where in the parameter. None: all as they are.
    columns: of scales, the columns of the weight that share one.
    """

    parameter: str
    start: int
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    columns: int = 1


def places(config: ModelConfig, shards: int = 1) -> dict[str, Place]:
    """Hugging Face's tensor names -> places in `Transformer`'s parameters. shards: see `fp8.scale_columns`."""
    dim, ffn, q, kv = config.dim, config.ffn_dim, config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    order = rotary_order(config)
    table = {EMBEDDING: Place("embedding.weight", 0, (config.vocab_rows, dim)),
             "model.norm.weight": Place("norm.weight", 0, (dim,))}

    def linear(theirs: str, ours: str, kind: str, start: int, rows: int, columns: int, bias: bool = False) -> None:
        ordered = order if theirs.endswith((".q_proj", ".k_proj")) else None
        table[f"{theirs}.weight"] = Place(f"{ours}{kind}.weight", start, (rows, columns), ordered)
        if bias:
            table[f"{theirs}.bias"] = Place(f"{ours}{kind}.bias", start, (rows,), ordered)
        if config.float8 is not None and ours + kind not in config.float8.wide:
            together = scale_columns(config, kind, shards)
            table[theirs + SCALE] = Place(f"{ours}{kind}{SCALE}", start, (rows, columns // together), ordered, together)

    if not config.tie_word_embeddings:
        linear("lm_head", "", "output", 0, config.vocab_rows, dim)
    for i in range(config.n_layer):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        for norm, name in norm_names(config).items():
            table[f"{theirs}{name}.weight"] = Place(f"{ours}{norm}.weight", 0, (dim,))
        for norm, heads in (("q_norm", config.n_head), ("k_norm", config.n_kv_head)) if config.qk_norm else ():
            width = config.head_dim * (heads if config.qk_norm_whole else 1)
            table[f"{theirs}self_attn.{norm}.weight"] = Place(f"{ours}attention.{norm}.weight", 0, (width,), order)
        for part, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            linear(f"{theirs}self_attn.{part}_proj", ours, "attention.qkv", start, rows, dim, config.qkv_bias)
        linear(theirs + "self_attn.o_proj", ours, "attention.out", 0, dim, q, config.out_bias)
        if config.sinks:
            table[f"{theirs}self_attn.sinks"] = Place(f"{ours}attention.sinks", 0, (config.n_head,))
        if config.num_experts:
            linear(theirs + "mlp.gate", ours, "mlp.router", 0, config.num_experts, dim, config.mlp_bias)
        names = [f"mlp.experts.{n}." for n in range(config.num_experts)] or ["mlp."]
        for n, name in enumerate(names):
            linear(f"{theirs}{name}gate_proj", ours, "mlp.gate_up", 2 * n * ffn, ffn, dim, config.mlp_bias)
            linear(f"{theirs}{name}up_proj", ours, "mlp.gate_up", (2 * n + 1) * ffn, ffn, dim, config.mlp_bias)
            linear(f"{theirs}{name}down_proj", ours, "mlp.down", n * dim, dim, ffn, config.mlp_bias)
    return table


def norm_names(config: ModelConfig) -> dict[str, str]:
    """Our norms of a layer by the names that a family gives them: what comes before the MLP has the name of what comes
    after attention, unless there is such a norm, too."""
    before = {"attention_norm": "input_layernorm",
              "mlp_norm": "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"}
    after = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    return (before if config.pre_norm else {}) | (after if config.post_norm else {})


def scale_of(weight: str) -> str:
    """The name of a weight's scales."""
    return weight.removesuffix(".weight") + SCALE


def rotary_order(config: ModelConfig) -> tuple[int, ...] | None:
    """Of a head of queries or keys, the dimensions of a checkpoint in the order that `attention.rotate` wants: the
    two that a pair turns half a head apart, what is not rotated behind each half's. None: as they are."""
    turned, still = torch.arange(config.rotary_dim), torch.arange(config.rotary_dim, config.head_dim)
    halves = turned.view(-1, 2).T if config.rotary_interleaved else turned.view(2, -1)
    order = tuple(torch.cat([halves, still.view(2, -1)], 1).flatten().tolist())
    return None if order == tuple(range(config.head_dim)) else order


def separate(name: str, tensor: Tensor, table: dict[str, Place], config: ModelConfig,
             stored: Iterable[str]) -> dict[str, Tensor]:
    """Tensors by the names of `places`: one that holds several of these, one below the other, is taken apart, and
    scales are spread over the blocks of the table. What does not fit the table stays as it is."""
    # Old checkpoints store RoPE's frequencies. An input_scale is one for all inputs ever: they are scaled row by row.
    is_image = name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))
    if ".rotary_emb." in name or is_image or (config.float8 is not None and name.endswith(".input_scale")):
        return {}
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.")  # of a Gemma 3 with images
    if name == OUTPUT and OUTPUT not in table:  # a tied one, perhaps beside the embedding
        return {} if EMBEDDING in stored else {EMBEDDING: tensor}
    if config.activation == "clamped":
        name = name.replace(".mlp.router.", ".mlp.gate.")
        if name.endswith(("up_proj", "down_proj", "_proj_bias")) and len(tensor.shape) == 3 - name.endswith("_bias"):
            return dict(_of_experts(name, tensor))
    for ending in SCALES if config.float8 is not None else ():
        name = name.removesuffix(ending) + SCALE if name.endswith(ending) else name
    names = [name]
    for fused, parts in FUSED.items():
        apart = [name.replace(fused, part) for part in parts]
        names = apart if fused in name and all(part in table for part in apart) else names
    place, sizes = table.get(names[0]), [table[part].shape[0] for part in names if part in table]
    if place is not None and name.endswith(SCALE):
        spread = config.float8.spread(tensor, (sum(sizes), place.shape[1]), place.columns)
        tensor = tensor if spread is None else spread
    if len(names) > 1 and tensor.shape[:1] == (sum(sizes),):
        return dict(zip(names, tensor.split(sizes), strict=True))
    return {name: tensor}


def _of_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss holds all experts in one tensor [E, columns, rows], or biases [E, rows], or packed [E, rows, columns];
    rows of gate and up stand in turns."""
    layer, _, what = name.removesuffix("_bias").rpartition(".")
    kind = "bias" if name.endswith("_bias") else "weight"
    for n, one in enumerate(tensor):
        one = one.T if kind == "weight" and isinstance(tensor, Tensor) else one
        parts = (("gate_proj", one[::2]), ("up_proj", one[1::2])) if what == "gate_up_proj" else ((what, one),)
        yield from ((f"{layer}.{n}.{part}.{kind}", rows) for part, rows in parts)


def cut(name: str, tensor: Tensor, shape: tuple[int, ...], group: Group) -> Tensor:
    """This rank's part of a tensor, of this shape, split in the dimension that differs. The last may be shorter."""
    for dim, (whole, part) in enumerate(zip(tensor.shape, shape, strict=True)):
        if whole != part:
            start = min(group.rank * part, whole)
            return tensor.narrow(dim, start, min(part, whole - start))
    if name.endswith(("o_proj.bias", "down_proj.bias")) and group.rank > 0:
        return torch.zeros_like(tensor)  # it is added on every rank before the sum
    return tensor


def put(parameters: dict[str, Tensor], parts: dict[str, Place], name: str, tensor: Tensor, group: Group | None) -> None:
    """Writes a tensor to its place, rounded to fp8 if that is: as a whole, so that ranks have the scales of one."""
    parameter, found = parameters[parts[name].parameter], {name: tensor}
    if parameter.dtype == FP8 != tensor.dtype:
        found[name], found[scale_of(name)] = quantize(tensor, parameter.device)
    for name, tensor in found.items():
        part = parts[name]
        fill(parameters[part.parameter], part, tensor if group is None else cut(name, tensor, part.shape, group))


def fill(parameter: Tensor, place: Place, tensor: Tensor) -> None:
    """Writes a tensor to its place; rows that it lacks (words that fill up the last rank's share) become zero."""
    if place.order is not None:
        tensor = tensor.unflatten(0, (-1, len(place.order)))[:, list(place.order)].flatten(0, 1)
    rows = parameter[place.start : place.start + place.shape[0]]
    if rows.is_cuda and tensor.device.type == "cpu":  # through pinned memory, which the host fills while it copies
        step = max(STAGED * len(tensor) // max(tensor.nbytes, 1), 1)
        for target, source in zip(rows[: len(tensor)].split(step), tensor.split(step), strict=True):
            target.copy_(source.pin_memory(), non_blocking=True)
    else:
        rows[: len(tensor)].copy_(tensor)
    rows[len(tensor) :].zero_()
