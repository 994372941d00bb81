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

STRETCHES, STRETCH_BYTES = 4, 4096  # of each tensor in a file
POINTS = 64  # of each tensor in memory
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
    """Of a checkpoint: its config's shape and arithmetic, and of every weight name, shape, dtype and a sample of bytes.

    The same whatever dtype it is loaded in, however many ranks share it, and however it is cut into files. Raises
    UserError for files that are missing or damaged.
    """
    config, files = read_config(folder, max_seq_len, weights), find_weights(Path(folder))
    digests = {name: _digest(tensor) for path in files for name, tensor in open_tensors(path).items()}
    ends = {digest for name, digest in digests.items() if usual_name(name) in (EMBEDDING, OUTPUT)}
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and len(ends) < 2)
    alone = EMBEDDING if config.tie_word_embeddings else OUTPUT  # what an output layer is, if it is not derived
    found = {alone if usual_name(name) == OUTPUT else name: digest for name, digest in digests.items()
             if not is_derived(name, config, digests)}
    return _combine(config, sorted(found.items()))


def _digest(tensor: Tensor) -> str:
    """Of dtype, shape and some stretches of bytes, the first and the last among them."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    found, last = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode()), max(len(data) - STRETCH_BYTES, 0)
    for j in range(STRETCHES):
        at = last * j // (STRETCHES - 1)
        found.update(data[at : at + STRETCH_BYTES])
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
    nor is the length of a prompt. Raises UserError if a file cannot be read.
    """
    folder, found = Path(folder), hashlib.sha256()
    for path in [folder / name for name in TOKENIZER_FILES if (folder / name).exists()]:
        with guarded(f"{path} cannot be read"):
            found.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    config, model = (read_optional_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    for name in NO_IDS:
        config.pop(name, None)
    # Some tokenizers are built by what config.json says of them (see vocabulary.py).
    found.update(json.dumps([config, model.get("model_type"), model.get("tokenizer_class")], sort_keys=True).encode())
    return found.hexdigest()[:DIGITS]
