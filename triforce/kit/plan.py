"""`triforce plan`: what a job takes of a machine's memory, part by part, and whether it fits. Reads config.json alone.

The parts are those of `memory.py`, which `load` and a call check before they allocate. Here they are added up for a
machine that need not be this one.
"""

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from .. import cli, memory, request
from ..buffers import MOST_ROWS
from ..config import Placement, Settings, check_max_new_tokens, find_device, parse_size, whole
from ..errors import UserError
from ..free_memory import check_answers
from ..hf.checkpoint import read_config
from ..hf.folders import find_draft, resolve
from ..loading import find_dtype
from ..memory import VIEWS, Part, Sizes
from ..model import ModelConfig
from ..parallel import Group, shard_config
from ..quantize import check_wide, fp8_bytes

CUDA_ITSELF = Part("CUDA itself, about", 2**29)  # of a card's memory; what a running process finds free is without it
QUESTION = 64  # tokens that are planned for a question, with what a chat template puts around it


@dataclass(frozen=True)
class Machine:
    """What a plan is for."""

    device: torch.device
    memory: int | None  # bytes of one device; None: nobody knows
    host: int | None  # bytes of the host, for an offloaded cache
    ranks: int = 1  # that share the model, a device each
    is_here: bool = True  # `memory` is what is free now, rather than what a card has


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
    shares: bool = False  # they are questions about one document, or samples of one answer

    @property
    def room(self) -> int:
        """Tokens that a prompt may have beside the new ones."""
        return (self.placement.max_seq_len or self.target.max_len) - self.max_new_tokens


@dataclass(frozen=True)
class Need:
    """What a job takes of each device."""

    offload: bool | str
    wanted: int  # rows side by side, if there is room
    rows: int  # all of them, or as many as fit behind what they share
    budget: int  # tokens of the view
    resident: int  # layers of the KV cache on the device
    parts: list[Part]
    host: Part  # over all ranks
    room: int | None
    host_room: int | None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        on_device = self.room is None or self.bytes <= self.room
        return on_device and (self.host_room is None or self.host.bytes <= self.host_room)


def need(job: Job, machine: Machine, offload: bool | str) -> Need:
    """What the job takes, as `load` and `Buffers` plan it.

    Raises:
        UserError: settings do not fit each other, or so many ranks cannot share the model.
    """
    device, most = machine.device, job.placement.max_batch_size
    rows = min(job.rows, max(MOST_ROWS, most)) if job.shares else job.rows
    target = shard_config(job.target, Group(0, machine.ranks, "") if machine.ranks > 1 else None)
    settings = job.settings.resolve(device, has_model=job.draft is not None, offload=offload, shared=job.shares,
                                    max_batch_size=max(most, rows) if job.shares else most,
                                    query_group=target.query_group)
    job = replace(job, target=target, settings=settings, placement=replace(job.placement, offload=offload), rows=rows)
    dtype = find_dtype(job.placement.dtype, target.dtype, device)
    parts = [] if machine.is_here or device.type != "cuda" else [CUDA_ITSELF]
    parts += memory.weight_parts(target, job.draft, dtype)
    if job.placement.draft_dtype:
        parts.append(Part("fp8 copy for drafting", fp8_bytes(target), ("no --draft-dtype",)))
    free = None if machine.memory is None else machine.memory - sum(part.bytes for part in parts)
    fitting, budget, resident, caches, host = _caches(job, free, dtype, device)
    host = replace(host, bytes=host.bytes * machine.ranks)
    parts, room, host_room = [*parts, *caches], machine.memory, machine.host
    if device.type == "cpu":  # the same memory, wherever a layer or a rank lies
        parts, host_room = parts + [host] * bool(host.bytes), None
        room = None if room is None else room // machine.ranks
    return Need(offload, rows, fitting, budget, resident, parts, host, room, host_room)


