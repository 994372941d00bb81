"""What a model and a tokenizer are known by: short texts that are equal where keys, values and token ids are.

A sample of each weight is looked at, never all of it: training changes every matrix in nearly all places. What was
changed by hand in a few places may go unseen.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..model import ModelConfig, Transformer
from ..parallel import together
from .checkpoint import open_tensors, read_config
from .files import guarded, read_optional_json
from .folders import find_weights
from .places import EMBEDDING, OUTPUT, is_derived, usual_name

STRETCHES, STRETCH = 4, 1024  # elements of each tensor
DIGITS = 32
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
    """Of a checkpoint: its config's shape and arithmetic, and of every weight name, shape and a sample.

    The same whatever dtype it is loaded in, however many ranks share it, and however it is cut into files. Raises
    UserError for files that are missing or damaged.
    """
    config, files = read_config(folder, max_seq_len, weights), find_weights(Path(folder))
    digests = {name: _digest(tensor) for path in files for name, tensor in open_tensors(path).items()}
    ends = {digest for name, digest in digests.items() if usual_name(name) in (EMBEDDING, OUTPUT)}
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and len(ends) < 2)
    alone = EMBEDDING if config.tie_word_embeddings else OUTPUT  # what an output layer is, if it is not derived
    return _combine(config, sorted((alone if usual_name(name) == OUTPUT else name, digest)
                                   for name, digest in digests.items() if not is_derived(name, config, digests)))


@torch.no_grad()
def weights_fingerprint(model: Transformer) -> str:
    """Of a model in memory. It differs from its folder's fingerprint, and with the number of ranks that share the
    model; each of them calls this. A weight that exists in a packed form alone is left out."""
    with together(model.group) as do:
        return _combine(model.config, do(lambda: [(name, _digest(one)) for name, one in model.named_parameters()]))


def _digest(tensor: Tensor) -> str:
    """Of the shape, and of some stretches of elements, the first and the last among them."""
    flat, found = tensor.detach().reshape(-1), hashlib.sha256(str(list(tensor.shape)).encode())
    for j in range(STRETCHES):
        at = max(len(flat) - STRETCH, 0) * j // (STRETCHES - 1)
        found.update(flat[at : at + STRETCH].cpu().double().numpy())
    return found.hexdigest()


def _combine(config: ModelConfig, digests: list) -> str:
    text = repr((replace(config, dtype=None), config.float8, digests))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Of the files that say which text has which ids. The chat template, which says what is put around a text, is none,
    nor is the length of a prompt. Raises UserError if a file cannot be read.
    """
    folder, config = Path(folder), read_optional_json(Path(folder) / "tokenizer_config.json")
    paths = [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]
    with guarded(f"a tokenizer's file in {folder} cannot be read"):
        digests = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]
    model = read_optional_json(folder / "config.json")  # some tokenizers are built by what it says of them
    parts = [digests, {name: value for name, value in config.items() if name not in NO_IDS},
             model.get("model_type"), model.get("tokenizer_class")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGITS]
