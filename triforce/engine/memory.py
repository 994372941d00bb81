"""What a run will need, part by part: its caches are built on the meta device, without memory, and added up.

`load` checks the weights alone (`weight_parts`). A call and `triforce plan` plan by `plan_memory`, and a document that
is computed for itself by `plan_document`.
"""

import functools
import resource
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from ..cache.prefix import PrefixStore
from ..cache.views import common_queries
from ..config import VIEWS, Placement, Settings
from ..decode.batch import DecodeBatch, Models, Sizes
from ..errors import UserError
from ..fp8 import LAYERS, copy_bytes, linear_shape, work_bytes
from ..model import ModelConfig, Transformer
from ..runtime import free_memory
from ..runtime.graphs import SPARE, Compiler, unreserved

# Tokens of a view where memory decides: few sizes, since each has its own compiled steps. With smaller ones more rows
# would fit, and would hardly draft.
VIEW_SIZES = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
# The parts of a plan that a document needs while it is read.
DOCUMENT_PARTS = ("KV cache", "sliding windows", "chunk keys", "prefill activations", "a layer's KV", "staging buffers")


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int
    remedies: tuple[str, ...] = ()  # what makes it smaller: flags, or names of settings


@dataclass(frozen=True)
class MemoryPlan:
    parts: tuple[Part, ...]  # of the device's memory
    host: Part  # of the KV prefix


def plan_memory(target: ModelConfig, draft: ModelConfig | None, settings: Settings, sizes: Sizes, dtype: torch.dtype,
                device: torch.device) -> MemoryPlan:
    """What a batch of these sizes takes beside weights: its caches, and what its prefill and its steps hold besides at
    the widest point. target, draft: of one rank; settings: resolved."""
    # The code that builds a batch avoids `arange` and `zeros_like`. On the meta device they are Python, and import half
    # of PyTorch's compiler: a quarter of a second of every first answer.
    batch, base = sizes.batch, sizes.shared
    models = [None if config is None else _meta_model(config, dtype) for config in (target, draft)]
    shared = PrefixStore(target, 1, base, "meta", dtype) if base else None
    if shared is not None:
        shared.truncate(0, base)
    state = DecodeBatch(Models(*models), settings, sizes, Compiler(torch.device("cpu")), shared=shared, runs_on=device)
    view, prefix, own = state.hierarchy.view, state.cache.prefix, state.capacity - base
    kept = f"KV cache of {prefix.num_resident} resident layers" if prefix.offload else "KV cache"
    elsewhere = ["--num-resident-layers" if prefix.offload else "--offload"] * bool(target.full_layers)
    parts = [
        Part(f"KV cache of {batch} rows behind what they share" if base else kept,
             sum(x[i].nbytes for x in (prefix.k, prefix.v) for i in target.full_layers),
             (*elsewhere, "--max-seq-len", "--batch-size")),
        # And a copy, to go back to where decoding begins.
        Part("sliding windows", 2 * batch * sum(x.nbytes for x in prefix.rings(0)), ("--batch-size",)),
        Part("chunk keys", sum(x.nbytes for x in prefix.chunk_keys), ("--chunk-size",)),
        Part("tail", state.cache.nbytes - prefix.nbytes, ("flush_interval", "--batch-size")),
        Part("prefill activations", _prefill_bytes(target, settings, own, dtype), ("--prefill-chunk-size",)),
        Part("attention along the paths of a tree", _path_bytes(target, settings, batch),
             ("--tree-size", "block_size")),
        Part("logits and probabilities", _probs_bytes(target, settings, batch, 1 if draft is None else 2, device),
             ("--batch-size",)),
        Part("choice of the view", _choice_bytes(target, settings, batch, own, base, dtype),
             ("--draft-cache",) if VIEWS[settings.draft_cache].unit == "token" else ("--chunk-size", "block_size")),
        Part("experts of a step", _experts_bytes(target, settings.tree.rows * batch, dtype),
             ("block_size", "--batch-size")),
        Part("retrieval view", 0 if view is None else view.nbytes, ("--budget",)),
        Part("draft cache", sum(source.nbytes for source in state.hierarchy.sources.values()) if draft else 0,
             ("draft_window",))]
    if (offload := prefix.offload) is not None:  # a prompt is prefilled at a time
        parts += [Part("a layer's KV during prefill", offload.nbytes // batch // len(offload.layers),
                       ("--max-seq-len",)),
                  Part("staging buffers", sum(x.nbytes for x in offload.staging), ("piece_tokens", "--batch-size"))]
    host = Part(f"KV cache of {len(prefix.streamed)} layers in host memory", 0 if offload is None else offload.nbytes,
                ("--num-resident-layers", "--max-seq-len", "--batch-size"))
    return MemoryPlan(tuple(part for part in parts if part.bytes), host)


