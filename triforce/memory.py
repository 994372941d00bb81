"""What a run will need, part by part: its caches are built on the meta device, without memory, and added up."""

import functools
import os
import re
import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch

from . import free_memory
from .config import Placement, Settings
from .errors import UserError
from .fp8 import LAYERS, linear_shape, work_bytes
from .free_memory import ALLOCATOR, ALLOCATORS, GROWING
from .graphs import SPARE, Compiler, unreserved
from .kv.offload import Offload
from .kv.prefix import PrefixStore
from .kv.views import common_queries, scored_together
from .model import ModelConfig, Transformer
from .state import State


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    remedies: tuple[str, ...] = ()  # what makes it smaller: flags, or names of settings


def weight_parts(target: ModelConfig, draft: ModelConfig | None, dtype: torch.dtype) -> tuple[Part, ...]:
    remedies = ("--dtype",) if target.float8 is not None else ("--dtype", "--weights fp8")
    parts = [Part("target weights", _weight_bytes(target, dtype), remedies)]
    if draft is not None:
        parts.append(Part("draft weights", _weight_bytes(draft, dtype), ("--draft none",)))
    return tuple(parts)


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(x.nbytes for x in _meta_model(config, dtype).parameters())


def state_parts(target: ModelConfig, draft: ModelConfig | None, settings: Settings, *, batch: int, capacity: int,
                budget: int, vocab_size: int, dtype: torch.dtype, device: torch.device,
                num_resident_layers: int | None = None, base: int = 0) -> tuple[Part, ...]:
    """Caches of a State, built on the meta device, and what a prefill and a step hold besides at their widest point.

    Args:
        num_resident_layers: of the KV prefix; the others are not counted (see `host_part`), what streams them is.
        base: tokens of a prefix that all rows share. It is not counted (see `prefix_parts`).
    """
    shared = PrefixStore.blank(target, base, "meta", dtype) if base else None
    state = _on_meta(target, draft, settings, batch=batch, capacity=capacity, budget=budget, vocab_size=vocab_size,
                     dtype=dtype, device=device, num_resident_layers=num_resident_layers, shared=shared)
    cache, view, sources = state.cache, state.hierarchy.view, state.hierarchy.sources
    prefix, offload = cache.prefix, cache.prefix.offload
    kept = f"KV cache of {prefix.num_resident} resident layers" if offload else "KV cache"
    kept = f"KV cache of {batch} rows behind what they share" if base else kept
    resident, chunk_keys = (sum(x.nbytes for x in tensors) for tensors in ((*prefix.k, *prefix.v), prefix.chunk_keys))
    parts = [
        Part(kept, resident, ("--num-resident-layers" if offload else "--offload", "--max-seq-len", "--batch-size")),
        Part("tail", cache.nbytes - prefix.nbytes, ("flush_interval", "--batch-size")),
        Part("prefill activations", _prefill_bytes(target, settings, state.capacity - base, dtype),
             ("--prefill-chunk-size",)),
        Part("attention along the paths of a tree", _path_bytes(target, settings, batch),
             ("--tree-size", "block_size")),
        Part("logits and probabilities", _law_bytes(target, settings, batch, 1 if draft is None else 2, device),
             ("--batch-size",)),
        Part("chunk keys", chunk_keys, ("--chunk-size",)),
        Part("choice of the retrieval view", _choice_bytes(target, settings, batch, state.capacity, base,
                                                           dtype),
             ("--chunk-size", "block_size"))]
    if view is not None:
        parts.append(Part("retrieval view", view.nbytes, ("--budget",)))
    if offload is not None:
        work = batch and offload.nbytes // batch // len(offload.layers)  # a prompt is prefilled at a time
        parts.append(Part("a layer's KV during prefill", work, ("--max-seq-len",)))
        parts.append(Part("staging buffers", sum(x.nbytes for x in offload.staging), ("piece_tokens", "--batch-size")))
    if draft is not None:
        parts.append(Part("draft cache", sum(source.nbytes for source in sources.values()),
                          () if settings.draft_attends_to == "streaming" else ("--draft-cache streaming",)))
    if settings.draft_cache == "snapkv":  # scores, their softmax and what of it counts, one layer at a time
        chooser, before = (target, base) if settings.retrieval else (draft, 0)
        own, queries = capacity - before, batch * common_queries(settings.block_size, batch)
        copied = chooser.n_kv_head * chooser.head_dim * own * dtype.itemsize if batch > 1 else 0
        scores = 3 * chooser.n_head * 4
        parts.append(Part("choice of the SnapKV view", max(scores * queries * before,
                                                           scores * settings.block_size * own + copied),
                          ("--draft-cache",)))
    return tuple(part for part in parts if part.bytes)


