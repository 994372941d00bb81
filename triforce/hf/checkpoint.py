"""Hugging Face folders in: reads a checkpoint's config and end tokens, and loads its weights into the model.

Which family a folder is comes from its config.json, never from its name.
"""

import logging
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import UserError
from ..fp8 import FP8, has_nan, widen
from ..model import ModelConfig, Transformer
from ..parallel import Group, join, shard_config
from ..runtime.streams import like_this_thread
from .config import config_from_hf
from .files import FLAG, Fields, about, check_file, guarded, number, read_json, read_optional_json, several, whole
from .folders import find_weights
from .names import EMBEDDING, OUTPUT, SCALE, places, put, scale_of, separate
from .packed import PARTS, unpacked
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
          "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLING = {"temperature": number(0, 100), "top_p": number(1e-6, 1), "top_k": whole(0, 2**31 - 1),
            "min_p": number(0, 1 - 1e-6)}
# What else generation_config.json may ask for. 0 and nothing ask for nothing, and 1 of the first five.
UNAPPLIED = ("repetition_penalty", "typical_p", "num_beams", "guidance_scale", "encoder_repetition_penalty",
             "watermarking_config", "max_time", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff",
             "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids",
             "sequence_bias", "stop_strings", "forced_eos_token_id", "exponential_decay_length_penalty")
READERS = 4  # threads: one reads a mapped file at a third of what a disk or the page cache gives


def read_config(folder: Path, max_seq_len: int | None = None, weights: str | None = None) -> ModelConfig:
    """The model's shape and arithmetic, as config.json alone says. max_seq_len: see `ModelConfig.within`; weights: see
    `ModelConfig.quantized`."""
    path = Path(folder) / "config.json"
    hf = read_json(path)
    with about(path):
        return config_from_hf(hf).within(max_seq_len).quantized(weights)


def as_stored(config: ModelConfig, tensors: dict[str, Tensor]) -> ModelConfig:
    """What is stored counts, as in transformers: an output layer that is not the embedding is not tied to it. It reads
    both weights where config.json calls them tied and files have both."""
    found = [tensors[name] for name in (EMBEDDING, OUTPUT) if name in tensors] if config.tie_word_embeddings else []
    same = len(found) != 2 or found[0].dtype == found[1].dtype and torch.equal(
        *(one.reshape(-1).view(torch.uint8) for one in found))
    packed = {f"{OUTPUT.removesuffix('weight')}{part}" for part in PARTS} & tensors.keys()
    return config if same and not packed else replace(config, tie_word_embeddings=False)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Every id that ends a text: generation_config.json's, else config.json's, else the tokenizer's own."""
    for path in (Path(folder) / "generation_config.json", Path(folder) / "config.json"):
        given = read_optional_json(path).get("eos_token_id")
        if given is not None:
            with about(path):
                given = given if isinstance(given, list) else [given]
                return Fields({"eos_token_id": given}).get("eos_token_id", several(whole(0, 2**31)))
    eos = Tokenizer(folder).eos_id
    return () if eos is None else (eos,)


