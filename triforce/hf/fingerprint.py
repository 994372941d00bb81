"""What a model and a tokenizer are known by: short texts that are equal where keys, values and token ids are.

A sample of each weight is looked at, never all of it: training changes every matrix in nearly all places. What was
changed by hand in a few places may go unseen.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..model import ModelConfig, Transformer
from ..parallel import together
from .checkpoint import open_tensors, read_config
from .folders import SINGLE_FILES, find_weights
from .places import is_derived, places
from .vocabulary import read_optional_json

STRETCHES, STRETCH_BYTES = 4, 4096  # of each tensor in a file
POINTS = 64  # of each tensor in memory
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.float8_e4m3fn: "F8_E4M3"}  # in safetensors
READERS = 16  # threads: where the file is not in memory, a stretch is a request to the disk
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly
DIGITS = 32
# Of tokenizer_config.json, what says nothing of which text has which ids.
NO_IDS = ("chat_template", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces",
          "name_or_path", "tokenizer_file", "processor_class")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json")


def model_fingerprint(folder: str | Path, max_seq_len: int | None = None, weights: str | None = None) -> str:
    """Of a checkpoint: its config's shape and arithmetic, and of every weight name, shape, dtype and a sample of bytes.

    The same whatever dtype it is loaded in, however many ranks share it, and however it is cut into files.

    Args:
        max_seq_len: see `ModelConfig.within`. weights: see `ModelConfig.quantized`.

    Raises:
        UserError: a file is missing or damaged.
    """
    folder = Path(folder)
    config, files = read_config(folder, max_seq_len, weights), find_weights(folder)
    if not files:
        raise UserError(f"{folder} has neither {' nor '.join(SINGLE_FILES)} (nor their index); download it again")
    found = {}
    with ThreadPoolExecutor(READERS) as readers:
        for path in files:
            sampled = _of_safetensors if path.suffix == ".safetensors" else _of_bin
            found.update((name, digest) for name, digest in sampled(path, readers) if not is_derived(name, config))
    return _combine(config, found)


def _of_safetensors(path: Path, readers: ThreadPoolExecutor) -> list[tuple[str, str]]:
    """(name, digest) of each tensor.

    Read and not mapped: the system reads megabytes ahead of a page of a mapped file, and safetensors itself reads on
    when it opens one. For 13 GB that nobody had read before, that is 34 s on the disk here.
    """
    def digest(tensor: dict) -> str:
        begin, end = tensor["data_offsets"]
        parts = [os.pread(file.fileno(), size, start + begin + at) for at, size in _stretches(end - begin)]
        if sum(map(len, parts)) < sum(size for _, size in _stretches(end - begin)):
            raise EOFError(f"it ends before {start + end} bytes")
        return _digest(tensor["dtype"], tensor["shape"], parts)

    try:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            size = int.from_bytes(file.read(8), "little")
            start = 8 + size
            if start > os.fstat(file.fileno()).st_size:
                raise EOFError(f"it ends before {start} bytes")
            table = json.loads(file.read(size))
            table.pop("__metadata__", None)
            return list(zip(table, readers.map(digest, table.values()), strict=True))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}); download it again") from None


def _of_bin(path: Path, readers: ThreadPoolExecutor) -> list[tuple[str, str]]:
    """(name, digest) of each tensor, the same as of a safetensors file that holds it."""
    def digest(tensor: Tensor) -> str:
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return _digest(NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape),
                       [data[at : at + size] for at, size in _stretches(len(data))])

    tensors = open_tensors(path)
    return list(zip(tensors, readers.map(digest, tensors.values()), strict=True))


def _stretches(count: int) -> list[tuple[int, int]]:
    """(begin, length) of the bytes that are looked at, of so many: the first and the last are among them."""
    if count <= STRETCHES * STRETCH_BYTES:
        return [(0, count)]
    return [((count - STRETCH_BYTES) * j // (STRETCHES - 1), STRETCH_BYTES) for j in range(STRETCHES)]


def _digest(dtype: str, shape: list[int], parts: list) -> str:
    found = hashlib.sha256(f"{dtype} {shape}".encode())
    for part in parts:
        found.update(part)
    return found.hexdigest()


@torch.no_grad()
def weights_fingerprint(model: Transformer) -> str:
    """Of a model in memory: its config, and some elements of each weight. It differs from its folder's fingerprint.

    The same however many ranks share the model; each of them calls this. A weight that exists in a packed form alone
    is left out.
    """
    config, shards, rank = model.config, model.config.num_shards, 0 if model.group is None else model.group.rank
    whole = replace(config, n_head=config.n_head * shards, n_kv_head=config.n_kv_head * shards,
                    ffn_dim=config.ffn_dim * shards, num_shards=1)
    parameters, parts = dict(model.named_parameters()), places(config)
    keys, values = [], [torch.empty(0, dtype=torch.float64, device=model.device)]
    for name, place in places(whole, shards).items():
        part = parts[name]
        if part.parameter not in parameters:
            continue
        unit = torch.tensor(place.unit[: len(place.shape)])[:, None]
        at = _points(tuple(size * one for size, one in zip(place.shape, place.unit, strict=False))) // unit
        held = torch.full((POINTS,), rank == 0 or place.shape != part.shape)
        for dim, (size, share) in enumerate(zip(place.shape, part.shape, strict=True)):
            if size != share:  # the dimension that is split
                at[dim] -= rank * share
                held &= (at[dim] >= 0) & (at[dim] < share)
        at[0] += part.start
        keys += [(name, j) for j in held.nonzero()[:, 0].tolist()]
        values.append(parameters[part.parameter][tuple(at[:, held].to(model.device))].double())
    mine = dict(zip(keys, torch.cat(values).tolist(), strict=True))
    with together(model.group) as do:
        samples = {key: value for share in do(lambda: mine) for key, value in share.items()}
    return _combine(whole, samples)


def _points(shape: tuple[int, ...]) -> Tensor:
    """Where elements of a tensor are sampled: [dimensions, POINTS]."""
    count = torch.Size(shape).numel()
    flat = (torch.arange(POINTS, dtype=torch.float64) * GOLDEN % 1 * count).long()
    return torch.stack(torch.unravel_index(flat, shape))


def _combine(config: ModelConfig, samples: dict) -> str:
    text = repr((replace(config, dtype=None, num_shards=1), sorted(samples.items())))
    text += "" if config.float8 is None else repr(config.float8)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Of the files that say which text has which ids. The chat template, which says what is put around a text, is none,
    nor is the length of a prompt.

    Raises:
        UserError: a file cannot be read, or there is none.
    """
    folder, found = Path(folder), hashlib.sha256()
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not present:
        raise UserError(f"{folder} has neither tokenizer.json nor tokenizer.model; download the checkpoint again")
    for path in present:
        try:
            found.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); download it again") from None
    config, model = (read_optional_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    for name in NO_IDS:
        config.pop(name, None)
    # Some tokenizers are built by what config.json says of them (see vocabulary.py).
    found.update(json.dumps([config, model.get("model_type"), model.get("tokenizer_class")], sort_keys=True).encode())
    return found.hexdigest()[:DIGITS]
