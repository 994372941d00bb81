"""Runs what a first answer runs, while the weights are read: on a model of one layer, all of zeros.

A process that is new to a GPU loads each kernel when it is first called, and libraries choose theirs for each new shape
of a product or of an attention. That takes a second and more, in which the GPU has next to nothing to do. Reading
weights, and encoding a document, hardly need Python: so a thread can go through a prefill and a few rounds meanwhile.
"""

import logging
import threading
from dataclasses import replace

import torch

from . import memory
from .config import Sampling, Settings
from .graphs import Compiler
from .model import ModelConfig, Transformer
from .parallel import use_device
from .pilot import default_plan
from .plan import AUTOREGRESSION, Plan
from .state import State

log = logging.getLogger("triforce")
LENGTH = 5 * 8192  # tokens of the prompt: an attention of few queries and one of many, over several lengths of keys
ROUNDS = 2  # of each plan: the second follows one that drafted
SPARE = 8 * 2**30  # bytes of the device that have to be free beside the weights


def begin(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype, device: torch.device,
          weight_bytes: int) -> threading.Thread | None:
    """Starts the warm-up where it is of use. Who computes waits for the thread first: both need Python's lock.

    Args:
        target, draft: of the models that are read next; settings: resolved.
        weight_bytes: that they will take.
    """
    # Neither what ranks do together nor weights in fp8 would be seen in it.
    alike = device.type == "cuda" and target.num_shards == 1 and target.float8 is None
    if not alike or (memory.available(device) or 0) - weight_bytes < SPARE:
        return None
    thread = threading.Thread(target=_quietly, args=(target, draft, settings, dtype, device), name="warm-up",
                              daemon=True)  # who made a mistake does not wait for it
    thread.start()
    return thread


def _quietly(*args) -> None:
    try:
        warm_up(*args)
    except Exception as error:  # nothing depends on it; what is the matter, the answer will say
        log.debug("no warm-up: %s: %s", type(error).__name__, error)


@torch.no_grad()
def warm_up(target: ModelConfig, draft: ModelConfig | None, settings: Settings, dtype: torch.dtype,
            device: torch.device, length: int = LENGTH) -> State:
    """A prefill of a prompt of so many tokens, and rounds by every plan. Returns the State that went through them."""
    use_device(device)
    settings = replace(settings, draft=None)  # a drafter of the user's is none of ours
    configs = [replace(target, n_layer=1), draft]
    models = [None if config is None else _blank(config, dtype, device) for config in configs]
    length = min(length, target.max_len - 16 * settings.block_size)
    state = State(*models, settings, batch=1, capacity=length + 16 * settings.block_size,
                  budget=settings.view_tokens(length), compiler=Compiler(device),
                  vocab_size=min(config.vocab_size for config in configs if config is not None))
    state.params.set(specialize=False, **vars(Sampling().with_seed(1, lambda: 0)))
    state.prefill(0, [0] * length)
    state.begin(8 * settings.block_size)
    plans = [AUTOREGRESSION, *(Plan(1, source) for source in state.hierarchy.sources)]
    if settings.retrieval:
        plans.append(default_plan(settings, state.hierarchy))
    for plan in plans:
        for _ in range(ROUNDS):
            state.round(plan)
    state.hierarchy.rebuild_view(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return state


def _blank(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    model = Transformer.empty(config, device, dtype)
    model.output.weight = model.embedding.weight  # the same shape, and half the memory
    for parameter in model.parameters():
        parameter.zero_()
    return model
