"""`load`: from names and options to an Engine, with everything checked before anything large is read."""

import importlib
import threading
from pathlib import Path

import torch

from ..config import Placement, Settings, split, takes
from ..cpu import pack_weights
from ..errors import UserError
from ..fp8 import check_copy, fp8_copy
from ..hf import checkpoint as ckpt
from ..hf.fingerprint import files_of
from ..hf.folders import find_draft, resolve
from ..hf.tokenizer import Tokenizer
from ..model import ModelConfig
from ..parallel import Group, shard_config, share, subgroup, together
from ..runtime.host import check_process, own_settings
from ..runtime.streams import ComputeStream
from . import memory
from .engine import Engine


@takes(Settings, Placement)
@own_settings()
def load(checkpoint: str | Path = "tiny", *, group: Group | None = None, **options) -> Engine:
    """Loads a target, and a draft if there is one, ready to generate.

    Args:
        checkpoint: a Hugging Face folder, a repository id that was downloaded before, or "tiny", the embedded pair.
        group: the processes that share the target, from `triforce.parallel.from_environment` under torchrun. Each of
            them calls `load`, and then whatever the others call, with the same arguments.
        options: OPTIONS

    Raises:
        UserError: the checkpoint, a setting or the machine does not fit; the text says how to mend it.
    """
    check_process()
    [settings, place], _ = split(options, Settings, Placement, what="setting")
    place = place.resolve()
    device, longest = place.device, place.max_seq_len
    folder, draft_folder = resolve(checkpoint), find_draft(checkpoint, settings.draft)
    files = files_of(folder)
    config = ckpt.read_config(folder, longest, place.weights)
    draft_config = draft_folder and ckpt.read_config(draft_folder, longest)
    resolved = settings.resolve(device, has_model=draft_folder is not None, offload=place.offload,
                                max_batch_size=place.max_batch_size, query_group=config.query_group)
    if place.draft_dtype and not settings.retrieval:
        raise UserError("draft_dtype is for the retrieval level, which retrieval=False leaves out; drop one of them")
    check_target(place, config, device)
    dtype, local = find_dtype(place.dtype, config.dtype, device), shard_config(config, group)
    if place.draft_ranks is not None:
        draft_config = check_draft_ranks(place.draft_ranks, group, draft_config)
    parts = memory.weight_parts(local, draft_config, dtype, copies=place.draft_dtype is not None)
    together(group, lambda: memory.check(parts, device))  # one GPU may have less memory free than another
    stream = ComputeStream(device)
    if place.compile:  # its import takes seconds, and reading weights hardly needs Python
        threading.Thread(target=importlib.import_module, args=("torch._inductor.compile_fx",), name="compiler").start()
    tokenizer = Tokenizer(folder)
    if draft_folder is not None and (difference := tokenizer.same_as(Tokenizer(draft_folder))):
        raise UserError(f"{draft_folder} has another tokenizer than the target: {difference}; try --draft none")

    def check_unchanged() -> None:  # or what was read may be of two models
        if files_of(folder) != files:
            raise UserError(f"{folder} was written to while it was read; load it again")

    draft_group = subgroup(group, place.draft_ranks) if len(place.draft_ranks or ()) > 1 else None
    with stream.used():
        target, draft = ckpt.load_model(folder, device, dtype, group, longest, place.weights), None
        if draft_config is not None:
            draft = ckpt.load_model(draft_folder, device, dtype, draft_group, longest)
        for model in (target, draft) if place.compile is False else ():
            if model is not None:
                pack_weights(model, resolved.block_size)
        together(group, check_unchanged)
        drafting = share(fp8_copy(target), group) if place.draft_dtype else None
        engine = Engine(target, tokenizer, draft, drafting=drafting, settings=settings, placement=place, folder=folder,
                        compute_stream=stream)
    engine.eos_ids, engine.defaults = ckpt.eos_token_ids(folder), ckpt.generation_defaults(folder)
    return engine


def check_target(place: Placement, config: ModelConfig, device: torch.device | None = None) -> None:
    """Raises UserError for a placement that the target does not fit. device: None: a GPU that can do all."""
    if (count := place.num_resident_layers or 0) > (most := len(config.full_layers)):
        raise UserError(f"num_resident_layers ({count}) is more than the {most} layers that see all keys; use fewer")
    if (longest := place.max_seq_len or 0) > config.max_len:
        name, most = config.limit_name, config.max_len
        raise UserError(f"max_seq_len ({longest}) exceeds the model's {name}; use at most {most}")
    if config.num_experts and "fp8" in (place.draft_dtype, place.weights):
        raise UserError("fp8 (weights, draft_dtype) is for dense models, and this one has experts; leave it out")
    if place.draft_dtype:
        check_copy(config, device)


def find_dtype(dtype, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """The dtype asked for; by default what config.json says on a GPU, else float32."""
    return ckpt.parse_dtype(dtype or (checkpoint_dtype if device.type == "cuda" else None) or "float32")


def check_draft_ranks(ranks: list[int], group: Group | None, config: ModelConfig | None) -> ModelConfig | None:
    """The draft's part on this rank. Every rank checks all ranks: one that raised alone would leave the others."""
    if group is None or config is None:
        raise UserError("draft_ranks needs several ranks, and a draft for them; start with torchrun, and add --draft")
    if not ranks or sorted(set(ranks)) != list(ranks) or ranks[0] != 0 or ranks[-1] >= group.size:
        raise UserError(f"draft_ranks ({ranks}) must be ranks below {group.size}, ascending, the first one 0; try 0")
    part = shard_config(config, Group(0, len(ranks), "") if len(ranks) > 1 else None)
    return part if group.rank in ranks else None
