"""Runs the code of a first answer while the weights are read: on models of one layer, all of zeros.

A process that is new to a GPU loads each kernel when it is first called, and libraries set themselves up. That takes a
second and more, in which the GPU has next to nothing to do. Reading weights, and encoding a document, hardly need
Python: so a thread can go through a prefill and a few rounds meanwhile.
"""

import contextlib
import threading
from dataclasses import replace

import torch

from ..config import Sampling, Settings
from ..decode.batch import DecodeBatch, Models, Sizes
from ..model import ModelConfig, Transformer
from ..runtime.graphs import SPARE, Compiler
from ..runtime.streams import ComputeStream, like_this_thread
from . import memory

LENGTH = 5 * 8192  # tokens of the prompt: an attention of few queries and one of many, over several lengths of keys
ROUNDS = 2  # of each plan: the second follows one that drafted


def begin(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype, stream: ComputeStream,
          weight_bytes: int) -> threading.Thread | None:
    """Starts the warm-up where it helps, while `weight_bytes` of weights are read. A computation waits for the thread
    first: both need Python's lock. settings: resolved."""
    device = stream.device
    if device.type != "cuda" or target.float8 or draft and draft.float8 or target.num_experts:  # by other kernels
        return None
    use_this_gpu = like_this_thread(device)
    free = (memory.available(device) or 0) - weight_bytes - SPARE

    def quietly() -> None:
        with contextlib.suppress(Exception):  # nothing depends on it; the answer will say what is wrong
            use_this_gpu()
            with stream.used():
                warm_up(target, draft, settings, dtype, device, free)

    # No daemon: Python would end it within a call of PyTorch, and that would end the process.
    thread = threading.Thread(target=quietly, name="warm-up")
    thread.start()
    return thread


@torch.no_grad()
def warm_up(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype,
            device: torch.device, free: int, length: int = LENGTH) -> DecodeBatch | None:
    """Prefills a prompt of `length` tokens, and runs rounds of every plan, until the process ends. Returns the batch;
    None if it needs more than `free` bytes."""
    settings = replace(settings, draft=None)  # without a user's own drafter
    # If ranks share the models: one rank's part, without the others.
    configs = [config and replace(config, n_layer=1, vocab_size=config.vocab_rows, num_shards=1)
               for config in (target, draft)]
    length = min(length, target.max_len - 16 * settings.block_size)
    capacity, budget = length + 16 * settings.block_size, settings.view_tokens(length, room=length)
    sizes = Sizes(1, capacity, budget, min(config.vocab_size for config in configs if config is not None))
    parts = memory.plan_memory(*configs, settings, sizes, dtype, device).parts
    if memory.total(memory.weight_parts(*configs, dtype) + parts) > free:
        return None
    models = [config and _blank(config, dtype, device) for config in configs]
    state = DecodeBatch(Models(*models), settings, sizes, Compiler(device))
    state.params.set(specialize=False, **vars(Sampling(seed=[0])))
    state.prefill_all([[0] * length])
    state.begin(16 * settings.block_size)
    for plan in (plan for plan in state.hierarchy.kinds_of_rounds(state.pilot.default) for _ in range(ROUNDS)):
        if threading.main_thread().is_alive():  # or else the process waits for this thread
            state.round(plan)
    if state.hierarchy.view is not None:
        state.hierarchy.view.renew(state.pilot.rebuilds)
    return state


def _blank(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    model = Transformer.empty(config, device, dtype)
    model.output.weight = model.embedding.weight  # the same shape, and half the memory
    for parameter in model.parameters():
        parameter.zero_()
    return model
