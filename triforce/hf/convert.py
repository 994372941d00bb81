"""Rewrites a checkpoint as safetensors of a chosen dtype, in Hugging Face's layout and names: a folder's .bin files, or
a GGUF file. Memory holds one weight file at a time.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import Parser, UserError
from .checkpoint import open_tensors, parse_dtype
from .download import TEXTS
from .files import check_file, read_json
from .folders import find_weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # either makes a folder loadable
SHARD = 2**32  # bytes of a file of weights that come one by one


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
        raise UserError(f"{source} is quantized, and no dtype can be given to such weights; leave out --dtype")
    files, in_place = find_weights(source), folder.resolve() == source.resolve()
    with replacing(folder, in_place) as work:
        write_weights(map(open_tensors, files), work, dtype)
        if not in_place:
            copy_texts(source, work)
        if dtype is not None:
            spelled = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
            write_json(work / "config.json", {**config, **dict.fromkeys(spelled, str(dtype).removeprefix("torch."))})
    return folder


def convert_gguf(path: str | Path, out_dir: str | Path, dtype: str | torch.dtype | None = None) -> Path:
    """Writes a folder of what a GGUF file holds: config.json, tokenizer, chat template, and wide weights.

    Args:
        dtype: of the weights. None: bfloat16 where the file or Gemma 3 has such, else float16.
    """
    from .gguf import GGUF

    file, folder = GGUF(path), Path(out_dir)
    dtype = file.dtype if dtype is None else parse_dtype(dtype)
    backend, tokenizer_config = file.tokenizer()
    with replacing(folder) as work:
        write_weights(shards(file.named_tensors(), dtype), work, dtype)
        write_json(work / "config.json", {**file.config, "dtype": str(dtype).removeprefix("torch.")})
        write_json(work / "generation_config.json", {"eos_token_id": file.eos_ids()})
        write_json(work / "tokenizer_config.json", tokenizer_config)
        backend.save(str(work / "tokenizer.json"))
    return folder


@contextlib.contextmanager
def replacing(folder: Path, in_place: bool = False) -> Iterator[Path]:
    """A folder whose files move to `folder` at the end, weights last. in_place: that is where the config.json lies."""
    if any(folder.glob("model*.safetensors*")) or not in_place and (folder / "config.json").exists():
        raise UserError(f"{folder} holds a checkpoint already; choose another --out-dir")
    # On the same disk, so that moving a file out of it is one atomic step.
    work = folder / ".converting"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
        for path in sorted(filter(Path.is_file, work.rglob("*")), key=lambda path: path.name in (SINGLE, INDEX)):
            final = folder / path.relative_to(work)
            final.parent.mkdir(exist_ok=True)
            os.replace(path, final)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write to {folder} ({error}); make room, or choose another --out-dir") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def shards(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Tensors in a dtype, as many together as one file is to hold."""
    some, size = {}, 0
    for name, tensor in tensors:
        some[name] = tensor.to(dtype)
        size += some[name].nbytes
        if size >= SHARD:
            yield some
            some, size = {}, 0
    if some:
        yield some


def write_weights(files: Iterable[dict[str, Tensor]], work: Path, dtype: torch.dtype | None) -> None:
    """Writes the tensors of each file as safetensors, and an index if they are several."""
    weight_map, total = {}, 0
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05d}.safetensors"
        tensors = converted(tensors, dtype)
        save_file(tensors, work / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if i == 1:
        (work / name).rename(work / SINGLE)
    else:
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
    parser = Parser(prog="triforce convert", description="Rewrites a checkpoint, or a GGUF file, as safetensors.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint-dir", "--checkpoint_dir", help="a Hugging Face folder")
    source.add_argument("--gguf", metavar="FILE", help="of a Llama, Mistral, Qwen2, Qwen3, Phi-3 or Gemma 3")
    parser.add_argument("--out-dir", "--out_dir", "--out", help="default: the folder, or the file's name without .gguf")
    parser.add_argument("--dtype", help="float32, float16, bfloat16; default: as it is, of a GGUF file one of 16 bits")
    args = parser.parse_args(argv)
    if args.gguf:
        folder = convert_gguf(args.gguf, args.out_dir or Path(args.gguf).with_suffix(""), args.dtype)
    else:
        folder = convert(args.checkpoint_dir, args.out_dir, args.dtype)
    print(f"{folder} holds safetensors. Next:\n\n    triforce --checkpoint {folder}")
    return 0