def plan_document(target: ModelConfig, settings: Settings, sizes: Sizes, dtype: torch.dtype,
                  device: torch.device) -> MemoryPlan:
    """The plan of the document that a batch of these sizes shares, and of its prefill."""
    alone = replace(sizes, batch=1, capacity=sizes.shared, shared=0)
    plan = plan_memory(target, None, replace(settings, draft=None), alone, dtype, device)  # no drafter of the user's
    useful = {"--max-seq-len": ["a shorter document"], "--batch-size": []}
    return replace(plan, parts=tuple(
        replace(part, name=f"{part.name} of the document",
                remedies=tuple(one for remedy in part.remedies for one in useful.get(remedy, [remedy])))
        for part in plan.parts if part.name.startswith(DOCUMENT_PARTS)))


def weight_parts(target: ModelConfig, draft: ModelConfig | None, dtype: torch.dtype,
                 copies: bool = False) -> tuple[Part, ...]:
    """What `load` takes of a device, before there are sizes. copies: with an fp8 copy of the target, which drafts."""
    remedies = ("--dtype",) if target.float8 is not None or target.num_experts else ("--dtype", "--weights fp8")
    models = [("target weights", target, remedies), ("draft weights", draft, ("--draft none",))]
    parts = [Part(name, sum(x.nbytes for x in _meta_model(config, dtype).parameters()), remedies)
             for name, config, remedies in models if config is not None]
    return (*parts, *[Part("fp8 copy for drafting", copy_bytes(target), ("no --draft-dtype",))] * copies)


@functools.lru_cache(maxsize=4)
def _meta_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    return Transformer.empty(config, "meta", dtype)