def prefix_parts(config: ModelConfig, settings: Settings, *, capacity: int, dtype: torch.dtype, device: torch.device,
                 num_resident_layers: int | None = None) -> tuple[Part, ...]:
    """Of a prefix that rows are to share, and of its prefill. num_resident_layers: see `state_parts`."""
    offload = None
    if num_resident_layers is not None and num_resident_layers < config.n_layer:
        offload = Offload(config, num_resident_layers, batch=1, capacity=capacity, interval=settings.flush_interval,
                          device="meta", dtype=dtype, piece=settings.piece_tokens, runs_on=device)
    store = PrefixStore(config, 1, capacity, "meta", dtype, offload=offload,
                        chunk_size=settings.scored_chunk_size)
    resident, chunk_keys = (sum(x.nbytes for x in tensors) for tensors in ((*store.k, *store.v), store.chunk_keys))
    parts = [Part("KV cache of the shared prefix", resident, ("--num-resident-layers" if offload else "--offload",
                                                              "a shorter document")),
             Part("its chunk keys", chunk_keys, ("--chunk-size",)),
             Part("prefill activations", _prefill_bytes(config, settings, capacity, dtype), ("--prefill-chunk-size",))]
    if offload is not None:
        work = offload.nbytes // len(offload.layers)
        parts.append(Part("a layer's KV during prefill", work, ("a shorter document",)))
        parts.append(Part("staging buffers", sum(x.nbytes for x in offload.staging), ("piece_tokens",)))
    return tuple(part for part in parts if part.bytes)


def _on_meta(target: ModelConfig, draft: ModelConfig | None, settings: Settings, *, dtype: torch.dtype,
             device: torch.device, **sizes) -> State:
    """The State that these sizes make on a device, without its memory.

    Some functions (`arange` and `zeros_like` among them) are Python on the meta device, and import half of PyTorch's
    compiler. That would take a quarter of a second of every first answer: what a State is built with does without them.
    """
    models = [None if config is None else _meta_model(config, dtype) for config in (target, draft)]
    return State(*models, settings, compiler=Compiler(torch.device("cpu")), runs_on=device, **sizes)


@functools.lru_cache(maxsize=4)
def _meta_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    return Transformer.empty(config, "meta", dtype)


