"""What a run will need, part by part, before anything is allocated. Knows shapes and sizes, and allocates nothing."""

import re
import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from .cache import aligned
from .errors import UserError
from .model import ModelConfig
from .offload import STAGING_BUFFERS, piece_tokens
from .state import Settings


@dataclass
class Part:
    name: str
    bytes: int
    remedies: tuple[str, ...] = ()  # what makes it smaller: flags, or names of settings


def weight_parts(target: ModelConfig, draft: ModelConfig | None, itemsize: int) -> list[Part]:
    parts = [Part("target weights", target.num_parameters * itemsize, ("--dtype",))]
    if draft is not None:
        parts.append(Part("draft weights", draft.num_parameters * itemsize, ("--draft none",)))
    return parts


def prefix_bytes(config: ModelConfig, num_layers: int, *, batch: int, capacity: int, itemsize: int) -> int:
    """K and V of so many layers, without the tail."""
    return batch * config.kv_elements_per_token * itemsize // config.n_layer * num_layers * capacity


def cache_parts(target: ModelConfig, draft: ModelConfig | None, settings: Settings, *, batch: int, capacity: int,
                budget: int, itemsize: int, num_resident_layers: int | None = None) -> list[Part]:
    """Caches of a State, and what a prefill holds besides them at its widest point.

    num_resident_layers: of the KV prefix; the others are not counted (see `host_part`), what streams them is.
    """
    per_token = batch * target.kv_elements_per_token * itemsize
    block = settings.block_size
    chunk = min(settings.prefill_chunk_size, capacity)
    per_chunk_token = 4 * target.ffn_dim + 8 * target.n_head * target.head_dim
    embedded = 1 if target.num_shards == 1 else 2  # ranks add up what each knows of the words
    prefill = (capacity * embedded * target.dim + chunk * per_chunk_token) * itemsize
    levels = 2 if draft is not None else 1
    laws = batch * target.vocab_size * 4 * block * (4 + levels)
    layers = target.n_layer if num_resident_layers is None else num_resident_layers
    sizes = {"batch": batch, "capacity": capacity, "itemsize": itemsize}
    tail, view = aligned(settings.flush_interval + 2 * block), aligned(budget)
    offloads = layers < target.n_layer
    parts = [
        Part(f"KV cache of {layers} resident layers" if offloads else "KV cache", prefix_bytes(target, layers, **sizes),
             ("--num-resident-layers" if offloads else "--offload", "--max-seq-len", "--batch-size")),
        Part("tail", per_token * tail, ("flush_interval", "--batch-size")),
        Part("prefill activations", prefill, ("--prefill-chunk-size",)),
        Part("logits and probabilities", laws, ("--batch-size",)),
    ]
    if settings.scores_chunks:
        parts.append(Part("chunk keys", per_token * capacity // 2 // settings.chunk_size, ("--chunk-size",)))
    if settings.retrieval:
        parts.append(Part("retrieval view", per_token * view, ("--budget",)))
    if offloads:
        one_layer = per_token // target.n_layer
        piece = piece_tokens(one_layer, settings.flush_interval, capacity, settings.piece_tokens)
        work = prefix_bytes(target, 1, **{**sizes, "batch": 1})  # a prompt is prefilled at a time
        parts.append(Part("a layer's KV during prefill", work, ("--max-seq-len",)))
        parts.append(Part("staging buffers", STAGING_BUFFERS * piece * one_layer, ("piece_tokens", "--batch-size")))
    if draft is not None:
        tokens = settings.draft_sink + settings.draft_window + max(64, 2 * block)
        if settings.drafts_over != "streaming":
            tokens = capacity + tail + (view if settings.has_view else 0)
        parts.append(Part("draft cache", batch * tokens * draft.kv_elements_per_token * itemsize,
                          () if settings.drafts_over == "streaming" else ("--draft-cache streaming",)))
    if settings.draft_cache == "snapkv":  # scores, their softmax and what of it counts, one layer at a time
        chooser = target if settings.retrieval else draft
        parts.append(Part("choice of the SnapKV view", 3 * chooser.n_head * block * capacity * 4, ("--draft-cache",)))
    return parts


def host_part(config: ModelConfig, num_layers: int, **sizes: int) -> Part:
    """The prefix of so many offloaded layers, in host memory. sizes: see `prefix_bytes`."""
    return Part(f"KV cache of {num_layers} layers in host memory", prefix_bytes(config, num_layers, **sizes),
                ("--num-resident-layers", "--max-seq-len", "--batch-size"))


def fitting_layers(config: ModelConfig, parts: list[Part], device: torch.device, resident_memory: int | None,
                   **sizes: int) -> int:
    """How many layers of the KV prefix fit a device beside `parts`, and into `resident_memory` bytes."""
    layer = prefix_bytes(config, 1, **sizes)
    free = available(device)
    room = [] if free is None else [int(0.95 * free) - sum(part.bytes for part in parts)]
    room += [] if resident_memory is None else [resident_memory]
    return min(max(min(room, default=0) // layer, 0), config.n_layer)


def parse_size(size: int | str, name: str) -> int:
    """Bytes of a number, or of a text such as "20GiB" or "512 MB"."""
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(size).lower())
    if match is None:
        raise UserError(f"{name} ({size!r}) must be a number of bytes or a size such as '20GiB'")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = []
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    granted, size = resource.getrlimit(resource.RLIMIT_AS)[0], _lines("/proc/self/statm")
    if granted != resource.RLIM_INFINITY and size:
        free.append(granted - int(size[0].split()[0]) * resource.getpagesize())
    # A container may be granted less than its machine has; the page cache that it holds can be had back.
    limit, used, stat = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat"))
    if limit and used and limit[0].isdigit():
        cached = sum(int(line.split()[1]) for line in stat if line.startswith(("inactive_file ", "active_file ")))
        free.append(int(limit[0]) - int(used[0]) + cached)
    return max(min(free), 0) if free else None


def ran_out(error: Exception) -> bool:
    """Whether memory was refused. The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def check(parts: list[Part], device: torch.device, of_no_use: Collection[str] = ()) -> None:
    """Raises UserError, with every part and its remedies but those of no use, if the parts do not fit the device."""
    free, needed = available(device), sum(part.bytes for part in parts)
    if free is None or needed <= free:
        return
    listed = []
    for part in sorted(parts, key=lambda part: -part.bytes):
        remedies = ", ".join(remedy for remedy in part.remedies if remedy not in of_no_use)
        if part.bytes >= 2**20:
            listed.append(f"{part.name} {_gib(part.bytes)}" + (f" ({remedies})" if remedies else ""))
    raise UserError(f"this needs {_gib(needed)} of memory on {device} and {_gib(free)} are free: {', '.join(listed)}")


def peak(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU since the last reset, resident on a CPU since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
