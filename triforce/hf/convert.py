"""Rewrites a checkpoint as safetensors of a chosen dtype, in the same Hugging Face layout and under the same names.

It knows nothing of the model: tensors go through as they are named. Memory stays at one shard: files are mapped, and
each shard of the result is written before the next is begun.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from .checkpoint import open_tensors, output_is_embedding, parse_dtype
from .download import TEXTS
from .files import check_file, read_json
from .folders import find_weights
from .places import OUTPUT

MAX_SHARD_BYTES = 4_000_000_000


def convert(checkpoint_dir: str | Path, out_dir: str | Path | None = None, dtype: str | torch.dtype | None = None,
            max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Writes safetensors beside config.json and the tokenizer, and returns their folder.

    Nothing gets its final name before everything is written, so an interrupted run leaves the source as it was.

    Args:
        out_dir: None writes into checkpoint_dir itself, beside its .bin files.
        dtype: of all floating-point tensors; None keeps each tensor's own.
    """
    source = Path(checkpoint_dir)
    folder = Path(out_dir) if out_dir else source
    config = read_json(source / "config.json")
    dtype = None if dtype is None else parse_dtype(dtype)
    if dtype is not None and config.get("quantization_config"):
        raise UserError(f"{source} is quantized, and no dtype can be given to weights without their scales; leave out "
                        "--dtype")
    files = find_weights(source)
    if any(folder.glob("model*.safetensors*")):
        raise UserError(f"{folder} holds safetensors already; choose another --out-dir")
    # On the same disk, so that moving a file out of it is one atomic step.
    work = folder / ".converting"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        tied = config.get("tie_word_embeddings") is True and output_is_embedding(files)
        last = write_shards(files, work, dtype, tied, max_shard_bytes)
        if folder.resolve() != source.resolve():
            copy_texts(source, work)
        if dtype is not None:
            spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
            config.update(dict.fromkeys(spelled, str(dtype).removeprefix("torch.")))
            write_json(work / "config.json", config)
        written = [path for path in work.rglob("*") if path.is_file()]
        for path in sorted(written, key=lambda path: path.name == last):
            (folder / path.relative_to(work)).parent.mkdir(exist_ok=True)
            os.replace(path, folder / path.relative_to(work))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {folder} ({error}); make room, or choose another --out-dir") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def copy_texts(source: Path, work: Path) -> None:
    """Copies config.json, the tokenizer and what else belongs to a checkpoint beside its weights."""
    home = source.resolve()
    if home.parent.name == "snapshots":  # of the Hugging Face cache, whose files are links into blobs/
        home = home.parent.parent
    for path in [*source.iterdir(), *(source / "additional_chat_templates").glob("*.jinja")]:
        name = path.relative_to(source)
        if not path.is_file() or not TEXTS.fullmatch(str(name)) or name.name.endswith(".index.json"):
            continue
        if not path.resolve().is_relative_to(home):
            raise UserError(f"{path} is a link to {path.resolve()}, outside of the checkpoint; put the file itself in "
                            "its place, or remove it")
        check_file(path)
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, work / name)


def write_shards(files: list[Path], work: Path, dtype: torch.dtype | None, tied: bool, limit: int) -> str:
    """Writes all tensors in shards of at most `limit` bytes, with an index if they are several. Returns the name of
    what makes the folder loadable: the only weight file, or else the index."""
    shards: list[dict[str, int]] = []  # bytes of each tensor of each shard
    shard: dict[str, Tensor] = {}

    def write() -> None:
        save_file(shard, work / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in shard.items()})
        shard.clear()

    for path in files:
        for name, tensor in open_tensors(path).items():
            # Tied weights are stored once, and RoPE's buffers, which old checkpoints have, would not survive rounding.
            if ".rotary_emb." in name or (tied and name == OUTPUT):
                continue
            target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            size = sum(other.nbytes for other in shard.values())
            if shard and size + tensor.numel() * target.itemsize > limit:
                write()
            # safetensors refuses tensors that share memory: whatever is a part of, or the same as, another is copied.
            storage = tensor.untyped_storage()
            shared = storage.nbytes() != tensor.nbytes or any(
                storage.data_ptr() == other.untyped_storage().data_ptr() for other in shard.values())
            shard[name] = tensor.to(target, copy=shared).contiguous()
    write()
    if len(shards) == 1:
        os.replace(work / "shard-0", work / "model.safetensors")
        return "model.safetensors"
    weight_map = {}
    for i, sizes in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(work / f"shard-{i}", work / file)
        weight_map.update(dict.fromkeys(sizes, file))
    total = sum(sum(sizes.values()) for sizes in shards)
    write_json(work / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return "model.safetensors.index.json"


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="triforce convert",
                                     description="Rewrites a checkpoint as safetensors of a chosen dtype.")
    parser.add_argument("--checkpoint-dir", "--checkpoint_dir", required=True, help="a Hugging Face folder")
    parser.add_argument("--out-dir", "--out_dir", help="default: the same folder, beside its .bin files")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; default: each tensor's own")
    args = parser.parse_args(argv)
    try:
        folder = convert(args.checkpoint_dir, args.out_dir, args.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again, the source is untouched", file=sys.stderr)
        return 130
    print(f"{folder} holds safetensors. Next:\n\n    triforce --checkpoint {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
