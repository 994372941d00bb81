"""`triforce plan`: what fits a machine, part by part, and the command to use. Reads config.json, and no weights."""

import argparse
import json
import os
import re
import shlex
from dataclasses import replace

import torch

from .. import cli, memory, request
from ..caches import MOST_ROWS
from ..config import Placement, Settings, check_max_new_tokens, find_device, parse_size, whole
from ..errors import UserError
from ..free_memory import check_answers
from ..hf.checkpoint import read_config
from ..hf.folders import find_draft, resolve
from ..quantize import check_wide
from .drafts import candidates
from .tables import broken, gib, items, paragraph, table
from .ways import QUESTION, Job, Machine, Way, best, longest_prompt, rows_that_fit, ways


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="triforce plan", allow_abbrev=False, formatter_class=cli.Paragraphs,
        description="What a checkpoint and a prompt take of a machine's memory, part by part, what fits, and the "
                    "command to use. Reads config.json alone. Exit status: 0; 1 if nothing fits.",
        epilog="Every flag of `triforce` that changes what is needed is known here, too, and becomes part of the "
               "command: --checkpoint, --draft, --prompt-len, --max-new-tokens, --dtype, --budget, --offload, ...\n\n"
               "    triforce plan --checkpoint FOLDER --prompt-len 100000 --memory 24GiB")
    p.add_argument("--memory", metavar="SIZE", help="of one GPU, which need not be here, such as 24GiB; with --device "
                   "cpu of the machine (default: what this machine's device has free)")
    p.add_argument("--host-memory", metavar="SIZE", help="of the host (default: what this machine has free)")
    p.add_argument("--gpus", type=int, metavar="N", help="so many of them (default: those of this machine, or 1)")
    p.add_argument("--batch-size", type=int, metavar="N", help="so many prompts side by side (default 1); questions "
                   "and samples (--questions FILE, --num-samples N) share the document")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    return p


def machine_of(args, device: str | None) -> Machine:
    """args: of this command. device: as `triforce` was to be told."""
    host = memory.available(torch.device("cpu"))
    host = parse_size(args.host_memory, "--host-memory") if args.host_memory else host
    if args.memory:
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            find_device(device)  # says what is wrong with it
        size = parse_size(args.memory, "--memory")
        return Machine(torch.device(device or "cuda"), size, host, args.gpus or 1, is_here=False)
    place = Placement(device=device).resolve()
    count = torch.cuda.device_count() if place.device.type == "cuda" else 1
    if args.gpus is not None and args.gpus > count:
        raise UserError(f"--gpus ({args.gpus}) is more than the {count} that this machine has; say with --memory how "
                        "much one of them has, to plan for another machine")
    return Machine(place.device, memory.available(place.device), host, args.gpus or count)


def job_of(args, rows: int | None) -> Job:
    """args: of `triforce`."""
    settings = Settings(**request.given(args, Settings))
    placement = Placement(**request.given(args, Placement), max_batch_size=args.batch_size)
    replace(placement, device="cpu").resolve()  # do they fit each other?
    target = read_config(resolve(args.checkpoint), weights=placement.weights)
    if placement.draft_dtype:
        check_wide(target)
    folder = find_draft(args.checkpoint, settings.draft)
    draft = None if folder is None else read_config(folder)
    new = check_max_new_tokens(args.max_new_tokens)
    longest = placement.max_seq_len or target.max_len
    length = args.prompt_len if args.prompt_len is not None else min(request.DEFAULT_PROMPT_LEN, max(longest - new, 1))
    whole(1, request.DEFAULT_PROMPT_LEN)("--prompt-len", length)
    if length + new > longest:
        raise UserError(f"a prompt of {length} tokens and {new} new ones exceed the {longest} that "
                        f"{'--max-seq-len allows' if placement.max_seq_len else 'the model can attend over'}; use "
                        f"--prompt-len {max(longest - new, 1)}")
    if placement.num_resident_layers is not None and placement.num_resident_layers > target.n_layer:
        raise UserError(f"--num-resident-layers ({placement.num_resident_layers}) is more than the model's "
                        f"{target.n_layer} layers")
    if args.num_samples is not None:
        whole(1, 4)("--num-samples", args.num_samples)
        check_answers(args.num_samples, new)
    about = max(len(request.questions_of(args)) + (args.question is not None), 1) * (args.num_samples or 1)
    shares = about > 1 and length >= (settings.flush_interval or 128)
    rows = about if shares else min(about, args.batch_size) if about > 1 else rows or 1
    return Job(target, draft, settings, placement, length, new, rows, shares, args.batch_size)


