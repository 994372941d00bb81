"""`triforce plan`: what a job takes of a machine's memory, part by part, and whether it fits. Reads config.json alone.

The parts are those of `memory.py`, which `load` and a call check before they allocate. Here they are added up for a
machine that need not be this one.
"""

import json
import os
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..config import Placement, Settings, as_count, find_device, parse_size
from ..decode.batch import Sizes
from ..engine import memory
from ..engine.loading import check_target, find_dtype
from ..errors import UserError
from ..hf.checkpoint import read_config
from ..hf.folders import find_draft, resolve
from ..model import ModelConfig
from ..parallel import Group, shard_config
from . import request
from .main import COUNT, SWITCH, parse_both

CUDA_ITSELF = memory.Part("CUDA itself, about", 2**29)  # of a card's memory; a running process finds it taken


@dataclass(frozen=True)
class Machine:
    """What a plan is for."""

    device: torch.device
    memory: int | None  # bytes of one device; None: nobody knows
    host_memory: int | None  # bytes of the host, for an offloaded cache
    gpus: int = 1  # how many share the model, a device each
    is_here: bool = True  # `memory` is what is free, rather than what a card has


@dataclass(frozen=True)
class Job:
    """What is to be run on it: settings as the user gave them, placement resolved but for its device."""

    target: ModelConfig
    draft: ModelConfig | None
    settings: Settings
    placement: Placement
    prompt_len: int
    max_new_tokens: int
    rows: int = 1  # prompts side by side

    @property
    def room(self) -> int:
        """Tokens that a prompt may have beside the new ones."""
        return (self.placement.max_seq_len or self.target.max_len) - self.max_new_tokens


def need(job: Job, machine: Machine) -> dict:
    """What the job takes of each device, as `load` and a call plan it; as JSON has it.

    Raises:
        UserError: settings do not fit each other, or this number of ranks cannot share the model.
    """
    device, place, longest = machine.device, job.placement, job.placement.max_seq_len
    target = shard_config(job.target, Group(0, machine.gpus, "") if machine.gpus > 1 else None)
    settings = job.settings.resolve(device, has_model=job.draft is not None, offload=place.offload,
                                    max_batch_size=place.max_batch_size, query_group=target.query_group)
    dtype = find_dtype(place.dtype, target.dtype, device)
    parts = [] if machine.is_here or device.type != "cuda" else [CUDA_ITSELF]
    parts += memory.weight_parts(target, job.draft, dtype, copies=place.draft_dtype is not None)
    free = None if machine.memory is None else machine.memory - memory.total(parts)
    needed = memory.needed_tokens(job.prompt_len + job.max_new_tokens, settings, longest)
    capacity = memory.row_capacity(needed, settings, longest, job.rows, 0, target.max_len)
    budget = settings.view_tokens(job.prompt_len, memory.for_views(place, target), capacity)
    sizes = Sizes(job.rows, capacity, budget, min(one.vocab_size for one in (target, job.draft or target)))

    def planned(sizes: Sizes) -> memory.MemoryPlan:
        return memory.plan_memory(target, job.draft, settings, sizes, dtype, device)

    resident = layers = len(target.full_layers)
    if place.offload:
        sizes = replace(sizes, resident_layers=place.num_resident_layers or 0)
        if settings.budget is None:
            sizes = replace(sizes, budget=memory.view_within(planned, sizes, settings, memory.less_spare(free, device)))
        layer = memory.layer_bytes(target, job.rows, capacity, dtype)
        resident = memory.resident_layers(place, layers, layer, planned(sizes).parts, free, device)
        sizes = replace(sizes, resident_layers=resident)
    plan = planned(sizes)
    parts += [*plan.parts, *[plan.host] * (device.type == "cpu" and plan.host.bytes > 0)]  # a CPU's is the same memory
    size, host = memory.total(parts), plan.host.bytes * machine.gpus  # of a device; of all ranks
    fits = all(most is None or used <= most for used, most in ((size, machine.memory), (host, machine.host_memory)))
    return {
        "fits": fits, "offload": place.offload, "dtype": str(dtype).removeprefix("torch."), "budget": sizes.budget,
        "resident_layers": resident, "layers": layers, "bytes": size, "host_bytes": host,
        "parts": {part.name: part.bytes for part in parts}, "remedies": {part.name: part.remedies for part in parts}}


def longest_prompt(job: Job, machine: Machine) -> int:
    """The most tokens of a prompt that fit: all that the model can attend over, or a multiple of 1,024. 0: none."""
    lengths = [0, *range(1024, job.room, 1024), job.room]
    fits = bisect_left(lengths, True, 1, key=lambda length: not need(replace(job, prompt_len=length), machine)["fits"])
    return lengths[fits - 1]


# -- the command -------------------------------------------------------------------------------------------------------

FLAGS = (
    ("memory", {"metavar": "SIZE"}, "of one GPU, with --device cpu of the machine: 24GiB (default: what is free here)"),
    ("host-memory", {"metavar": "SIZE"}, "memory of the host (default: what is free here)"),
    ("gpus", {**COUNT, "default": 1}, "GPUs that share the model, as under torchrun"),
    ("batch-size", COUNT, "prompts that run side by side (default 1)"),
    ("json", SWITCH, "print one JSON object instead of Markdown"))


