"""A small trained model in the body of a large one: the large one's shape and cost, the small one's words.

Benchmarks of a shape need a checkpoint whose acceptance is that of a trained model on a real text. Where the real one
is not at hand, `widen` puts the small model's weights into the top-left corner of the large shape, random weights
elsewhere, and zeros wherever those would reach the residual stream. Logits agree up to rounding of the dtype. Every
figure measured on such a model has to say so.

    python benchmarks/widen.py --shape llama-2-7b --draft-shape llama-68m --out DIR --dtype float16

writes the embedded pair so widened as two Hugging Face folders, DIR/target and DIR/draft, for whatever reads a folder.

Shapes: d and D are the small and the large width, h and H their head dimensions.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from triforce.errors import UserError
from triforce.hf.checkpoint import load_model, parse_dtype
from triforce.hf.folders import TINY
from triforce.hf.names import cut, fill, places
from triforce.model import ModelConfig, Transformer
from triforce.parallel import Group, join, shard_config

SHAPES = {
    "llama-2-7b": ModelConfig(32000, 4096, 32, 32, 32, 128, 11008),
    "llama-2-13b": ModelConfig(32000, 5120, 40, 40, 40, 128, 13824),
    "llama-3.1-8b": ModelConfig(128256, 4096, 32, 32, 8, 128, 14336),
    "llama-3.1-70b": ModelConfig(128256, 8192, 80, 64, 8, 128, 28672),
    "llama-68m": ModelConfig(32000, 768, 2, 12, 12, 64, 3072),
    "tinyllama-1.1b": ModelConfig(32000, 2048, 22, 32, 4, 64, 5632),
}
PADDING_LOGIT = -200.0  # below this in float32 no probability is left


@torch.no_grad()
def widen(small: Transformer, shape: ModelConfig, *, vocab_size: int | None = None, positions: int = 0, seed: int = 0,
          device="cpu", dtype=torch.bfloat16, group: Group | None = None) -> Transformer:
    """A model of `shape` that says what `small` says; ids from small's vocabulary on have logits below -200.

    Args:
        vocab_size: replaces the shape's, so that a draft has its target's.
        positions: takes at least so many, for what they cost: beyond those that it was trained on, `small` says little.
        group: makes this rank's part only; it holds one whole layer at a time.

    Raises:
        ValueError: the small model does not fit into the shape.
    """
    shape = _fitted(small.config, shape, vocab_size, positions)
    if group is None:
        return _fill(small, shape, 0, seed, device, dtype)
    whole = None
    for i in range(shape.n_layer):
        part = shard(_fill(small, replace(shape, n_layer=1), i, seed + i, device, dtype), group)
        if whole is None:
            whole = part
        else:
            whole.layers.append(part.layers[0])
    whole.config = replace(whole.config, n_layer=shape.n_layer)
    return whole


def shard(model: Transformer, group: Group) -> Transformer:
    """A rank's share of a whole model, by the same rules by which a checkpoint is read. The whole one is left alone."""
    local = Transformer.empty(shard_config(model.config, group), model.device, model.dtype)
    whole, parts = dict(model.named_parameters()), dict(local.named_parameters())
    theirs, ours, finer = places(model.config), places(local.config), places(model.config, group.size)
    with torch.no_grad():
        for name, place in theirs.items():
            tensor = whole[place.parameter][place.start : place.start + place.shape[0]]
            for dim, (size, wanted) in enumerate(zip(place.shape, finer[name].shape, strict=True)):
                tensor = tensor.repeat_interleave(wanted // size, dim) if wanted > size else tensor
            to = replace(ours[name], order=None)  # it is in order already
            fill(parts[to.parameter], to, cut(name, tensor, to.shape, group))
    return join(local, group)


def _fitted(a: ModelConfig, shape: ModelConfig, vocab_size: int | None, positions: int) -> ModelConfig:
    """The shape with what a small model of config `a` needs of it."""
    shape = replace(shape, vocab_size=vocab_size or shape.vocab_size, rope_theta=a.rope_theta,
                    rope_scaling=a.rope_scaling, max_position_embeddings=max(a.max_position_embeddings, positions),
                    norm_eps=a.norm_eps * a.dim / shape.dim, tie_word_embeddings=False)
    fits = (a.dim < shape.dim, a.n_layer <= shape.n_layer, a.n_kv_head <= shape.n_kv_head, a.ffn_dim <= shape.ffn_dim,
            a.n_head == a.n_kv_head, shape.head_dim in (a.head_dim, 2 * a.head_dim), a.vocab_size <= shape.vocab_size)
    if not all(fits):
        raise ValueError(f"a model of width {a.dim}, {a.n_layer} layers, {a.n_head} heads does not fit into {shape}")
    return shape


@torch.no_grad()
def save(small_folder: Path, shape: ModelConfig, folder: Path, *, vocab_size: int | None = None, positions: int = 0,
         seed: int = 0, device="cpu", dtype=torch.bfloat16) -> Path:
    """`widen` of the checkpoint in small_folder, written as a Hugging Face folder, a layer at a time: one shard each.

    Raises:
        UserError: the folder holds a checkpoint already.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another --out")
    small = load_model(small_folder, device, torch.float32)
    shape = _fitted(small.config, shape, vocab_size, positions)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i in range(shape.n_layer):
        part = _fill(small, replace(shape, n_layer=1), i, seed + i, device, dtype)
        parameters, tensors = dict(part.named_parameters()), {}
        for name, place in places(part.config).items():
            if ".layers." in name or i == 0:  # what is not of a layer is the same in all parts
                rows = parameters[place.parameter][place.start : place.start + place.shape[0]]
                tensors[name.replace(".layers.0.", f".layers.{i}.")] = rows.cpu().contiguous()
        file = f"model-{i + 1:05d}-of-{shape.n_layer:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((small_folder / "config.json").read_text())
    config |= {"hidden_size": shape.dim, "num_hidden_layers": shape.n_layer, "num_attention_heads": shape.n_head,
               "num_key_value_heads": shape.n_kv_head, "head_dim": shape.head_dim, "intermediate_size": shape.ffn_dim,
               "vocab_size": shape.vocab_size, "max_position_embeddings": shape.max_position_embeddings,
               "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": False,
               "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer.model", "tokenizer_config.json"):
        shutil.copyfile(small_folder / name, folder / name)
    return folder


def _fill(small: Transformer, shape: ModelConfig, first: int, seed: int, device, dtype) -> Transformer:
    """Layers `first` and on of the large model, as many as `shape` has, with embedding and output."""
    a = small.config
    big = Transformer.random(shape, seed=seed, device=device, dtype=dtype)
    d, stretch = a.dim, shape.head_dim // a.head_dim
    group = shape.n_head // shape.n_kv_head
    # Rotary pair j turns at theta ** (-2j / h). At twice the head dimension, pair 2j turns at the same speed.
    pairs = torch.arange(a.head_dim // 2) * stretch
    dims = torch.cat([pairs, pairs + shape.head_dim // 2]).to(device)
    norm_scale = (d / shape.dim) ** 0.5

    def put(target, rows, columns, source):
        target[rows[:, None], columns] = source.to(device, dtype)

    low = torch.arange(d, device=device)
    big.embedding.weight.zero_()
    big.embedding.weight[: a.vocab_size, :d] = small.embedding.weight.to(device, dtype)
    # A small constant in one more channel; the norm sees next to nothing of it, the padded logits all.
    constant = 0.1 * small.embedding.weight.float().pow(2).mean().sqrt().item()
    big.embedding.weight[:, d] = constant
    big.output.weight.zero_()
    big.output.weight[: a.vocab_size, :d] = small.output.weight.to(device, dtype)
    big.output.weight[a.vocab_size :, d] = -6e4
    big.norm.weight.fill_(norm_scale)
    big.norm.weight[d] = 10 * norm_scale
    big.norm.weight[:d] = (small.norm.weight * norm_scale).to(device, dtype)
    for i, layer in enumerate(big.layers):
        layer.attention.out.weight.zero_()
        layer.mlp.down.weight.zero_()
        if first + i >= a.n_layer:
            continue
        own = small.layers[first + i]
        for name in ("attention_norm", "mlp_norm"):
            weight = getattr(layer, name).weight
            weight[:d] = (getattr(own, name).weight * norm_scale).to(device, dtype)
            weight[d:] = 0  # keeps the constant out of every layer
        q, k, v = own.attention.qkv.weight.split([a.n_head * a.head_dim] + [a.n_kv_head * a.head_dim] * 2)
        big_qkv = layer.attention.qkv.weight
        starts = (0, shape.n_head * shape.head_dim, (shape.n_head + shape.n_kv_head) * shape.head_dim)
        for head in range(a.n_head):
            own_rows = slice(head * a.head_dim, (head + 1) * a.head_dim)
            at_q = head * group * shape.head_dim
            at_kv = head * shape.head_dim
            big_qkv[at_q : at_q + shape.head_dim] = 0  # unused pairs of the query: they must not add to the scores
            put(big_qkv, at_q + dims, low, q[own_rows].float() * stretch**0.5)
            put(big_qkv, starts[1] + at_kv + dims, low, k[own_rows])
            rows = starts[2] + at_kv + torch.arange(a.head_dim, device=device)
            put(big_qkv, rows, low, v[own_rows])
            columns = at_q + torch.arange(a.head_dim, device=device)
            put(layer.attention.out.weight, low, columns, own.attention.out.weight[:, own_rows])
        gate, up = own.mlp.gate_up.weight.chunk(2)
        layer.mlp.gate_up.weight[: a.ffn_dim, :d] = gate.to(device, dtype)
        layer.mlp.gate_up.weight[shape.ffn_dim : shape.ffn_dim + a.ffn_dim, :d] = up.to(device, dtype)
        layer.mlp.down.weight[:d, : a.ffn_dim] = own.mlp.down.weight.to(device, dtype)
    return big


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the embedded pair, widened to large shapes, as folders.")
    parser.add_argument("--shape", default="llama-2-7b", choices=SHAPES)
    parser.add_argument("--draft-shape", default="llama-68m", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True, help="gets two folders, target and draft")
    parser.add_argument("--dtype", default="bfloat16", help="float16, bfloat16 (default) or float32")
    parser.add_argument("--positions", type=int, default=0, help="that the target may attend over, at least: beyond "
                        "those of the embedded pair it says little")
    args = parser.parse_args()
    how = {"device": "cuda" if torch.cuda.is_available() else "cpu", "vocab_size": SHAPES[args.shape].vocab_size}
    try:
        how["dtype"] = parse_dtype(args.dtype)
        for name, shape in (("target", args.shape), ("draft", args.draft_shape)):
            positions = args.positions if name == "target" else 0
            folder = save(TINY / name, SHAPES[shape], args.out / name, positions=positions, **how)
            print(f"{folder} holds {shape} in {args.dtype}", flush=True)
    except (UserError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