def command(job: Job, chosen: Way, rest: list[str], rows: int | None) -> str:
    """What to type. rest: the user's own flags."""
    words = list(rest)
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if not given & {"--prompt-len", "--prefill"}:
        words += ["--prompt-len", str(job.prompt_len)]
    asks = given & {"--questions", "--question", "--num-samples"}  # about one document
    if rows is not None:
        words += [*([] if asks else ["--prompts", "prompts.jsonl"]), "--batch-size", str(rows)]
    if not given & {"--prompt", "--prompt-file", "--prompts", "--prefix"} and (asks or rows is None):
        words += ["--prompt-file", "book.txt"]
    words += [flag for flag in chosen.flags if not (job.placement.offload and flag in ("--offload", "auto"))]
    start = ["triforce"]
    if chosen.ranks > 1:
        start = ["torchrun", "--nproc-per-node", str(chosen.ranks), "-m", "triforce"]
    return shlex.join(start + words)


def record(job: Job, machine: Machine, found: list[Way], rest: list[str], rows: int | None) -> dict:
    """All of it, as JSON has it."""
    chosen = best(found)
    return {
        "name": "plan", "fits": chosen is not None, "device": str(machine.device), "memory": machine.memory,
        "host_memory": machine.host, "devices": machine.devices, "is_here": machine.is_here,
        "prompt_len": job.prompt_len, "max_new_tokens": job.max_new_tokens, "rows": job.rows, "shares": job.shares,
        "ways": [{"ranks": one.ranks, "rows": one.rows, "offload": one.offload, "flags": one.flags, "fits": one.fits,
                  "resident_layers": job.target.n_layer if one.resident is None else one.resident,
                  "layers": job.target.n_layer, "budget": one.budget, "bytes": one.bytes, "left": one.left,
                  "host_bytes": one.host.bytes, "parts": {part.name: part.bytes for part in one.parts}}
                 for one in found],
        "chosen": None if chosen is None else found.index(chosen),
        "command": None if chosen is None else command(job, chosen, rest, rows),
        "longest_prompt": longest_prompt(job, machine) if chosen is None else None,
        "rows_that_fit": None if chosen is None or not job.shares else rows_that_fit(job, machine, chosen),
        "drafts": candidates(job.target) if job.draft is None else [],
    }


def title(one: dict, noun: str) -> str:
    """Of a column."""
    return f"{one['ranks']} {noun}{'s' * (one['ranks'] > 1)}{' + host' * bool(one['offload'])}"


def markdown(told: dict) -> str:
    """A record as a page of Markdown."""
    noun = "GPU" if told["device"].startswith("cuda") else "CPU"
    shown = told["ways"]
    if told["chosen"] is not None:  # nobody asks for what comes after a way that fits, but the one beside it
        shown = shown[: max(told["chosen"] + 1, 2)]
    shown = shown[-3:]
    columns = [{_common(name): size for name, size in one["parts"].items()} for one in shown]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(gib(column[name]) if name in column else "-" for column in columns)] for name in names]
    rows.append(["all", *(gib(one["bytes"]) for one in shown)])
    rows.append([f"free on one {noun}" if told["is_here"] else f"memory of one {noun}",
                 *[gib(told["memory"])] * len(shown)])
    if any(one["offload"] for one in shown):
        rows.append(["layers of the KV cache there",
                     *(f"{one['resident_layers']} of {one['layers']}" for one in shown)])
        rows.append(["in host memory", *(gib(one["host_bytes"]) if one["offload"] else "-" for one in shown)])
        rows.append(["free on the host", *(gib(told["host_memory"]) if one["offload"] else "-" for one in shown)])
    rows.append(["fits", *("yes" if one["fits"] else "no" for one in shown)])
    what = f"{told['prompt_len']:,} prompt tokens and {told['max_new_tokens']:,} new ones"
    if told["shares"]:
        what += f", for {told['rows']} answers about one document"
    elif told["rows"] > 1:
        what += f", {told['rows']} prompts side by side"
    saved = [title(one, noun) for one in shown if set(one["flags"]) - {"--offload", "auto"}]
    what += f" ({' and '.join(saved)} with flags that save memory)" if saved else ""
    lines = [paragraph(f"GiB, for {what}:"), "", table(["part", *(title(one, noun) for one in shown)], rows), ""]
    lines.append(_verdict(told, noun))
    return "\n".join(lines)


