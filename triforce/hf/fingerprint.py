"""What a model and a tokenizer are known by: short texts that are equal where keys, values and token ids are.

A sample of each weight is looked at, never all of it: training changes every matrix in nearly all places. What was
changed by hand in a few places may go unseen.
"""

import hashlib
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..model import ModelConfig, Transformer
from ..parallel import together
from .checkpoint import open_tensors, read_config
from .folders import find_weights
from .tokenizer import Tokenizer

STRETCHES, STRETCH_BYTES = 4, 4096  # of each tensor
DIGITS = 32
PROBE = "It's <s> 12,345 Ünïcödé\t日本語 🙂\n\n  x\u0301 </s> a"  # what tokenizers treat in ways of their own


def model_name(folder: Path | None, architecture: str, num_parameters: int) -> str:
    """What a user would call a model. folder: of its checkpoint, which may lie in the cache of the hub."""
    kind = f"{architecture}, {num_parameters / 1e6:,.1f}M parameters"
    if folder is None:
        return kind
    folder = Path(folder).resolve()
    in_cache = folder.parent.name == "snapshots"
    return f"{folder.parents[1].name.removeprefix('models--').replace('--', '/') if in_cache else folder.name}, {kind}"


def files_of(folder: Path) -> list[tuple]:
    """What tells whether a checkpoint's files are still those that were read: names, times and sizes."""
    with suppress(OSError, UserError):
        return [(str(path), (found := path.stat()).st_mtime_ns, found.st_size)
                for path in (folder / "config.json", *find_weights(folder))]
    return []


def model_fingerprint(folder: str | Path, max_seq_len: int | None = None, weights: str | None = None) -> str:
    """Of a checkpoint: its config's shape and arithmetic, and of every weight name, shape, dtype and a sample of bytes.

    The same whatever dtype it is loaded in, however many ranks share it, and however it is cut into files. Raises
    UserError for files that are missing or damaged.
    """
    config, files = read_config(folder, max_seq_len, weights), find_weights(Path(folder))
    return _combine(config, sorted((name, _digest(tensor)) for path in files
                                   for name, tensor in open_tensors(path).items()))


def _digest(tensor: Tensor) -> str:
    """Of dtype, shape and some stretches of bytes, the first and the last among them."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    found, last = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode()), max(len(data) - STRETCH_BYTES, 0)
    for j in range(STRETCHES):
        at = last * j // (STRETCHES - 1)
        found.update(data[at : at + STRETCH_BYTES].cpu().numpy())
    return found.hexdigest()


def weights_fingerprint(model: Transformer) -> str:
    """Of a model in memory: its config, and a sample of each weight. It differs from its folder's fingerprint, and with
    the dtype and the number of ranks that share the model; each of them calls this. A weight that exists in a packed
    form alone is left out."""
    samples = together(model.group, lambda: [(name, _digest(one)) for name, one in model.named_parameters()])
    return _combine(model.config, samples)


def _combine(config: ModelConfig, samples: list) -> str:
    # Fields that are in no repr count where they say something.
    more = [x for one in fields(config) if not one.repr and (x := getattr(config, one.name)) != one.default]
    text = repr((replace(config, dtype=None), samples)) + ", ".join(map(repr, more))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Of what each id means, and of how a text is encoded that has all kinds of characters. The chat template, which
    says what is put around a text, does not count."""
    told = sorted(tokenizer.token_of.items()), sorted(tokenizer.special_ids), tokenizer.encode(PROBE)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:DIGITS]
