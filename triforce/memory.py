"""What a run will need, part by part, before anything is allocated. Knows shapes and sizes, and allocates nothing."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import UserError
from .model import ModelConfig
from .state import Settings


@dataclass
class Part:
    name: str
    bytes: int
    remedy: str = ""  # the flag that makes it smaller


def weight_parts(target: ModelConfig, draft: ModelConfig | None, itemsize: int) -> list[Part]:
    parts = [Part("target weights", target.num_parameters * itemsize, "--dtype")]
    if draft is not None:
        parts.append(Part("draft weights", draft.num_parameters * itemsize, "--draft none"))
    return parts


def cache_parts(target: ModelConfig, draft: ModelConfig | None, settings: Settings, *, batch: int, capacity: int,
                budget: int, itemsize: int) -> list[Part]:
    """Caches of a State, and what a prefill holds besides them at its widest point."""
    per_token = batch * target.kv_elements_per_token * itemsize
    block = settings.block_size
    chunk = min(settings.prefill_chunk_size, capacity)
    per_chunk_token = 4 * target.ffn_dim + 8 * target.n_head * target.head_dim
    prefill = (capacity * 2 * target.dim + chunk * per_chunk_token) * itemsize
    levels = 2 if draft is not None else 1
    laws = batch * target.vocab_size * 4 * block * (4 + levels)
    parts = [
        Part("KV cache", per_token * (capacity + settings.flush_interval + 2 * block), "--max-seq-len"),
        Part("prefill activations", prefill, "--prefill-chunk-size"),
        Part("logits and probabilities", laws),
    ]
    if settings.retrieval:
        parts.append(Part("chunk keys", per_token * capacity // 2 // settings.chunk_size, "--chunk-size"))
        parts.append(Part("retrieval view", per_token * budget, "--budget"))
    if draft is not None:
        window = settings.draft_sink + settings.draft_window + max(64, 2 * block)
        parts.append(Part("draft cache", batch * window * draft.kv_elements_per_token * itemsize))
    return parts


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check(parts: list[Part], device: torch.device, hint: str = "") -> None:
    """Raises UserError, with every part and its flag, if the parts do not fit the device."""
    free, needed = available(device), sum(part.bytes for part in parts)
    if free is None or needed <= free:
        return
    listed = ", ".join(f"{part.name} {_gib(part.bytes)}" + (f" ({part.remedy})" if part.remedy else "")
                       for part in parts if part.bytes >= 2**20)
    raise UserError(f"this needs {_gib(needed)} of memory on {device} and {_gib(free)} are free: {listed}{hint}")


def peak(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU since the last reset, resident on a CPU since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
