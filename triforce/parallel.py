"""Tensor parallelism: one model over several processes, each with its share of the heads, of the MLP and of the words.

Attention's and the MLP's first projections are split by rows, their last ones by columns, so that each block needs two
all-reduces; embedding and output are split by vocabulary (Megatron-LM, arXiv 1909.08053). Every rank then has the same
logits, to the bit, and draws from them with the same noise, a function of seed and position: so no token is sent, but
by a draft on some ranks.
What is measured rather than computed, such as step times, is agreed on.
"""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.compiler import is_compiling

from .errors import UserError
from .model import ModelConfig
from .runtime.streams import use_one_stream

if dist.is_available():  # not in every build of PyTorch
    import torch.distributed._functional_collectives as collectives
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch.distributed.distributed_c10d import _resolve_process_group as _resolve

    # Renamed in torch 2.13.
    _gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    _gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

log = logging.getLogger("triforce")
TIMEOUT = timedelta(seconds=60)  # a rank that waits so long for the others gives up
ONE_SHOT_BYTES = 2**18  # up to here each rank reads what all others have, which is faster than NCCL's exchange


@dataclass(frozen=True, eq=False)
class Group:
    """The ranks that share a model."""

    rank: int
    size: int
    name: str  # of the process group, as compiled code wants it
    buffer: Tensor | None = None  # [ONE_SHOT_BYTES] uint8 that all ranks can read; None: NCCL or gloo does all

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, on each of them the same to the bit. It may take the place of x."""
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype  # PyTorch's one-shot sum knows no float16
        if self.buffer is not None and x.numel() * wide.itemsize <= ONE_SHOT_BYTES:
            total = one_shot_all_reduce if is_compiling() else _one_shot
            return total(x.to(wide).contiguous(), self.buffer, self.name).to(x.dtype)
        if is_compiling():
            return collectives.wait_tensor(collectives.all_reduce(x, "sum", self.name))
        dist.all_reduce(x := x.contiguous(), group=self._processes)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...] -> [size * N, ...], in the order of the ranks."""
        if is_compiling():
            return collectives.wait_tensor(_gather(x, 0, self.name))
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        _gather_into(parts, x.contiguous(), group=self._processes)
        return parts

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """What rank `source` has, on every rank. It may take the place of x."""
        if is_compiling():
            return collectives.wait_tensor(collectives.broadcast(x, source, self.name))
        dist.broadcast(x := x.contiguous(), source, group=self._processes)
        return x

    @property
    def _processes(self) -> "dist.ProcessGroup":
        """For calls that stay on the stream of the thread; those that the compiler understands use one of NCCL's."""
        return _resolve(self.name)

    def agree(self, value):
        """Rank 0's value, on every rank. Waits for all of them."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def agreed(group: Group | None, value):
    """Rank 0's value where there are several ranks."""
    return value if group is None else group.agree(value)


def _one_shot(x: Tensor, buffer: Tensor, name: str) -> Tensor:
    """The sum over all ranks, added in the order of the ranks, through memory that all can read."""
    shared = buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", name)


@torch.library.custom_op("triforce::one_shot_all_reduce", mutates_args=())
def one_shot_all_reduce(x: Tensor, buffer: Tensor, name: str) -> Tensor:
    """So that compiled code leaves the buffer where it is. Elsewhere the first call would import the compiler."""
    return _one_shot(x, buffer, name)


