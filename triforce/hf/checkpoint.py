"""Hugging Face folders in: reads a checkpoint's config and end tokens, and loads its weights into the model.

It knows nothing of caches, sampling or text, and it never uses the network: `download.py` does. Which family a folder
is comes from its config.json, never from its name.
"""

import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError
from ..fp8 import FP8, has_nan, widen
from ..model import ModelConfig, Transformer
from ..parallel import Group, join, shard_config
from ..streams import like_this_thread
from .config import config_from_hf
from .files import (
    FLAG,
    Fields,
    about,
    check_file,
    guarded,
    number,
    one_line,
    read_json,
    read_optional_json,
    several,
    shown,
    whole,
)
from .folders import find_weights
from .places import EMBEDDING, OUTPUT, SCALE, is_derived, places, put, scale_of, separate, usual_name
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64,
          "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLING = {"temperature": number(0, 100), "top_p": number(1e-6, 1), "top_k": whole(0, 2**31 - 1),
            "min_p": number(0, 1 - 1e-6)}
# Of generation_config.json, what would change the text, and the value by which it does not.
NOT_SUPPORTED = {"repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "typical_p": 1,
                 "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "penalty_alpha": 0, "num_beams": 1,
                 "num_beam_groups": 1, "min_length": 0, "min_new_tokens": 0, "bad_words_ids": [],
                 "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {}, "guidance_scale": 1,
                 "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None}


def read_config(folder: Path, max_seq_len: int | None = None, weights: str | None = None) -> ModelConfig:
    """The model's shape and arithmetic, as config.json alone says. max_seq_len: see `ModelConfig.within`; weights: see
    `ModelConfig.quantized`."""
    path = Path(folder) / "config.json"
    hf = read_json(path)
    with about(path):
        return config_from_hf(hf).within(max_seq_len).quantized(weights)


def as_stored(folder: Path, config: ModelConfig) -> ModelConfig:
    """What is stored counts, as in transformers: an output layer that is not the embedding is not tied to it. It reads
    both weights where config.json calls them tied and files have both."""
    differ = config.tie_word_embeddings and output_is_embedding(find_weights(Path(folder))) is False
    return replace(config, tie_word_embeddings=False) if differ else config


def output_is_embedding(files: list[Path]) -> bool | None:
    """Whether the two weights are the same, where files have both. None: they have not."""
    found = [tensor for path in files for name, tensor in open_tensors(path).items()
             if usual_name(name) in (EMBEDDING, OUTPUT)]
    if len(found) != 2:
        return None
    same_kind = found[0].dtype == found[1].dtype and found[0].shape == found[1].shape
    return same_kind and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in found))


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
    """What generation_config.json says of temperature, top_p, top_k and min_p: the values that are set. Empty where
    `do_sample` is false, or there is no such file."""
    path = Path(folder) / "generation_config.json"
    fields = Fields(read_optional_json(path))
    with about(path):
        found = {name: fields.get(name, kind, None) for name, kind in SAMPLING.items()}
        sampled = fields.get("do_sample", FLAG, True)
    return {name: value for name, value in found.items() if sampled and value is not None}


