"""What a model and a tokenizer are known by: short texts that are equal where keys, values and token ids are.

A sample of each weight is looked at, never all of it: training changes every matrix in nearly all places. What was
changed by hand in a few places may go unseen.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError
from ..model import ModelConfig, Transformer
from ..parallel import together
from .checkpoint import SINGLE_FILES, find_weights, open_tensors, read_config
from .places import is_derived, places
from .vocabulary import read_optional_json

STRETCHES, STRETCH_BYTES = 4, 4096  # of each tensor in a file
POINTS = 64  # of each tensor in memory
READERS = 16  # threads: where the file is not in memory, a stretch is a request to the disk
GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, are spread evenly
DIGITS = 32
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json")


def model_fingerprint(folder: str | Path) -> str:
    """Of a checkpoint: its config's shape and arithmetic, and of every weight name, shape, dtype and a sample of bytes.

    The same whatever dtype it is loaded in, however many ranks share it, and however it is cut into files.

    Raises:
        UserError: a file is missing or damaged.
    """
    folder = Path(folder)
    config, files = read_config(folder), find_weights(folder)
    if not files:
        raise UserError(f"{folder} has neither {' nor '.join(SINGLE_FILES)} (nor their index); download it again")
    found = {}
    with ThreadPoolExecutor(READERS) as readers:
        for path in files:
            tensors = {name: tensor for name, tensor in open_tensors(path).items() if not is_derived(name, config)}
            found.update(zip(tensors, readers.map(_digest, tensors.values()), strict=True))
    return _combine(config, found)


def _digest(tensor: Tensor) -> str:
    """Of a mapped tensor, of which it reads STRETCHES parts, the first and the last bytes among them."""
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if len(data) <= STRETCHES * STRETCH_BYTES:
        found.update(data)
    else:
        for j in range(STRETCHES):
            start = (len(data) - STRETCH_BYTES) * j // (STRETCHES - 1)
            found.update(data[start : start + STRETCH_BYTES])
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
    for name, place in places(whole).items():
        part = parts[name]
        if part.parameter not in parameters:
            continue
        at = _points(place.shape)
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
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def tokenizer_fingerprint(folder: str | Path) -> str:
    """Of the files that say which text has which ids. The chat template, which says what is put around a text, is none.

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
    config.pop("chat_template", None)
    # Some tokenizers are built by what config.json says of them (see vocabulary.py).
    found.update(json.dumps([config, model.get("model_type"), model.get("tokenizer_class")], sort_keys=True).encode())
    return found.hexdigest()[:DIGITS]