def _verdict(told: dict, noun: str) -> str:
    notes = []
    if told["chosen"] is None:
        least = min(told["ways"], key=lambda one: one["bytes"])
        lacks_host = told["memory"] is None or least["bytes"] <= told["memory"]
        where, needed, free = ((f"one {noun}", least["bytes"], told["memory"]) if not lacks_host else
                               ("the host", least["host_bytes"], told["host_memory"]))
        flags = [flag for flag in least["flags"] if flag not in ("--offload", "auto")]
        text = (f"**Nothing fits.** The thriftiest way{f' ({shlex.join(flags)})' if flags else ''} takes "
                f"{gib(needed)} GiB of {where}, and {gib(free)} GiB are there.")
        longest = told["longest_prompt"]
        text += (f" The longest prompt that fits has {longest:,} tokens: --prompt-len {longest}." if longest else
                 " No prompt of 1,024 tokens fits either: take a smaller model, more devices (--gpus), or one with "
                 "more memory.")
        return paragraph(text)
    chosen = told["ways"][told["chosen"]]
    lines = ["The command to use:", "", broken(told["command"]), ""]
    if told["shares"]:
        side, fit = chosen["rows"], told["rows_that_fit"]
        notes.append(f"The document is kept once. {side} of {told['rows']} answers run side by side, each with "
                     f"{QUESTION} tokens for its question; {fit} {'would fit' if fit < MOST_ROWS else 'or more fit'}.")
    if chosen["offload"]:
        count = chosen["layers"] - chosen["resident_layers"]
        notes.append(f"Each verify copies {gib(chosen['host_bytes'] // chosen['ranks'])} GiB of {count} layers over "
                     "the bus; drafts read the view on the device.")
    saving = [flag for flag in chosen["flags"] if flag.startswith("--") and flag != "--offload"]
    if saving:
        notes.append(f"Without {' and '.join(saving)} it does not fit; in our measurements they cost next to nothing.")
    if noun == "GPU":
        notes.append("After the first answer up to four processes compile, and take half a GiB of the GPU each; "
                     f"{gib(chosen['left'])} GiB are left beside a run. --no-compile does without them.")
    if told["drafts"]:
        notes.append(f"Models that may draft for it, by their vocabulary: {', '.join(told['drafts'])} (--draft). "
                     "Without one the target drafts for itself.")
    return "\n".join(lines) + ("\n" + items(notes) if notes else "")


def _common(name: str) -> str:
    """The name of a part in every way: without the number of layers."""
    return "KV cache" if name.startswith("KV cache of") and "resident" in name else name


def read(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """Flags of this command; all flags of `triforce` beside them; and those as they were typed."""
    own, rest = parser().parse_known_args(argv)
    for name, value in (("--gpus", own.gpus), ("--batch-size", own.batch_size)):
        if value is not None:
            whole(1, 1)(name, value)
    return own, cli.parse(rest + ([] if own.batch_size is None else ["--batch-size", str(own.batch_size)])), rest


def main(argv: list[str]) -> int:
    own, args, rest = read(argv)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise UserError(f"torchrun started {ranks} processes, and a plan needs one; say --gpus {ranks} instead")
    job, machine = job_of(args, own.batch_size), machine_of(own, getattr(args, "device", None))
    told = record(job, machine, ways(job, machine), rest, own.batch_size)
    print(json.dumps(told) if own.json else markdown(told))
    return 0 if told["fits"] else 1