def _caches(job: Job, free: int | None, dtype: torch.dtype,
            device: torch.device) -> tuple[int, int, int, Sequence[Part], Part]:
    """What `Buffers` plans: (rows that fit, tokens of a view, layers on the device, parts, part of the host).

    Args:
        job: of one rank, resolved. free: bytes beside the weights; None: nobody knows.
    """
    target, settings, place, longest = job.target, job.settings, job.placement, job.placement.max_seq_len
    base = job.prompt_len // settings.flush_interval * settings.flush_interval if job.shares else 0
    needed = memory.needed_tokens(job.prompt_len + QUESTION * job.shares + job.max_new_tokens, settings, longest)
    capacity = memory.row_capacity(needed, settings, longest, job.rows, base, target.max_len)
    sizes = Sizes(job.rows, capacity, 0, min(config.vocab_size for config in (target, job.draft) if config is not None),
                  base)

    def planned(rows: int, view: int, resident: int | None = None) -> memory.MemoryPlan:
        chosen = replace(sizes, batch=rows, budget=view, resident_layers=resident)
        return memory.plan_memory(target, job.draft, settings, chosen, dtype, device)

    def view(sharing: int) -> int:
        return settings.view_tokens(job.prompt_len, place.offload, capacity, sharing)

    def resident(batch: int, capacity: int, beside: memory.MemoryPlan) -> int | None:
        if not place.offload:
            return None
        layer = memory.layer_bytes(target, batch, capacity, dtype)
        return memory.resident_layers(place, target.n_layer, layer, beside.parts, free, device)

    if not base:
        budget, least = view(1), 0 if place.offload else None
        on_device = resident(job.rows, capacity, planned(job.rows, budget, least))
        plan = planned(job.rows, budget, on_device)
        return job.rows, budget, target.n_layer if on_device is None else on_device, plan.parts, plan.host
    least = min(view(1), VIEWS[0]) if settings.budget is None else view(1)
    sizes = replace(sizes, budget=least)
    on_device = resident(1, base, planned(1, least))
    document = memory.plan_document(target, settings, replace(sizes, resident_layers=on_device), dtype, device)
    room = memory.less_spare(free, device)

    def parts(rows: int, view: int) -> Sequence[Part]:
        """Of parts that both name, the larger: they are not needed at the same time."""
        found: dict[str, Part] = {}
        for part in (*document.parts, *planned(rows, view).parts):
            found[part.name] = max(part, found.get(part.name, part), key=lambda one: one.bytes)
        return list(found.values())

    rows = _largest(1, job.rows, lambda rows: room is None or memory.total(parts(rows, least)) <= room)
    budget = view(rows)
    if settings.budget is None and room is not None:
        budget = memory.view_within(lambda view: parts(rows, view), budget, room)
    return rows, budget, target.n_layer if on_device is None else on_device, parts(rows, budget), document.host


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, where all below one that fits do, too; `low` if none above it does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def longest_prompt(job: Job, machine: Machine, offload: bool | str) -> int:
    """The most tokens of a prompt that fit: all that the model can attend over, or a multiple of 1,024. 0: none."""
    def fits(length: int) -> bool:
        return need(replace(job, prompt_len=length), machine, offload).fits

    return job.room if fits(job.room) else _largest(0, job.room // 1024, lambda count: fits(count * 1024)) * 1024


# -- the command -------------------------------------------------------------------------------------------------------

def parser() -> cli.Parser:
    p = cli.Parser(
        prog="triforce plan", allow_abbrev=False, formatter_class=cli.Paragraphs,
        description="What a checkpoint and a prompt take of a machine's memory, part by part, and whether they fit. "
                    "Reads config.json alone. Exit status: 0; 1 if it does not fit; 2 for a mistake in the command.",
        epilog="Every flag of `triforce` that changes what is needed is known here, too: --checkpoint, --draft, "
               "--prompt-len, --max-new-tokens, --dtype, --budget, --offload, ...\n\n"
               "    triforce plan --checkpoint FOLDER --prompt-len 100000 --memory 24GiB")
    p.add_argument("--memory", metavar="SIZE", help="of one GPU, which need not be here, such as 24GiB; with --device "
                   "cpu of the machine (default: what this machine's device has free)")
    p.add_argument("--host-memory", metavar="SIZE", help="of the host (default: what this machine has free)")
    p.add_argument("--gpus", type=int, default=1, metavar="N", help="so many share the model, as under torchrun")
    p.add_argument("--batch-size", type=int, metavar="N", help="so many prompts side by side (default 1); questions "
                   "and samples (--questions FILE, --num-samples N) share the document")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    return p


def machine_of(own, device: str | None) -> Machine:
    """own: flags of this command. device: as `triforce` was to be told."""
    host = memory.available(torch.device("cpu"))
    host = parse_size(own.host_memory, "--host-memory") if own.host_memory else host
    if own.memory:
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            find_device(device)  # says what is wrong with it
        size = parse_size(own.memory, "--memory")
        return Machine(torch.device(device or "cuda"), size, host, own.gpus, is_here=False)
    here = find_device(device)
    count = torch.cuda.device_count() if here.type == "cuda" else 1
    if own.gpus > count:
        raise UserError(f"--gpus ({own.gpus}) is more than the {count} that this machine has; say with --memory how "
                        "much one of them has, to plan for another machine")
    return Machine(here, memory.available(here), host, own.gpus)


def job_of(args, rows: int | None = None) -> Job:
    """args: of `triforce`. rows: prompts side by side; None: as many as the other flags say."""
    settings = Settings(**request.given(args, Settings))
    placement = Placement(**request.given(args, Placement), max_batch_size=args.batch_size)
    placement = replace(placement, device="cpu").resolve()  # a plan's device need not be here
    target = read_config(resolve(args.checkpoint), weights=placement.weights)
    if placement.draft_dtype:
        check_wide(target)
    folder = find_draft(args.checkpoint, settings.draft)
    draft = None if folder is None else read_config(folder)
    if (placement.num_resident_layers or 0) > target.n_layer:
        raise UserError(f"--num-resident-layers ({placement.num_resident_layers}) is more than the model's "
                        f"{target.n_layer} layers")
    new = check_max_new_tokens(args.max_new_tokens)
    job = Job(target, draft, settings, placement, 0, new)
    length = _prompt_len(args, job)
    if args.num_samples is not None:
        whole(1, 4)("--num-samples", args.num_samples)
        check_answers(args.num_samples, new)
    about = max(len(request.questions_of(args)) + (args.question is not None), 1) * (args.num_samples or 1)
    shares = about > 1 and length >= (settings.flush_interval or 128)
    if args.prompts is not None and rows is None:
        rows = min(len(request.read_prompts(args.prompts)), args.batch_size)
    if about > 1:
        rows = about if shares else min(about, args.batch_size)
    return replace(job, prompt_len=length, rows=rows or 1, shares=shares)


def _prompt_len(args, job: Job) -> int:
    """Tokens of the prompt: as many as --keep leaves of it, if it is too long."""
    if args.prompt_len is None:
        text = request.first_given(args, "prompt", "prompt_file", "prompts", "prefix")
        if text is not None:
            raise UserError(f"a plan reads no text, and {text} names one; say how many tokens it has with --prompt-len")
    else:
        whole(1, request.DEFAULT_PROMPT_LEN)("--prompt-len", args.prompt_len)
    length = args.prompt_len or min(request.DEFAULT_PROMPT_LEN, max(job.room, 1))
    if length > job.room and (args.keep is None or job.room < 1):
        limit = "--max-seq-len allows" if job.placement.max_seq_len else "the model can attend over"
        remedy = f"--prompt-len {job.room}, or --keep start, end or both" if job.room > 0 else "fewer --max-new-tokens"
        raise UserError(f"a prompt of {length} tokens and {job.max_new_tokens} new ones exceed the "
                        f"{job.room + job.max_new_tokens} that {limit}; use {remedy}")
    return min(length, job.room)


def record(job: Job, machine: Machine) -> dict:
    """The plan, as JSON has it. Where a GPU is too small, a second way keeps the rest of the cache on the host."""
    ways = [need(job, machine, job.placement.offload)]
    if machine.device.type == "cuda" and not job.placement.offload and not (ways[0].fits and
                                                                            ways[0].rows == ways[0].wanted):
        ways.append(need(job, machine, "auto"))
    fitting = sorted((one for one in ways if one.fits), key=lambda one: one.rows < one.wanted)
    return {
        "name": "plan", "fits": bool(fitting), "device": str(machine.device), "memory": machine.memory,
        "host_memory": machine.host, "gpus": machine.ranks, "is_here": machine.is_here,
        "prompt_len": job.prompt_len, "max_new_tokens": job.max_new_tokens, "rows": job.rows, "shares": job.shares,
        "dtype": str(find_dtype(job.placement.dtype, job.target.dtype, machine.device)).removeprefix("torch."),
        "ways": [{"offload": one.offload, "fits": one.fits, "rows": one.rows, "budget": one.budget,
                  "resident_layers": one.resident, "layers": job.target.n_layer, "bytes": one.bytes,
                  "host_bytes": one.host.bytes, "longest_prompt": longest_prompt(job, machine, one.offload),
                  "parts": {part.name: part.bytes for part in one.parts},
                  "remedies": {part.name: part.remedies for part in one.parts if part.remedies}} for one in ways],
        "chosen": ways.index(fitting[0]) if fitting else None,
    }


def page(told: dict, *notes: str) -> str:
    """A record as a page of Markdown, and sentences to end with."""
    noun, ways = "GPU" if told["device"].startswith("cuda") else "CPU", told["ways"]
    rows = [[name, *(gib(one["parts"][name]) if name in one["parts"] else "-" for one in ways)]
            for name in dict.fromkeys(name for one in ways for name in one["parts"])]
    rows.append(["all", *(gib(one["bytes"]) for one in ways)])
    rows.append([f"{'free on' if told['is_here'] else 'memory of'} one {noun}", *[gib(told["memory"])] * len(ways)])
    if any(one["offload"] for one in ways):
        rows.append(["in host memory", *(gib(one["host_bytes"]) for one in ways)])
        rows.append(["free on the host", *[gib(told["host_memory"])] * len(ways)])
        rows.append([f"layers of the KV cache on the {noun}",
                     *(f"{one['resident_layers']} of {one['layers']}" for one in ways)])
    if told["rows"] > 1:
        rows.append(["rows side by side", *(f"{one['rows']} of {told['rows']}" for one in ways)])
    rows.append(["tokens of the view (--budget)", *(f"{one['budget']:,}" for one in ways)])
    rows.append(["longest prompt that fits", *(f"{one['longest_prompt']:,}" for one in ways)])
    rows.append(["fits", *("yes" if one["fits"] else "no" for one in ways)])
    what = f"{told['prompt_len']:,} prompt tokens and {told['max_new_tokens']:,} new ones in {told['dtype']}"
    if told["rows"] > 1:
        what += f", {told['rows']} {'answers about one document' if told['shares'] else 'prompts side by side'}"
    if told["gpus"] > 1:
        what += f", on each of {told['gpus']} GPUs"
    head = ["part", *(f"{noun} + host" if one["offload"] else noun for one in ways)]
    return "\n\n".join([f"GiB, for {what}:", table(head, rows), items([_verdict(told, noun), *notes])])


def _verdict(told: dict, noun: str) -> str:
    if told["chosen"] is not None:
        chosen = told["ways"][told["chosen"]]
        added = " with --offload auto" * (told["chosen"] > 0)
        rows = f", {chosen['rows']} of {told['rows']} rows side by side" * (chosen["rows"] < told["rows"])
        copied = chosen["host_bytes"] // told["gpus"] if noun == "GPU" else 0
        return f"It fits{added}{rows}." + (f" Each verify copies {gib(copied)} GiB over the bus." if copied else "")
    least = min(told["ways"], key=lambda one: one["bytes"])
    on_host = told["memory"] is None or least["bytes"] <= told["memory"]
    where, needed, free = (("the host", least["host_bytes"], told["host_memory"]) if on_host else
                           (f"one {noun}", least["bytes"], told["memory"]))
    large = sorted((name for name in least["remedies"] if least["parts"][name] >= needed / 20),
                   key=least["parts"].get, reverse=True)
    smaller = [f"{name} ({', '.join(least['remedies'][name])})" for name in large]
    return (f"Nothing fits: this takes {gib(needed)} GiB of {where}, and {gib(free)} GiB are there. What makes it "
            f"smaller: {'; '.join(['a smaller --prompt-len', *['more --gpus'] * (noun == 'GPU'), *smaller])}.")


def dropped(args, job: Job) -> str:
    """What becomes of a text that is longer than the prompt of the plan."""
    if args.prompt_len is not None and args.prompt_len <= job.room:
        return f"Of a longer text the first {job.prompt_len:,} tokens are read (--prompt-len), and the rest is dropped."
    if args.keep is not None:
        kept = {"both": "half from the start and half from the end"}.get(args.keep, f"those at the {args.keep}")
        return f"Of a longer prompt {job.room:,} tokens are kept, {kept} (--keep {args.keep}); the rest is dropped."
    return f"A prompt of more than {job.room:,} tokens is refused; --keep start, end or both drops the rest of it."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns line up: the first is a name and stands left, the others are figures and stand right."""
    widths = [max(2, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lined = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lined)


def items(lines: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(line, 80, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                                   break_on_hyphens=False) for line in lines)


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f}"


def main(argv: list[str]) -> int:
    own, rest = parser().parse_known_args(argv)
    for name, value in (("--gpus", own.gpus), ("--batch-size", own.batch_size)):
        if value is not None:
            whole(1, 1)(name, value)
    args = cli.parse(rest + ([] if own.batch_size is None else ["--batch-size", str(own.batch_size)]))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise UserError(f"torchrun started {ranks} processes, and a plan needs one; say --gpus {ranks} instead")
    job = job_of(args, own.batch_size)
    told = record(job, machine_of(own, getattr(args, "device", None)))
    print(json.dumps(told) if own.json else page(told, dropped(args, job)))
    return 0 if told["fits"] else 1
