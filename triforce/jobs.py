"""Finds what was compiled for a State, or has a process of its own compile it."""

import logging
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from .config import Placement, Settings
from .graphs import Compiler
from .kept import Folder, machine
from .model import ModelConfig, Transformer
from .parallel import together
from .pieces import Pieces
from .state import tape_length
from .tape import Tape

log = logging.getLogger("triforce")
# Settings that change which steps are taken, or which tokens they see, and not the steps.
STEPS_DO_NOT_DEPEND_ON = {"draft", "gamma", "auto", "budget", "recent", "chunk_size", "rebuild_interval",
                          "prefill_chunk_size", "piece_tokens", "reuse"}
MOST_PROCESSES = 4  # that compile; each takes half a gigabyte of the GPU meanwhile


class Models(NamedTuple):
    """What an engine runs."""

    target: Transformer
    draft: Transformer | None
    drafting: Transformer | None  # the target's weights for the retrieval level, in fp8; None: the target itself


@dataclass(frozen=True)
class Job:
    """A State to be compiled for: what `State` takes, without weights."""

    about: dict  # of the folder
    target: ModelConfig
    draft: ModelConfig | None
    settings: Settings
    sizes: dict
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False  # the retrieval level drafts with such a copy
    rank: int = 0
    size: int = 1  # ranks that share the target
    group_name: str = ""
    one_shot: bool = False  # they read each other's memory
    draft_ranks: list[int] | None = None
    shared_draft: bool = False  # several of them share the draft
    base: int = 0  # tokens of a prefix that all rows share
    streams: bool = False  # layers of the prefix lie in host memory
    custom_laws: bool | None = None  # whether a drafter of the user's emits laws; None: there is none


def start(job: Job, wait: bool = False) -> None:
    """Has processes of their own do the job. They outlive this one, unless that waits for them."""
    count = max(min((os.cpu_count() or 1) // 4, MOST_PROCESSES), 1)
    quiet = None if wait else subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = []
    for part in range(count):
        command = [sys.executable, "-m", f"{__package__}.precompile", str(part), str(count)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, env=environment,
                                          start_new_session=not wait))
        with processes[-1].stdin as pipe:
            pipe.write(pickle.dumps(job))
    if wait and any([process.wait() for process in processes]):
        log.warning("not all steps could be compiled; those run as they are written, only slower")


def start_all(due: list[Job]) -> None:
    """Starts what is due. Nothing depends on it."""
    while due:
        try:
            start(due.pop())
        except OSError as error:  # no process or file more
            log.warning("steps are not compiled: %s", error)


def kept_folder(models: Models, settings: Settings, place: Placement, sizes: dict, base: int = 0,
                streams: bool = False) -> Folder:
    """Where compiled pieces and learned costs of a State are kept.

    Args:
        sizes: those that `State` takes. base: tokens of a prefix that its rows share. streams: see `Job`.
    """
    target, draft, fp8 = models
    own = {name: value for name, value in vars(settings).items() if name not in STEPS_DO_NOT_DEPEND_ON}
    group = target.group
    about = {**machine(target.device), "target": repr(target.config), "draft": repr(draft and draft.config),
             "weights": [repr(model and model.config.float8) for model in (target, draft)],
             "fp8": fp8 is not None, "dtype": str(target.dtype), "settings": repr(own),
             "ranks": None if group is None else [group.size, group.buffer is not None],
             "draft_ranks": place.draft_ranks, "streams": streams,
             "compile": place.compile is not False, "custom": callable(settings.draft),
             "shared": base > 0, "tokens": tape_length(sizes["capacity"], settings),
             **{name: size for name, size in sizes.items() if name != "capacity"}}
    return Folder(about, say=group is None or group.rank == 0)


def find_compiler(models: Models, settings: Settings, place: Placement, sizes: dict, folder: Folder,
                  known: dict[Path, Pieces], due: list[Job], recorder: torch.cuda.Stream | None, base: int = 0,
                  streams: bool = False) -> Compiler:
    """What runs the steps of a State: as graphs, where there are any, of the pieces that were compiled for it.

    Args:
        recorder: the stream to record graphs on; None on a CPU.
        known: pieces that this engine has met, by their folder: they are loaded once. One more is added.
        due: where nobody is to wait for what is missing, the job is added, to be started after the answer: beside it,
            it would slow it down.
    """
    target, device = models.target, models.target.device
    if place.compile is False:
        return Compiler(device)
    common = target.group.common if target.group is not None else lambda names: names
    wait, begun = place.compile is True, time.monotonic()
    pieces = known.setdefault(folder.path, Pieces(folder, common, device, wait))
    if not pieces.complete:
        pieces.look()
    if not pieces.complete:
        job = make_job(models, settings, place, sizes, folder, base, streams)
        if wait:
            log.info("compiling the steps, once for this machine (kept in %s) ...", folder.path)
            with together(target.group) as do:  # ranks compile for themselves, and one may have more to do
                do(lambda: start(job, wait))
            pieces.look()
        else:
            due.append(job)
    if wait:
        pieces.load()
    return Compiler(device, recorder=recorder, pieces=pieces, waited=time.monotonic() - begun if wait else 0.0)


def make_job(models: Models, settings: Settings, place: Placement, sizes: dict, folder: Folder,
             base: int = 0, streams: bool = False) -> Job:
    """The work that is to be done for such a State."""
    target, draft, fp8 = models
    custom = settings.draft(Tape.allocate(1, 1, 1, target.device)) if callable(settings.draft) else None
    job = Job(folder.about, target.config, None if draft is None else draft.config, replace(settings, draft=None),
              sizes, target.dtype, target.device, fp8=fp8 is not None, draft_ranks=place.draft_ranks, base=base,
              streams=streams, custom_laws=None if custom is None else custom.emits_laws)
    group = target.group
    if group is None:
        return job
    return replace(job, rank=group.rank, size=group.size, group_name=group.name, one_shot=group.buffer is not None,
                   shared_draft=draft is not None and draft.group is not None)