def generation_defaults(folder: str | Path) -> dict[str, float | int]:
    """What generation_config.json sets of temperature, top_p, top_k and min_p: greedy where `do_sample` is false, and
    where it is true what is absent asks for nothing. What it asks for besides is not applied, and logged."""
    path = Path(folder) / "generation_config.json"
    fields = Fields(read_optional_json(path))
    with about(path):
        found = {name: fields.get(name, kind, None) for name, kind in SAMPLING.items()}
        sampled = fields.get("do_sample", FLAG, None)
    if asks := [f"{key} {fields.values[key]!r:.40}" for key in UNAPPLIED
                if fields.values.get(key) not in (None, 0, [], {}, *[1] * (key in UNAPPLIED[:5]))]:
        logging.getLogger("triforce").warning(
            "note: %s asks for %s, which no text follows here", path.name, ", ".join(asks))
    if sampled is False:
        return {"temperature": 0.0}
    return ({"temperature": 1.0, "top_p": 1.0} if sampled else {}) | {
        name: value for name, value in found.items() if value is not None}


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one weight file by name, mapped from the file: its bytes are read as they are used."""
    check_file(path)
    with guarded(f"{path} is truncated, damaged, or holds more than tensors"):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt", device="cpu") as file:
                return {name: file.get_tensor(name) for name in file.keys()}
        mmap = zipfile.is_zipfile(path)  # the format of torch before 1.6 cannot be mapped
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        tensors = tensors.get("state_dict", tensors)
        for name, tensor in tensors.items():  # one of fewer bytes than it says repeats them, without end
            plain = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
            if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
                raise TypeError(f"{name!r} is no plain tensor")
        return tensors


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`bfloat16`, `torch.bfloat16` or `bf16` -> torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; use float32, float16, bfloat16 or float64")
    return DTYPES[name]


@torch.no_grad()
def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | str | None = None,
               group: Group | None = None, max_seq_len: int | None = None, weights: str | None = None) -> Transformer:
    """Reads a checkpoint into a model: every tensor straight from the mapped file into its place.

    Args:
        dtype: of the parameters; None takes config.json's, or else float32.
        group: the ranks that share the model; each reads its own part.
        max_seq_len: see `ModelConfig.within`. weights: see `ModelConfig.quantized`.

    Raises:
        UserError: a file is absent or truncated, or a tensor is missing, unknown or of another shape.
    """
    config, files = read_config(folder, max_seq_len, None if weights == "wide" else weights), find_weights(Path(folder))
    pairs = [pair for path in files for pair in open_tensors(path).items()]
    config = as_stored(config, dict(pairs))
    local = shard_config(config, group)
    table, parts = places(config, local.num_shards), places(local)
    stored = unpacked(folder, pairs, table)
    model = Transformer.empty(local, device, parse_dtype(dtype or config.dtype or "float32"))
    parameters, missing = dict(model.named_parameters()), set(table)

    def check(name: str, tensor: Tensor) -> None:
        if name not in table:
            raise UserError(f"tensor {name} has no place in the {config.architecture} that config.json describes")
        in_fp8 = parameters[parts[name].parameter].dtype == FP8
        made = in_fp8 and config.float8.made  # rounded as it is read
        of_kind = tensor.dtype == FP8 if in_fp8 and not made else _is_wide(tensor.dtype)
        if not of_kind or tensor.shape != table[name].shape:
            kind = "fp8" if in_fp8 and not made else "wider floating-point numbers"
            raise UserError(f"tensor {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but config.json implies "
                            f"{kind} of shape {table[name].shape}; download both again")
        if name not in missing:
            raise UserError(f"tensor {name} is there twice, perhaps under two names; remove one")
        missing.difference_update({name, scale_of(name)} if made else {name})

    def read(name: str, tensor: Tensor) -> None:
        if tensor.dtype == FP8 and has_nan(tensor):  # which a CPU would take for 480
            raise UserError(f"tensor {name} holds nan; it is damaged: download it again")
        if name.endswith(SCALE) and not bool((tensor.isfinite() & (tensor >= 0)).all()):
            raise UserError(f"tensor {name} holds scales that are negative or not finite: download it again")
        put(parameters, parts, name, tensor if isinstance(tensor, Tensor) else tensor.wide(), group)

    work = [one for name, tensor in stored for one in separate(name, tensor, table, config, dict(stored)).items()]
    with about(folder), ThreadPoolExecutor(READERS, initializer=like_this_thread(device)) as readers:
        for name, tensor in work:
            check(name, tensor)
        if missing:
            raise UserError(f"{len(missing)} of {len(table)} tensors are missing, as {min(missing)} is; download again")
        list(readers.map(read, *zip(*work, strict=True)))
    model = widen(model) if weights == "wide" else model
    return model if group is None else join(model, group)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
