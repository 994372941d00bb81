"""Runs what a first answer runs, while the weights are read: on models of one layer, all of zeros.

A process that is new to a GPU loads each kernel when it is first called, and libraries set themselves up. That takes a
second and more, in which the GPU has next to nothing to do. Reading weights, and encoding a document, hardly need
Python: so a thread can go through a prefill and a few rounds meanwhile.
"""

import logging
import threading
from dataclasses import replace

import torch

from . import memory
from .config import Sampling, Settings
from .graphs import SPARE, Compiler
from .model import ModelConfig, Transformer
from .state import State
from .streams import ComputeStream, use_device

log = logging.getLogger("triforce")
LENGTH = 5 * 8192  # tokens of the prompt: an attention of few queries and one of many, over several lengths of keys
ROUNDS = 2  # of each plan: the second follows one that drafted
ROWS, LARGE = 2, 8 * 10**9  # over a shared prefix, too, where the bytes of weights take some seconds to read


def begin(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype, stream: ComputeStream,
          weight_bytes: int) -> threading.Thread | None:
    """Starts the warm-up where it is of use. Who computes waits for the thread first: both need Python's lock.

    Args:
        target, draft: of the models that are read next; settings: resolved.
        stream: that they are read on, too. weight_bytes: that they will take.
    """
    device = stream.device
    if device.type != "cuda" or target.float8 or draft and draft.float8:  # other kernels multiply by weights in fp8
        return None
    free = (memory.available(device) or 0) - weight_bytes - SPARE
    # No daemon: Python would end it in the midst of a call of PyTorch's, and the process with it.
    rows = ROWS if weight_bytes >= LARGE else 0
    thread = threading.Thread(target=_quietly, args=(stream, target, draft, settings, dtype, device, free, rows),
                              name="warm-up")
    thread.start()
    return thread


def _quietly(stream: ComputeStream, *args) -> None:
    try:
        use_device(stream.device)
        with stream.used():
            warm_up(*args)
    except Exception as error:  # nothing depends on it; what is the matter, the answer will say
        log.debug("no warm-up: %s: %s", type(error).__name__, error)


@torch.no_grad()
def warm_up(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype,
            device: torch.device, free: int, rows: int = 0, length: int = LENGTH) -> State | None:
    """A prefill of a prompt of so many tokens, and rounds by every plan; the same of `rows` questions about it. Returns
    the last State that went through them; None if that needs more than so many free bytes, or the process ends
    meanwhile."""
    settings = replace(settings, draft=None)  # a drafter of the user's is none of ours
    configs = [None if config is None else _layer(config) for config in (target, draft)]
    room = 16 * settings.block_size
    length = min(length, target.max_len - room)
    sizes = {"batch": 1, "capacity": length + room, "budget": settings.view_tokens(length, room=length),
             "vocab_size": min(config.vocab_size for config in configs if config is not None)}

    def needed(**sizes) -> int:
        return sum(part.bytes for part in memory.state_parts(*configs, settings, dtype=dtype, device=device, **sizes))

    free -= sum(part.bytes for part in memory.weight_parts(*configs, dtype)) + needed(**sizes)
    if free < 0:
        return None
    models = [None if config is None else _blank(config, dtype, device) for config in configs]
    state = State(*models, settings, compiler=Compiler(device), **sizes)
    if not _go_through(state, [[0] * length], room):
        return None
    base = length // settings.flush_interval * settings.flush_interval
    beside = sizes | {"batch": rows, "capacity": base + 2 * room}
    if rows and needed(**beside, base=base) <= free:
        state = State(*models, settings, compiler=Compiler(device), shared=state.cache.prefix.part(base), **beside)
        if not _go_through(state, [[0] * (base + room)] * rows, room):
            return None
    return state


def _go_through(state: State, prompts: list[list[int]], room: int) -> bool:
    """A prefill, and rounds by every plan. False: the process ends meanwhile."""
    state.params.set(specialize=False, **vars(Sampling().with_seed(state.batch, lambda: 0)))
    state.prefill_all(prompts)
    state.begin(room)
    for plan in state.hierarchy.kinds_of_rounds(state.pilot.default):
        if not threading.main_thread().is_alive():  # the process waits for this thread
            return False
        for _ in range(ROUNDS):
            state.round(plan)
    if state.hierarchy.view is not None:
        state.hierarchy.view.renew(state.pilot.rebuilds)
    return True


def _layer(config: ModelConfig) -> ModelConfig:
    """A model of its own, of one layer. Of a model that ranks share: what one of them computes, without the others."""
    return replace(config, n_layer=1, vocab_size=config.vocab_rows, num_shards=1)


def _blank(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    model = Transformer.empty(config, device, dtype)
    model.output.weight = model.embedding.weight  # the same shape, and half the memory
    for parameter in model.parameters():
        parameter.zero_()
    return model
