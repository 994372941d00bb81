"""Rewrites a checkpoint as safetensors of a chosen dtype, in the same Hugging Face layout and under the same names.

Each weight file becomes one of safetensors, and memory holds one at a time.
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
from .checkpoint import open_tensors, parse_dtype
from .download import TEXTS
from .files import check_file, read_json
from .folders import find_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # either makes a folder loadable


def convert(checkpoint_dir: str | Path, out_dir: str | Path | None = None,
            dtype: str | torch.dtype | None = None) -> Path:
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
        raise UserError(f"{source} is quantized, and no dtype can be given to weights in fp8; leave out --dtype")
    files = find_weights(source)
    if any(folder.glob("model*.safetensors*")):
        raise UserError(f"{folder} holds safetensors already; choose another --out-dir")
    # On the same disk, so that moving a file out of it is one atomic step.
    work = folder / ".converting"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_weights(files, work, dtype)
        if folder.resolve() != source.resolve():
            copy_texts(source, work)
        if dtype is not None:
            spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
            write_json(work / "config.json", {**config, **dict.fromkeys(spelled, str(dtype).removeprefix("torch."))})
        for path in sorted(filter(Path.is_file, work.rglob("*")), key=lambda path: path.name in (SINGLE, INDEX)):
            final = folder / path.relative_to(work)
            final.parent.mkdir(exist_ok=True)
            os.replace(path, final)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {folder} ({error}); make room, or choose another --out-dir") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def write_weights(files: list[Path], work: Path, dtype: torch.dtype | None) -> None:
    """Writes each weight file as safetensors, and an index if they are several."""
    weight_map, total = {}, 0
    for i, path in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = converted(open_tensors(path), dtype)
        save_file(tensors, work / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def converted(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Contiguous tensors, those of floating point in a dtype. safetensors refuses tensors that share memory: whatever
    is a part of another, or the same, is copied."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        found[name] = tensor.to(target, copy=shared).contiguous()
    return found


def copy_texts(source: Path, work: Path) -> None:
    """Copies config.json, the tokenizer and what else belongs to a checkpoint beside its weights."""
    home = source.resolve()
    if home.parent.name == "snapshots":  # of the Hugging Face cache, whose files are links into blobs/
        home = home.parent.parent
    for path in source.rglob("*"):
        name = path.relative_to(source)
        if not TEXTS.fullmatch(str(name)) or name.name.endswith(".index.json"):
            continue
        if not path.resolve().is_relative_to(home):
            raise UserError(f"{path} is a link to {path.resolve()}, outside of the checkpoint; remove it, or copy it")
        check_file(path)
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, work / name)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """`triforce convert`. Raises UserError, which the command line prints."""
    parser = argparse.ArgumentParser(prog="triforce convert",
                                     description="Rewrites a checkpoint as safetensors of a chosen dtype.")
    parser.add_argument("--checkpoint-dir", "--checkpoint_dir", required=True, help="a Hugging Face folder")
    parser.add_argument("--out-dir", "--out_dir", help="default: the same folder, beside its .bin files")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16; default: each tensor's own")
    args = parser.parse_args(argv)
    folder = convert(args.checkpoint_dir, args.out_dir, args.dtype)
    print(f"{folder} holds safetensors. Next:\n\n    triforce --checkpoint {folder}")
    return 0


if __name__ == "__main__":
    sys.exit("this module is no command: run `triforce convert`")