def _prefill_bytes(config: ModelConfig, settings: Settings, capacity: int, dtype: torch.dtype) -> int:
    """Hidden states of the whole prompt, and activations of a chunk."""
    per_chunk_token = 4 * config.ffn_dim + 8 * config.n_head * config.head_dim
    embedded = 1 if config.num_shards == 1 else 2  # ranks add up what each knows of the words
    chunk = min(settings.prefill_chunk_size, capacity)
    more = max((capacity // chunk).bit_length() - 2, 0)  # states over parts of the keys, see attention.by_powers
    per_chunk_token += more * config.n_head * config.head_dim
    return (capacity * embedded * config.dim + chunk * per_chunk_token) * dtype.itemsize + _float8_bytes(
        config, chunk, settings.tree.rows, dtype.itemsize)


def _float8_bytes(config: ModelConfig, chunk: int, block: int, itemsize: int) -> int:
    """What layers in fp8 hold besides, one at a time."""
    if config.float8 is None:
        return 0
    sizes = [work_bytes(linear_shape(config, layer), chunk, itemsize) for layer in LAYERS]
    if config.float8.holds("output"):
        sizes.append(work_bytes(linear_shape(config, "output"), block, itemsize))
    return max(sizes)


def _law_bytes(config: ModelConfig, settings: Settings, batch: int, levels: int, device: torch.device) -> int:
    """Logits and laws of a step, sorted and summed up; and the laws that are passed from level to level, or the noise
    of levels that share it: ten whole numbers of 64 bits a word while it is made."""
    words, cuda = batch * config.vocab_size, device.type == "cuda"
    # A GPU ranks all words of a row: the law, sorted, and four whole numbers of 64 bits of each. A CPU seldom does.
    ranked = 40 if cuda else 16
    return words * settings.tree.rows * (ranked + (80 if settings.coupled else 4 * levels))


def _choice_bytes(config: ModelConfig, settings: Settings, batch: int, capacity: int, base: int,
                  dtype: torch.dtype) -> int:
    """Scores of all chunks by the newest queries, as products and twice in float32, some layers at a time: of what all
    rows share, by the queries of all; and of one of several rows, whose mean keys are copied, too."""
    if not settings.scores_chunks:
        return 0

    def of(tokens: int, queries: int, copied: bool) -> int:
        chunks = tokens // settings.chunk_size
        layer = config.n_head * queries * chunks
        keys = config.n_kv_head * config.head_dim * chunks * dtype.itemsize if copied else 0
        return (layer * (dtype.itemsize + 8) + keys) * scored_together(layer, config.n_layer)

    return max(of(base, batch * common_queries(settings.block_size, batch), False),
               of(capacity - base, settings.block_size, batch > 1))


def _path_bytes(config: ModelConfig, settings: Settings, batch: int) -> int:
    """Keys and values of the paths of a tree's rows, as they are and in float32, and products with them, of a layer."""
    tree = settings.tree
    heads = config.n_head + 3 * config.n_kv_head
    return batch * tree.size * tree.spine * heads * config.head_dim * 4


def layer_bytes(config: ModelConfig, *, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """K and V of one layer of the prefix."""
    return batch * capacity * config.kv_elements_per_token // config.n_layer * dtype.itemsize


def host_part(config: ModelConfig, num_layers: int, **sizes) -> Part:
    """The prefix of so many offloaded layers, in host memory. sizes: see `layer_bytes`."""
    return Part(f"KV cache of {num_layers} layers in host memory", num_layers * layer_bytes(config, **sizes),
                ("--num-resident-layers", "--max-seq-len", "--batch-size"))


def resident_layers(config: ModelConfig, place: Placement, parts: Collection[Part], free: int | None,
                    device: torch.device, **sizes) -> int | None:
    """How many layers of the KV prefix stay on the device, beside `parts`. None: all, since nothing is offloaded.

    Args:
        place: resolved. free: see `layers_within`. sizes: see `layer_bytes`.
    """
    if not place.offload or place.num_resident_layers is not None:
        return place.num_resident_layers if place.offload else None
    if place.offload is True and place.resident_memory is None:
        return 0
    return layers_within(config, parts, free, device, place.resident_memory, **sizes)


def layers_within(config: ModelConfig, parts: Collection[Part], free: int | None, device: torch.device,
                  resident_memory: int | None, **sizes) -> int:
    """How many layers of the KV prefix fit a device beside `parts`, and into `resident_memory` bytes.

    Args:
        free: bytes of the device; None: nobody knows.
    """
    room = []
    if free is not None:
        room = [min(int(0.95 * free), less_spare(free, device)) - sum(part.bytes for part in parts)]
    room += [] if resident_memory is None else [resident_memory]
    return min(max(min(room, default=0) // layer_bytes(config, **sizes), 0), config.n_layer)


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device, None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(unreserved(device) + unused, 0)
    return free_memory.of_host()


def comfortable(device: torch.device) -> int | None:
    """Bytes to plan with where there is a choice: what is `available`, less `SPARE` on a GPU."""
    return less_spare(available(device), device)


def less_spare(free: int | None, device: torch.device) -> int | None:
    """Of so many free bytes, those to plan with; None: nobody knows how many."""
    return max(free - SPARE, 0) if device.type == "cuda" and free is not None else free


def ran_out(error: Exception) -> bool:
    """Whether memory was refused. The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def shortage(error: Exception, device: torch.device) -> str:
    """How much was asked for, and what there is, as far as the error says."""
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    if asked is None:
        return ""
    if not isinstance(error, torch.OutOfMemoryError):
        return f" when {asked[1]} more were asked for"
    used, free = gib(torch.cuda.memory_allocated(device)), gib(available(device))
    return f" when {asked[1]} more were asked for: {used} are in use, and {free} are free, in pieces or in other pools"


def remedy_of_scatter() -> str:
    """What to try where a GPU's memory was nearly enough: what is free may lie scattered. Empty if it is set."""
    name = next((name for name in ALLOCATORS if name in os.environ), ALLOCATOR)
    given = os.environ.get(name, "")
    if GROWING in given:
        return ""
    value = f"{given},{GROWING}" if given else GROWING
    return f". If it was nearly enough, set {name}={value} before Python starts"


def check(parts: Collection[Part], device: torch.device, of_no_use: Collection[str] = ()) -> None:
    """Raises UserError, with every part and its remedies but those of no use, if the parts do not fit the device."""
    free, needed = available(device), sum(part.bytes for part in parts)
    if free is None or needed <= free:
        return
    listed = []
    for part in sorted(parts, key=lambda part: -part.bytes):
        remedies = ", ".join(remedy for remedy in part.remedies if remedy not in of_no_use)
        if part.bytes >= 2**20:
            listed.append(f"{part.name} {gib(part.bytes)}" + (f" ({remedies})" if remedies else ""))
    raise UserError(f"this needs {gib(needed)} of memory on {device} and {gib(free)} are free: {', '.join(listed)}")


def peak(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU since the last reset, resident on a CPU since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