def ignored_defaults(folder: str | Path) -> dict:
    """What generation_config.json sets of a distribution or a search that this library does not have."""
    found = read_optional_json(Path(folder) / "generation_config.json")
    return {name: found[name] for name, neutral in NOT_SUPPORTED.items()
            if found.get(name) not in (None, neutral)}


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one weight file by name, mapped from the file: its bytes are read as they are used, and dropping
    the tensors unmaps them."""
    check_file(path)
    with guarded(f"{path} holds more than tensors, or is damaged"):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt", device="cpu") as file:
                    return {name: file.get_tensor(name) for name in file.keys()}
            mmap = zipfile.is_zipfile(path)  # the format of torch before 1.6 cannot be mapped
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (SafetensorError, RuntimeError, OSError, EOFError, ValueError) as error:
            raise UserError(f"{path} is truncated or damaged ({one_line(error)}); download it again") from None
        tensors = tensors.get("state_dict", tensors)
        for name, tensor in tensors.items():  # one of fewer bytes than it says repeats them, without end
            plain = isinstance(name, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
            if not plain or tensor.nbytes > tensor.untyped_storage().nbytes():
                raise TypeError(f"{shown(name)} is no plain tensor")
        return tensors


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`bfloat16`, `torch.bfloat16` or `bf16` -> torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {name!r} is unknown; use float32, float16, bfloat16 or float64")
    return DTYPES[name]


READERS = 4  # threads: one reads a mapped file at a third of what a disk or the page cache gives


@torch.no_grad()
def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | str | None = None,
               group: Group | None = None, max_seq_len: int | None = None,
               weights: str | None = None, tied: bool | None = None) -> Transformer:
    """Reads a checkpoint into a model: every tensor straight from the mapped file into its place.

    Args:
        dtype: of the parameters; None takes config.json's, or else the file's own.
        group: the ranks that share the model; each reads its own part.
        max_seq_len: see `ModelConfig.within`. weights: see `ModelConfig.quantized`.
        tied: what `as_stored` says, if it was asked already.

    Raises:
        UserError: a file is absent or truncated, or a tensor is missing, unknown or of another shape.
    """
    config, files = read_config(folder, max_seq_len, None if weights == "wide" else weights), find_weights(Path(folder))
    config = as_stored(folder, config) if tied is None else replace(config, tie_word_embeddings=tied)
    local = shard_config(config, group)
    table, parts = places(config, local.num_shards), places(local)
    stored = {name: tensor.dtype for path in files for name, tensor in open_tensors(path).items()}
    wide = [torch.bfloat16] if FP8 in stored.values() else [dtype for dtype in stored.values() if _is_wide(dtype)]
    model = Transformer.empty(local, device, parse_dtype(dtype or config.dtype or [*wide, torch.bfloat16][0]))
    parameters, missing = dict(model.named_parameters()), dict.fromkeys(table)

    def check(path: Path, name: str, tensor: Tensor) -> None:
        if name not in table:
            raise UserError(f"{path} holds tensor {name}, which the {config.architecture} of config.json has no place "
                            "for; the two do not belong together")
        if tuple(tensor.shape) != table[name].shape:
            raise UserError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}, but config.json implies "
                            f"{table[name].shape}; the two do not belong together")
        in_fp8 = parameters[parts[name].parameter].dtype == FP8
        from_fp8 = in_fp8 and not config.float8.made
        if not (tensor.dtype == FP8 if from_fp8 else _is_wide(tensor.dtype)):
            raise UserError(f"{path}: tensor {name} is {tensor.dtype}, but config.json implies "
                            f"{FP8 if from_fp8 else 'a wider floating-point type'}; use a checkpoint in bf16 or "
                            "fp16, or in fp8 with a quantization_config that fits")
        if name not in missing:
            raise UserError(f"{path}: tensor {name} is there twice, perhaps under two names; remove one, or "
                            "download the checkpoint again")
        missing.pop(name)
        if in_fp8 and config.float8.made:
            missing.pop(scale_of(name), None)

    def read(path: Path, name: str, tensor: Tensor) -> None:
        if tensor.dtype == FP8 and has_nan(tensor) or name.endswith(SCALE) and not _are_scales(tensor):
            what = "scales that are negative, infinite or nan" if name.endswith(SCALE) else "nan"
            raise UserError(f"{path}: tensor {name} holds {what}; it is damaged: download it again")
        put(parameters, parts, name, tensor, group)

    for path in files:
        work = [one for name, tensor in open_tensors(path).items() if not is_derived(name, config, stored)
                for one in separate(name, tensor, table, config.float8).items()]
        for name, tensor in work:
            check(path, name, tensor)
        with ThreadPoolExecutor(READERS, initializer=like_this_thread(device)) as readers:
            list(readers.map(lambda one: read(path, *one), work))  # noqa: B023 all are done before the next file
    if missing:
        raise UserError(f"{len(missing)} of {len(table)} tensors are missing from {folder} ({files[0].name} and its "
                        f"shards), the first is {next(iter(missing))}; download it again")
    model = widen(model) if weights == "wide" else model
    return model if group is None else join(model, group)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _are_scales(tensor: Tensor) -> bool:
    return bool((tensor.isfinite() & (tensor >= 0)).all())
