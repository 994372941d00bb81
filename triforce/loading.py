"""`load`: from names and flags to an Engine, with every setting checked before anything large is read."""

import inspect
from pathlib import Path

import torch

from . import checkpoint as ckpt
from . import draft_memory, memory
from .engine import Engine, as_numbers
from .errors import UserError, not_known
from .graphs import compiler_imported
from .model import ModelConfig
from .parallel import Group, shard_config, subgroup
from .quantize import check_fp8, fp8_bytes, fp8_copy
from .retrieval import KINDS as VIEWS
from .retrieval import plan_view
from .state import Settings
from .tokenizer import Tokenizer


def load(checkpoint: str | Path = "tiny", *, draft: str | Path | bool | None = None, retrieval: bool = True,
         device: str | torch.device | None = None, dtype: str | torch.dtype | None = None,
         compile: bool | None = None, max_seq_len: int | None = None, max_batch_size: int = 1,
         budget: int | float | None = None, chunk_size: int = 8, gamma: int | str = "auto",
         gamma_inner: int | None = None, draft_cache: str | None = None, block_size: int | None = None,
         draft_dtype: str | None = None, offload: bool | str = False, num_resident_layers: int | None = None,
         resident_memory: int | str | None = None, group: Group | None = None,
         draft_ranks: list[int] | None = None, **settings) -> Engine:
    """Loads a target, and a draft if there is one, ready to generate.

    Args:
        checkpoint: a Hugging Face folder, a repository id that was downloaded before, or "tiny", the embedded pair.
        draft: the same for the draft model. None: the pair's own for "tiny", else no draft. False: no draft. "ngram":
            no model, but what followed the newest tokens where they stood before; with gamma="auto" that is one of the
            ways to draft unless draft is False.
        retrieval: False: no middle level, so that a draft is checked by the full cache directly.
        device: None: CUDA if there is one, else the CPU.
        dtype: None: the checkpoint's on CUDA, float32 on the CPU.
        compile: None: on for CUDA, off elsewhere.
        max_seq_len: most tokens of prompt and output. None: sized by the first call, and grown when a call needs it.
        max_batch_size: prompts that run side by side; more are served group by group.
        budget: tokens of the view that drafts, or a fraction of the prompt (0.1). None: 1/32 of the prompt, in steps of
            256, between 1024 and 4096; with offload 1/16, up to 8192.
        chunk_size: tokens that are retrieved together.
        gamma: tokens proposed per verify over the full cache, at most block_size - 1. "auto": chosen from round to
            round by measured step times and observed acceptance, and so is which levels draft at all. The output's
            law is the same; but as times vary, a seed gives the same text again only with a number here.
        gamma_inner: tokens that the draft proposes per verify over the retrieval view. None: 2; with "auto" at
            most 4, on a CPU 3.
        draft_cache: which tokens of the cache the target drafts with: "retrieval", those that the newest ones attend
            to, chosen anew again and again; "snapkv", those that the prompt's end attends to; "streaming", the first
            and the newest. With draft=False this is MagicDec's self-speculation. With retrieval=False it says what the
            draft model keeps: "streaming" (the default), "snapkv", with a view of `budget` tokens, or "full". The last
            two are for drafts that are at home in texts of this length.
        block_size: rows of every verify, on a CPU rounded up to a multiple of 4. None: 8; 16 on CUDA, where padding
            costs little, fewer for a batch of more than 4 (64 rows in all, at least 4 each and as many as gamma wants),
            and 64 with offload, where a verify takes as long as its copies; 1 where nothing drafts.
        draft_dtype: "fp8": the retrieval level drafts with a copy of the target's weights in fp8. The output stays
            exact. It takes a byte more per weight, and a GPU of compute capability 8.9 or later.
        offload: True: the KV cache lies in pinned host memory and streams through the device, so that a context need
            not fit there. "auto": only those of its layers that do not fit. The output is as exact as ever.
        num_resident_layers: with offload, so many of the cache's layers stay on the device.
        resident_memory: the same in bytes of the device's memory, or as a text: "20GiB".
        group: the processes that share the target, from `triforce.parallel.from_environment` under torchrun. Each of
            them calls `load`, and then whatever the others call, with the same arguments.
        draft_ranks: of the group, the ranks that run the draft, rank 0 among them; several share it as they share the
            target. None: all of them run all of it, and nothing need be sent.
        settings: the remaining fields of `triforce.state.Settings`.

    Raises:
        UserError: the checkpoint, a setting or the machine does not fit; the text says how to mend it.
    """
    device = _device(device)
    compile = device.type == "cuda" if compile is None else compile
    max_seq_len, max_batch_size, budget, chunk_size = map(as_numbers, (max_seq_len, max_batch_size, budget, chunk_size))
    gamma, gamma_inner, block_size = map(as_numbers, (gamma, gamma_inner, block_size))
    num_resident_layers, resident_memory = map(as_numbers, (num_resident_layers, resident_memory))
    settings = {name: as_numbers(value) for name, value in settings.items()}
    folder = ckpt.resolve(checkpoint)
    if draft == "ngram":
        draft_folder = None
    elif draft is None or draft is True:
        draft_folder = ckpt.tiny_draft() if checkpoint == "tiny" else None
    else:
        draft_folder = None if draft is False else ckpt.resolve("tiny" if draft == "tiny" else draft)
    drafts = retrieval or draft == "ngram" or draft_folder is not None
    if block_size is None:
        block_size = _default_block(device, offload, max_batch_size, gamma) if drafts else 1
    _check_whole("block_size", block_size, 8)
    if block_size > 1 and device.type == "cpu":  # its products have the same bits in each of 4 or 8 rows, not of 5 or 6
        block_size = -(-block_size // 4) * 4
    given = draft_cache is not None
    draft_cache = draft_cache if given else "retrieval" if retrieval else "streaming"
    auto = gamma == "auto"
    if isinstance(gamma, str) and not auto:
        raise UserError(f"gamma ({gamma!r}) must be a whole number, at least 1, or 'auto'")
    ngram = draft == "ngram" or auto and drafts and draft is not False
    gamma = max(block_size - 1, 1) if auto else gamma
    if gamma_inner is None:
        most = 4 if device.type == "cuda" else 3  # a CPU's step takes longer for each row more
        gamma_inner = min(most if auto else 2, max(block_size - 1, 1))
    for name in settings:
        if name not in setting_names():
            raise UserError(not_known(name, "setting", setting_names()))
    _check_offload(offload, num_resident_layers, resident_memory)
    if resident_memory is not None:
        resident_memory = memory.parse_size(resident_memory, "resident_memory")
    settings.setdefault("prefill_chunk_size", 8192 if device.type == "cuda" else 1024)
    # A round ends at a flush at the latest: where a verify takes a second, flushes are to be rare.
    settings.setdefault("flush_interval", 256 if offload and device.type == "cuda" else 128)
    shape = Settings(gamma=gamma, gamma_inner=gamma_inner, block_size=block_size, retrieval=retrieval, auto=auto,
                     chunk_size=chunk_size, ngram=ngram, draft_cache=draft_cache, **settings)
    if draft_cache == "snapkv" and offload and retrieval:
        raise UserError("draft_cache 'snapkv' chooses from a cache on the device; use 'retrieval' or 'streaming' with "
                        "offload")
    if given and not retrieval and draft_folder is None:
        raise UserError(f"draft_cache ({draft_cache!r}) is what a target or a draft model drafts with, and neither "
                        "does; leave out draft_cache, or retrieval=False (--draft-cache, --no-retrieval)")
    _check_settings(shape, drafts, max_batch_size, budget)

    tokenizer = Tokenizer(folder)
    configs = [ckpt.read_config(path) for path in (folder, draft_folder) if path is not None]
    if draft_folder is not None:
        difference = tokenizer.same_as(Tokenizer(draft_folder))
        if difference:
            raise UserError(f"the draft {draft_folder} has another tokenizer than the target: {difference}; "
                            "choose a draft of the same family, or --draft none")
    if num_resident_layers is not None and num_resident_layers > configs[0].n_layer:
        raise UserError(f"num_resident_layers ({num_resident_layers}) is more than the model's {configs[0].n_layer} "
                        "layers; leave offload out to keep all on the device")
    chosen = _dtype(dtype, configs[0].dtype, device)
    draft_config = configs[1] if len(configs) > 1 else None
    if draft_dtype not in (None, "fp8"):
        raise UserError(f"draft_dtype ({draft_dtype!r}) must be 'fp8', or left out")
    if draft_dtype and not retrieval:
        raise UserError("draft_dtype is for the retrieval level, which retrieval=False leaves out; drop one of them")
    local = shard_config(configs[0], group)
    if draft_ranks is not None:
        draft_config = check_draft_ranks(draft_ranks, group, draft_config)
    parts = memory.weight_parts(local, draft_config, chosen.itemsize)
    if draft_dtype:
        check_fp8(device)
        parts.append(memory.Part("fp8 copy for drafting", fp8_bytes(local), ("no --draft-dtype",)))
    memory.check(parts, device)
    with compiler_imported(compile):
        target = ckpt.load_model(folder, device, chosen, group)
        draft_group = subgroup(group, draft_ranks) if draft_ranks is not None and len(draft_ranks) > 1 else None
        draft_model = None if draft_config is None else ckpt.load_model(draft_folder, device, chosen, draft_group)
    if not compile:
        for model in (target, draft_model):
            if model is not None:
                model.pack(block_size)
    drafting = fp8_copy(target) if draft_dtype else None
    return Engine(target, tokenizer, draft_model, drafting=drafting, settings=shape, budget=budget,
                  max_seq_len=max_seq_len, max_batch_size=max_batch_size, compile=compile, offload=offload,
                  num_resident_layers=num_resident_layers, resident_memory=resident_memory, draft_ranks=draft_ranks,
                  eos_ids=ckpt.eos_token_ids(folder))


def setting_names() -> frozenset[str]:
    """Everything that `load` takes by keyword."""
    fields = Settings.__dataclass_fields__.keys() - {"auto", "ngram"}  # gamma="auto" and draft="ngram" say so
    named = inspect.signature(load).parameters.keys() - {"checkpoint", "settings"}
    return frozenset(fields | named)


def _default_block(device: torch.device, offload, max_batch_size, gamma) -> int:
    """On a GPU the weights are read once for the rows of all prompts, and up to 64 rows cost little more than one."""
    if device.type == "cpu":
        return 8
    if offload:
        return 64
    rows = 64 // max_batch_size if isinstance(max_batch_size, int) and max_batch_size > 0 else 16
    wanted = gamma + 1 if isinstance(gamma, int) else 0
    return min(max(rows, wanted, 4), 16)


def _device(device) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"device {device!r} is unknown; use 'cpu', 'cuda' or 'cuda:1'") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {str(device)!r} is not supported; use 'cpu' or 'cuda'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise UserError(f"device {device} was asked for and {count} CUDA devices are here; use --device cpu")
    return device