def machine_of(device: str | None, of_gpu: str | None = None, of_host: str | None = None, gpus: int = 1) -> Machine:
    """device: the value of --device. of_gpu, of_host: of --memory and --host-memory."""
    if of_gpu and re.fullmatch(r"cpu|cuda(:\d+)?", device or "cuda"):  # which need not be here
        device, size = torch.device(device or "cuda"), parse_size(of_gpu, "--memory")
    else:
        device = find_device(device)
        size, found = memory.available(device), torch.cuda.device_count() if device.type == "cuda" else 1
        if gpus > found:
            raise UserError(f"--gpus ({gpus}) is more than the {found} of this machine; plan others by --memory")
    if device.type == "cpu":  # ranks have the same memory, and so have layers that are offloaded
        return Machine(device, size and size // gpus, None, gpus, is_here=not of_gpu)
    host = parse_size(of_host, "--host-memory") if of_host else memory.available(torch.device("cpu"))
    return Machine(device, size, host, gpus, is_here=not of_gpu)


def job_of(args, rows: int | None = None) -> Job:
    """args: of `triforce`. rows: prompts side by side; None: as many as the other flags say."""
    settings = Settings(**request.given(args, Settings))
    if shares := request.first_given(args, "questions", "num_samples"):
        raise UserError(f"a plan is for prompts that share nothing (--batch-size); drop {shares}, whose rows share one")
    if args.prompts is not None and rows is None:
        rows = min(len(request.read_items("--prompts", args.prompts, "prompt")), args.batch_size)
    placement = Placement(**request.given(args, Placement), max_batch_size=rows or 1)
    placement = replace(placement, device="cpu").resolve()  # a plan's device need not be here
    target = read_config(resolve(args.checkpoint), weights=placement.weights)
    folder = find_draft(args.checkpoint, settings.draft)
    check_target(placement, target)
    new = as_count("max_new_tokens", args.max_new_tokens, 256)
    job = Job(target, folder and read_config(folder), settings, placement, 0, new, rows or 1)
    text = request.first_given(args, "prompt", "prompt_file", "prompts", "prefix")
    if text is not None and args.prompt_len is None:
        raise UserError(f"a plan reads no text, and {text} names one; say how many tokens it has with --prompt-len")
    length = args.prompt_len or min(request.DEFAULT_PROMPT_LEN, max(job.room, 1))
    if length > job.room and (args.keep is None or job.room < 1):
        raise UserError(f"a prompt of {length} tokens and {new} new ones exceed the {job.room + new} that the model "
                        "or --max-seq-len allows; use fewer, or --keep")
    return replace(job, prompt_len=min(length, job.room))


def record(job: Job, machine: Machine) -> dict:
    """The plan, as JSON has it. Where a GPU is too small, the rest of the cache lies on the host."""
    ways, needs = [job], [need(job, machine)]
    if machine.device.type == "cuda" and not job.placement.offload:
        with suppress(UserError):  # of settings that fit no offloaded cache
            needs.append(need(other := replace(job, placement=replace(job.placement, offload="auto")), machine))
            ways.append(other)
    return {
        "name": "plan", **next((one for one in needs if one["fits"]), needs[-1]), **vars(machine),
        "device": str(machine.device), "prompt_len": job.prompt_len, "max_new_tokens": job.max_new_tokens,
        "rows": job.rows, "on_chip_bytes": needs[0]["bytes"],
        "longest_prompt": max(longest_prompt(way, machine) for way in ways), "room": job.room}


def page(told: dict) -> str:
    """A record as a page of Markdown."""
    noun = "GPU" if told["device"].startswith("cuda") else "CPU"
    rows = [("part", noun), ("-" * 34, "-" * 10 + ":"),
            *((name, gib(size)) for name, size in told["parts"].items()), ("all", gib(told["bytes"])),
            (f"{'free on' if told['is_here'] else 'memory of'} one {noun}", gib(told["memory"]))]
    if noun == "GPU":
        rows += [("in host memory", gib(told["host_bytes"])), ("free on the host", gib(told["host_memory"]))]
    rows += [(f"layers with all keys on the {noun}", f"{told['resident_layers']} of {told['layers']}"),
             ("tokens of the view (--budget)", f"{told['budget']:,}"),
             (f"longest prompt ({'model' if told['longest_prompt'] == told['room'] else 'memory'} ends it)",
              f"{told['longest_prompt']:,}")]
    what = f"{told['prompt_len']:,} prompt tokens and {told['max_new_tokens']:,} new ones in {told['dtype']}"
    what += f", {told['rows']} prompts side by side" * (told["rows"] > 1)
    what += f", on each of {told['gpus']} GPUs" * (told["gpus"] > 1)
    verdict = "It fits" if told["fits"] else "It does not fit"
    if told["on_chip_bytes"] != told["bytes"]:
        verdict += f" with --offload auto; without it {gib(told['on_chip_bytes'])} GiB are needed"
    if not told["fits"]:
        largest = sorted(told["parts"], key=told["parts"].get)[:-4:-1]
        verdict += ". Smaller, by a shorter --prompt-len, more --gpus, or of the largest parts:" + "".join(
            f"\n- {name}: {', '.join(told['remedies'][name])}" for name in largest if told["remedies"][name])
    table = "\n".join(f"| {name:<34} | {figure:>11} |" for name, figure in rows)
    return f"GiB, for {what}:\n\n{table}\n\n{verdict}"


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f}"


def main(argv: list[str]) -> int:
    own, args = parse_both(
        argv, FLAGS, "plan", "Do a checkpoint and a prompt fit a machine's memory? Reads config.json alone.",
        "triforce plan --checkpoint FOLDER --prompt-len 100000 --memory 24GiB")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise UserError(f"torchrun started {ranks} processes, and a plan needs one; say --gpus {ranks} instead")
    machine = machine_of(getattr(args, "device", None), own.memory, own.host_memory, own.gpus)
    told = record(job_of(args, own.batch_size), machine)
    print(json.dumps(told) if own.json else page(told))
    return 0 if told["fits"] else 1