@one_shot_all_reduce.register_fake
def _(x: Tensor, buffer: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _shared_buffer(device: str, name: str) -> Tensor | None:
    """Memory of this GPU that the others can read, on every rank or on none."""
    try:
        buffer = symmetric_memory.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(buffer, name)
    except RuntimeError as error:  # GPUs that cannot read each other's memory
        log.info("all-reduces go through NCCL alone (%s)", str(error).splitlines()[0])
        buffer = None
    shared = [None] * dist.get_world_size()
    dist.all_gather_object(shared, buffer is not None)
    return buffer if all(shared) else None


def from_environment(device: str | None = None) -> tuple[Group | None, str | None]:
    """(the group that torchrun has started this process in, the device of this rank); (None, device) without torchrun.
    Of a GPU, this thread then uses that one, and a stream in place of the default one.

    Args:
        device: as asked for: "cpu", "cuda" or None.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return None, device
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"WORLD_SIZE ({size}) is set, but not {', '.join(missing)}; start with torchrun, or unset it")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        count = torch.cuda.device_count()
        if local >= count:
            raise UserError(f"torchrun started rank {local} on this machine, which has {count} CUDA devices; use "
                            f"--nproc-per-node {count}, or --device cpu")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
        use_one_stream(torch.device(device))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=TIMEOUT)
    name = dist.group.WORLD.group_name
    buffer = _shared_buffer(device, name) if device.startswith("cuda") else None
    return Group(dist.get_rank(), size, name, buffer), device


def subgroup(group: Group, ranks: list[int]) -> Group | None:
    """The group of some of the ranks, on those; None on the others. Every rank calls it."""
    made = dist.new_group(ranks, timeout=TIMEOUT)
    return Group(ranks.index(group.rank), len(ranks), made.group_name) if group.rank in ranks else None


def together(group: Group | None, work: Callable) -> list:
    """For work that may take or fail on each rank as it will: files, free memory. Every rank calls it.

    Returns the results of all ranks, in their order, and waits for them however long they take. If the work fails on
    one rank, all raise: that one its error, the others the same UserError or a RuntimeError with the same text.
    """
    if group is None:
        return [work()]
    waiting = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    result = error = failure = None
    try:
        result = work()
    except Exception as found:
        error, failure = found, (isinstance(found, UserError) and type(found), str(found) or type(found).__name__)
    boxes: list = [None] * dist.get_world_size(waiting)
    dist.all_gather_object(boxes, (result, failure), group=waiting)
    dist.destroy_process_group(waiting)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(boxes):
        if failure is not None:
            kind, text = failure
            raise kind(text) if kind else RuntimeError(f"rank {rank} failed: {text}")
    return [result for result, _ in boxes]


def read_first(group: Group | None, read: Callable):
    """What `read()` gives on rank 0, on every rank: for input that is rank 0's alone, and may be long in coming."""
    return together(group, lambda: read() if group is None or group.rank == 0 else None)[0]


class ShardedEmbedding(nn.Embedding):
    """Each rank knows its share of the words, and the sum over all is taken."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        mine = tokens - self.group.rank * rows
        held = (mine >= 0) & (mine < rows)
        return self.group.all_reduce(super().forward(mine.clamp(0, rows - 1)) * held[..., None])


def share(model: nn.Module, group: Group | None) -> nn.Module:
    """The blocks of a model, whose config is one rank's, add up what all ranks have. None: there is one rank."""
    model.group = group
    for layer in model.layers if group is not None else ():
        for last in (layer.attention.out, layer.mlp):
            last.register_forward_hook(lambda module, given, y: group.all_reduce(y))
    return model


def join(model: nn.Module, group: Group) -> nn.Module:
    """Makes a model, whose config is one rank's, a part of the whole."""
    def whole_vocabulary(module: nn.Module, given: tuple, logits: Tensor) -> Tensor:
        parts = group.all_gather(logits[None].contiguous())  # [ranks, B, M, vocab_rows]
        return parts.permute(1, 2, 0, 3).flatten(2)[..., : model.config.vocab_size]

    model.embedding.__class__ = ShardedEmbedding
    model.embedding.group = group
    model.output.register_forward_hook(whole_vocabulary)
    return share(model, group)


def leave() -> None:
    """Ends this process's part in the group; engines must be out of use."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # recorded graphs hold on to the communicator, which would wait for them for ever
        dist.destroy_process_group()


def shard_config(config: ModelConfig, group: Group | None) -> ModelConfig:
    """What one rank holds of a model.

    Raises:
        UserError: the number of ranks does not divide the KV heads or the MLP, or a norm spans all heads.
    """
    if group is None:
        return config
    counts = {"KV heads": config.n_kv_head, "heads": config.n_head, "MLP rows": config.ffn_dim}
    counts |= {"norm over all heads": 1} if config.qk_norm_whole else {}
    for name, count in counts.items():
        if count % group.size:
            fits = [str(n) for n in range(1, config.n_kv_head + 1) if not any(one % n for one in counts.values())]
            raise UserError(f"{group.size} ranks cannot share {count} {name} evenly; use --nproc-per-node "
                            f"{' or '.join(fits)}")
    return replace(config, n_head=config.n_head // group.size, n_kv_head=config.n_kv_head // group.size,
                   ffn_dim=config.ffn_dim // group.size, num_shards=group.size)
