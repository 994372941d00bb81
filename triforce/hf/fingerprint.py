"""What a model and a tokenizer are known by: short texts that are equal where keys, values and token ids are.

A sample of each weight is looked at, never all of it: training changes every matrix in nearly all places. What was
changed by hand in a few places may go unseen.
"""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import UserError
from ..model import ModelConfig, Transformer
from ..parallel import together
from .checkpoint import open_tensors, read_config
from .folders import SINGLE_FILES, find_weights
from .places import is_derived
from .vocabulary import read_optional_json

STRETCHES, STRETCH_BYTES = 4, 4096  # of each tensor in a file
POINTS = 64  # of each tensor in memory
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
         torch.float8_e4m3fn: "F8_E4M3"}  # in safetensors
READERS = 16  # threads: where the file is not in memory, a stretch is a request to the disk
DIGITS = 32
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Of tokenizer_config.json, what says nothing of which text has which ids.
NO_IDS = ("chat_template", "model_max_length", "padding_side", "truncation_side", "clean_up_tokenization_spaces",
          "name_or_path", "tokenizer_file", "processor_class")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json")


def model_name(folder: Path | None, architecture: str, num_parameters: int) -> str:
    """What a user would call a model. folder: of its checkpoint, which may lie in the cache of the hub."""
    kind = f"{architecture}, {num_parameters / 1e6:,.1f}M parameters"
    if folder is None:
        return kind
    folder = Path(folder).resolve()
    in_cache = folder.parent.name == "snapshots"
    return f"{folder.parents[1].name.removeprefix('models--').replace('--', '/') if in_cache else folder.name}, {kind}"


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
            found |= (_of_safetensors if path.suffix == ".safetensors" else _of_bin)(path, readers)
    head = found.pop(OUTPUT, None)
    found = {name: digest for name, digest in found.items() if not is_derived(name, config)}
    if head is not None and config.tie_word_embeddings:  # one of the two, or both alike, are one
        head = None if found.setdefault(EMBEDDING, head) == head else head
    if head is not None:
        found[OUTPUT] = head
    return _combine(config, sorted(found.items()))


def _of_safetensors(path: Path, readers: ThreadPoolExecutor) -> dict[str, str]:
    """Digests of the tensors, by their names.

    Read and not mapped: the system reads megabytes ahead of a page of a mapped file, and safetensors itself reads on
    when it opens one. For 13 GB that nobody had read before, that is 34 s on the disk here.
    """
    def digest(tensor: dict) -> str:
        begin, end = tensor["data_offsets"]
        return _digest(tensor["dtype"], tensor["shape"], end - begin,
                       lambda at, count: os.pread(file.fileno(), count, start + begin + at))

    try:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            size = int.from_bytes(file.read(8), "little")
            start = 8 + size
            if start > os.fstat(file.fileno()).st_size:
                raise EOFError(f"it ends before {start} bytes")
            table = json.loads(file.read(size))
            table.pop("__metadata__", None)
            return dict(zip(table, readers.map(digest, table.values()), strict=True))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}); download it again") from None


def _of_bin(path: Path, readers: ThreadPoolExecutor) -> dict[str, str]:
    """The same of the same tensors in another file."""
    def digest(tensor: torch.Tensor) -> str:
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        return _digest(NAMES.get(tensor.dtype, str(tensor.dtype)), list(tensor.shape), len(data),
                       lambda at, count: data[at : at + count])

    tensors = open_tensors(path)
    return dict(zip(tensors, readers.map(digest, tensors.values()), strict=True))


def _digest(dtype: str, shape: list[int], nbytes: int, read: Callable) -> str:
    """read(offset, bytes) gives a part of the tensor. The first and the last bytes are among those that are read."""
    found, count = hashlib.sha256(f"{dtype} {shape}".encode()), min(nbytes, STRETCH_BYTES)
    for j in range(STRETCHES):
        part = read((nbytes - count) * j // (STRETCHES - 1), count)
        if len(part) < count:
            raise EOFError("it ends within a tensor")
        found.update(part)
    return found.hexdigest()


@torch.no_grad()
def weights_fingerprint(model: Transformer) -> str:
    """Of a model in memory: its config, and some elements of each weight. It differs from its folder's fingerprint, and
    with the number of ranks that share the model; each of them calls this. A weight that exists in a packed form alone
    is left out."""
    def sample() -> list:
        spread = torch.linspace(0, 1, POINTS, dtype=torch.float64)
        return [(name, one.reshape(-1)[(spread * (one.numel() - 1)).long().to(one.device)].double().tolist())
                for name, one in model.named_parameters()]

    with together(model.group) as do:
        return _combine(model.config, do(sample))


def _combine(config: ModelConfig, samples: list) -> str:
    text = repr((replace(config, dtype=None), samples))
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