def _prefill_bytes(config: ModelConfig, settings: Settings, capacity: int, dtype: torch.dtype) -> int:
    """Hidden states of the whole prompt, which ranks add up of what each knows of the words; activations of a chunk."""
    per_chunk_token = 4 * config.ffn_dim + 8 * config.n_head * config.head_dim
    per_chunk_token += (4 * config.dim + 6 * config.num_experts) * (config.num_experts > 0)  # to an expert and back
    chunk = min(max(settings.prefill_chunk_size, settings.draft_window or 0), capacity)  # a draft's window is one chunk
    more = max((capacity // chunk).bit_length() - 2, 0)  # states over parts of the keys, see attention.by_powers
    per_chunk_token += more * config.n_head * config.head_dim
    float8 = 0  # what a layer in fp8 holds besides, one at a time
    if config.float8 is not None:
        layers = [(name, chunk) for name in LAYERS]
        layers += [("output", settings.tree.rows)] * ("output" not in config.float8.wide)
        float8 = max(work_bytes(linear_shape(config, name), rows, dtype.itemsize) for name, rows in layers)
    return (capacity * min(config.num_shards, 2) * config.dim + chunk * per_chunk_token) * dtype.itemsize + float8


def _experts_bytes(config: ModelConfig, rows: int, dtype: torch.dtype) -> int:
    """Weights that a step of few rows copies, or what all experts make of more rows."""
    copied = min(rows * config.active_experts, config.num_experts // 4) * 3 * config.dim * config.ffn_dim
    made = config.num_experts * rows * (3 * config.ffn_dim + config.dim)
    return max(copied * dtype.itemsize, made * dtype.itemsize + 8 * config.num_experts * rows * config.dim)


def _probs_bytes(config: ModelConfig, settings: Settings, batch: int, levels: int, device: torch.device) -> int:
    """Logits and probabilities of a step, sorted and summed up; and those that are passed from level to level, or the
    noise of levels that share it: ten whole numbers of 64 bits a word while it is made."""
    # A GPU ranks all words of a row: it sorts them, with four whole numbers of 64 bits for each. A CPU seldom does.
    ranked = 40 if device.type == "cuda" else 16
    return batch * config.vocab_size * settings.tree.rows * (ranked + (80 if settings.coupled else 4 * levels))


def _choice_bytes(target: ModelConfig, settings: Settings, batch: int, own: int, base: int, dtype: torch.dtype) -> int:
    """Scores by the newest queries: of all chunks, as products and twice in float32; or of all tokens, with their
    softmax and the part of it that counts; a layer at a time. The queries of all rows score what the rows share. For
    one of several rows, what is scored is copied, too."""
    of_tokens = VIEWS[settings.draft_cache].unit == "token"
    if not settings.retrieval or not (settings.scored_chunk_size or of_tokens):
        return 0

    def of(tokens: int, queries: int, copied: bool) -> int:
        scored = tokens if of_tokens else tokens // settings.chunk_size
        scores = target.n_head * queries * scored
        keys = target.n_kv_head * target.head_dim * scored * dtype.itemsize if copied else 0
        return (12 if of_tokens else dtype.itemsize + 8) * scores + keys

    follows = VIEWS[settings.draft_cache].follows
    return max(of(base, batch * common_queries(settings.block_size, batch), False),
               of(own, max(settings.block_size, batch if follows else 0), batch > 1))


def _path_bytes(config: ModelConfig, settings: Settings, batch: int) -> int:
    """Keys and values of the paths of a tree's rows, as they are and in float32, and products with them, of a layer."""
    tree = settings.tree
    return batch * tree.size * tree.spine * (config.n_head + 3 * config.n_kv_head) * config.head_dim * 4


def layer_bytes(config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype) -> int:
    """K and V of one layer of the prefix."""
    return batch * capacity * config.kv_elements_per_token // config.n_layer * dtype.itemsize


# -- sizes -------------------------------------------------------------------------------------------------------------

def needed_tokens(length: int, settings: Settings, max_seq_len: int | None) -> int:
    """Tokens that a row has to hold for `length` tokens of prompt and output."""
    return (length if max_seq_len is None else max_seq_len) + settings.block_size


def row_capacity(needed: int, settings: Settings, max_seq_len: int | None, batch: int, base: int, limit: int) -> int:
    """Tokens that a row gets. A conversation behind a document of `base` tokens may grow. Each of many rows gets just
    what it needs. limit: what the model can attend over."""
    if max_seq_len is not None:
        return needed
    if base == 0:
        return -(-needed // 1024) * 1024
    interval = settings.flush_interval
    own = -(-(needed - base) // interval) * interval
    capacity = base + (max(1 << (own - 1).bit_length(), 1024) if batch == 1 else own)
    return max(min(capacity, (limit + settings.block_size) // interval * interval), needed)


def for_views(place: Placement, config: ModelConfig) -> int:
    """Tokens of the default view of an offloaded cache: what is as large as half of the weights. Or an eighth, where
    layers are to lie on the device as well: each of them makes a verify shorter. 0: the cache is on the device."""
    return config.weights_in_tokens // (8 if place.fills else 2) if place.offload else 0


def view_within(planned: Callable[[Sizes], MemoryPlan], sizes: Sizes, settings: Settings, free: int | None) -> int:
    """Tokens of a view: the budget, or fewer where memory decides. planned: a plan of a batch of such sizes."""
    chunk, least = settings.chunk_size, settings.flush_interval + 2 * settings.chunk_size
    views = (max(view // chunk * chunk, least) for view in reversed(VIEW_SIZES) if view < sizes.budget)
    tried = [replace(sizes, budget=view) for view in (sizes.budget, *views)]
    return next((one for one in tried if free is None or total(planned(one).parts) <= free), tried[-1]).budget


def resident_layers(place: Placement, num_layers: int, layer: int, beside: Collection[Part], free: int | None,
                    device: torch.device) -> int:
    """How many layers of an offloaded KV prefix stay on the device. layer: bytes of one; beside: what else the device
    holds; free: its bytes, None: nobody knows."""
    if not place.fills:
        return place.num_resident_layers or 0
    room = [] if place.resident_memory is None else [place.resident_memory]
    if free is not None:
        room.append(min(int(0.95 * free), less_spare(free, device)) - total(beside))
    return min(max(min(room, default=0) // layer, 0), num_layers)


# -- what there is -----------------------------------------------------------------------------------------------------

def available(device: torch.device) -> int | None:
    """Bytes that a device can still give; None where the system does not say."""
    if device.type == "cuda":
        return max(unreserved(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), 0)
    return free_memory.of_host()


def less_spare(free: int | None, device: torch.device) -> int | None:
    """How many of `free` bytes to plan with where there is a choice; None: nobody knows."""
    return max(free - SPARE, 0) if device.type == "cuda" and free is not None else free


def total(parts: Collection[Part]) -> int:
    return sum(part.bytes for part in parts)


def check(parts: Collection[Part], device: torch.device, of_no_use: Collection[str] = ()) -> None:
    """Raises UserError if the parts do not fit the device. It names each part, with its remedies but those of no
    use."""
    free, needed = available(device), total(parts)
    if free is None or needed <= free:
        return
    listed = []
    for part in sorted(parts, key=lambda part: -part.bytes):
        remedies = ", ".join(remedy for remedy in part.remedies if remedy not in of_no_use)
        if part.bytes >= 2**20:
            listed.append(f"{part.name} {gib(part.bytes)}" + (f" ({remedies})" if remedies else ""))
    raise UserError(f"this needs {gib(needed)} of memory on {device} and {gib(free)} are free: {', '.join(listed)}")


def ran_out(error: Exception) -> bool:
    """Whether memory was refused. The CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def shortage(told: str) -> UserError:
    """told: what PyTorch said, whose first sentences have the numbers."""
    what = ". ".join(told.splitlines()[0].split(". ")[:3])
    return UserError(f"this call ran out of memory ({what}); leave more of it free, or ask for less: a smaller "
                     "--prefill-chunk-size, --max-seq-len, --budget or --batch-size, or --offload on a GPU")


def peak(device: torch.device) -> int:
    """Bytes at the highest point: allocated on a GPU since the last reset, resident on a CPU since the start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