def _dtype(dtype, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    name = dtype or (checkpoint_dtype or "float32" if device.type == "cuda" else "float32")
    if name not in ckpt.DTYPES:
        raise UserError(f"dtype {name!r} is unknown; use float32, float16 or bfloat16")
    return ckpt.DTYPES[name]


def _check_offload(offload, num_resident_layers, resident_memory) -> None:
    if offload not in (False, True, "auto"):
        raise UserError(f"offload ({offload!r}) must be True, False or 'auto'")
    if not offload and (num_resident_layers is not None or resident_memory is not None):
        raise UserError("num_resident_layers and resident_memory (--num-resident-layers, --resident-memory) say what "
                        "stays on the device while the rest is offloaded; add offload=True (--offload)")
    if num_resident_layers is not None and resident_memory is not None:
        raise UserError("num_resident_layers and resident_memory were both given; give one")
    if num_resident_layers is not None and (not isinstance(num_resident_layers, int) or num_resident_layers < 0):
        raise UserError(f"num_resident_layers ({num_resident_layers!r}) must be a whole number, at least 0")


def check_draft_ranks(ranks: list[int], group: Group | None, config: ModelConfig | None) -> ModelConfig | None:
    """What this rank holds of the draft. Every rank checks all of it: one that raised alone would leave the others."""
    if group is None:
        raise UserError("draft_ranks says which of several ranks run the draft, and there is one; start with torchrun")
    if config is None:
        raise UserError("draft_ranks says which ranks run the draft, and there is none; add --draft")
    if not ranks or sorted(set(ranks)) != list(ranks) or ranks[0] != 0 or ranks[-1] >= group.size:
        raise UserError(f"draft_ranks ({ranks}) must be ranks from 0 to {group.size - 1} in ascending order, rank 0 "
                        "among them; try 0")
    part = shard_config(config, Group(0, len(ranks), "") if len(ranks) > 1 else None)
    return part if group.rank in ranks else None


def _check_whole(name: str, value, usual: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{name} ({value!r}) must be a whole number, at least 1; try {usual}")


def _check_settings(settings: Settings, drafts: bool, max_batch_size: int, budget) -> None:
    for name, usual in (("gamma", 6), ("gamma_inner", 2), ("chunk_size", 8), ("flush_interval", 128),
                        ("draft_window", 256), ("prefill_chunk_size", 2048), ("rebuild_interval", 64),
                        ("piece_tokens", 2048)):
        if getattr(settings, name) is not None or name not in ("rebuild_interval", "piece_tokens"):
            _check_whole(name, getattr(settings, name), usual)
    _check_whole("max_batch_size", max_batch_size, 8)
    if budget is not None and not isinstance(budget, (int, float)):
        raise UserError(f"budget ({budget!r}) must be a number of tokens, or a fraction of the prompt; try 4096 or 0.1")
    if not isinstance(settings.recent, (int, float)) or not 0 <= settings.recent < 1:
        raise UserError(f"recent ({settings.recent!r}) must be a share of the budget, at least 0 and below 1; try 0.25")
    if not isinstance(settings.draft_sink, int) or settings.draft_sink < 0:
        raise UserError(f"draft_sink ({settings.draft_sink!r}) must be a whole number, at least 0; try 4")
    block, interval = settings.block_size, settings.flush_interval
    if block > interval:
        raise UserError(f"block_size ({block}) must be between 1 and flush_interval ({interval}); "
                        f"try {min(8, interval)}")
    if drafts and settings.gamma > block - 1:
        remedy = f"--gamma {block - 1}" if block > 1 else "--block-size 8"
        if settings.gamma < interval:
            remedy += f" or --block-size {settings.gamma + 1}"
        raise UserError(f"gamma ({settings.gamma}) must be between 1 and block_size - 1 ({block - 1}); try {remedy}")
    if drafts and settings.gamma_inner > block - 1:
        raise UserError(f"gamma_inner ({settings.gamma_inner}) must be between 1 and block_size - 1 ({block - 1}); "
                        f"try {min(2, block - 1)}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise UserError(f"budget ({budget}) as a fraction of the prompt must be above 0 and at most 1; try 0.1")
    kinds, whose = (VIEWS, "with") if settings.retrieval else (draft_memory.KINDS, "without")
    if settings.draft_cache not in kinds:
        raise UserError(f"draft_cache ({settings.draft_cache!r}) {whose} a retrieval level must be one of "
                        f"{', '.join(kinds)}" + (" (it is for a draft without one: --no-retrieval)"
                                                 if settings.draft_cache in draft_memory.KINDS else ""))
    if settings.has_view:
        plan_view(budget if isinstance(budget, int) else interval + 2 * settings.chunk_size, settings.chunk_size,
                  interval, settings.recent)
