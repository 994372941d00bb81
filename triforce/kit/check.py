"""`triforce check`: whether all is well with a checkpoint on this machine, what it does there, and what to use.

Each part is a record; `report.py` makes a page of them, and a file of JSON has the same.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from .. import __version__, cli, memory, request
from ..config import Placement, Sampling, Settings, whole
from ..engine import Engine
from ..errors import UserError
from ..hf.checkpoint import read_config
from ..hf.folders import find_draft, find_weights, resolve
from ..hf.tokenizer import Tokenizer
from ..kept import root
from ..loading import find_dtype, load
from ..plan import AUTOREGRESSION, ONE_ROW
from ..streams import use_one_stream
from . import agreement, plan, report, trials, ways

NEW = 96  # tokens of a call
# Flags of `triforce` that have no meaning here.
OTHERS = ("prompt", "prompts", "question", "questions", "num_samples", "interactive", "system", "prefix", "save_prefix",
          "compare", "show_levels")
WORKSPACES = 2**28  # bytes that libraries of CUDA allocate for themselves, whatever the model
LENGTHS = {"cpu": (512, 2048), "cuda": (4096, 32768, 122880)}  # prompts, where nobody says others


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="triforce check", allow_abbrev=False, formatter_class=cli.Paragraphs,
        description="Whether all is well with a checkpoint on this machine: a page of Markdown, and a file of JSON. "
                    "Exit status: 0; 1 if a check failed; 2 for a mistake in the command.",
        epilog="Flags of `triforce` that load a model are known here, too: --checkpoint, --draft, --device, --dtype, "
               "--budget, --offload, ...; and --temperature, --top-p, ... of what is drawn.\n\n"
               "    triforce check --checkpoint JackFram/llama-68m --lengths 512 1500")
    p.add_argument("--prompt-file", metavar="FILE", help="the text to continue (default: CPython's language "
                   "reference); it is repeated where it is too short")
    p.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prompt lengths to time; the longest is that of "
                   "all other measurements (default: 512 and 2,048; on a GPU 4,096, 32,768 and 122,880, as far as they "
                   "fit)")
    p.add_argument("--new", type=int, metavar="N", default=NEW,
                   help=f"tokens of a call and of a measurement of acceptance (default {NEW})")
    p.add_argument("--far", type=int, metavar="N", help="compare logits at the end of so many tokens, too; 0: do not "
                   "(default: all that the model can attend over, or as many as take transformers some half a minute)")
    p.add_argument("--reference", metavar="FOLDER", help="of transformers, if it is not the checkpoint's own: the one "
                   "that a checkpoint was converted from")
    p.add_argument("--quick", action="store_true", help="one length, no far end, no other views")
    p.add_argument("--out", metavar="FILE", default="triforce-check.json", help="of the JSON (default: "
                   "triforce-check.json)")
    return p


# -- what runs, and what is run ----------------------------------------------------------------------------------------

def machine(device: torch.device) -> dict:
    versions = {"python": platform.python_version(), "triforce": __version__}
    for name in ("torch", "transformers", "safetensors", "tokenizers"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    told = {"name": "machine", "passed": None, "date": str(date.today()), "system": platform.platform(),
            "device": str(device), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "versions": versions,
            "free_memory": memory.available(device), "copy_bandwidth": trials.copy_bandwidth(device),
            "host_free": memory.available(torch.device("cpu"))}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        told |= {"gpu": about.name, "gpus": torch.cuda.device_count(), "gpu_memory": about.total_memory,
                 "capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
    return told


def checkpoint(folder: Path, name: str = "checkpoint") -> dict:
    config = read_config(folder)
    tokenizer, files = Tokenizer(folder), find_weights(folder)
    return {"name": name, "passed": None, "folder": str(folder), "architecture": config.architecture,
            "parameters": config.num_parameters, "layers": config.n_layer, "dim": config.dim, "heads": config.n_head,
            "kv_heads": config.n_kv_head, "head_dim": config.head_dim, "ffn_dim": config.ffn_dim,
            "vocabulary": config.vocab_size, "words": tokenizer.vocab_size, "window": config.max_len,
            "rope_theta": config.rope_theta, "rope": config.rope_scaling.kind,
            "rope_factor": config.rope_scaling.factor,
            "dtype": config.dtype, "tied": config.tie_word_embeddings,
            "files": len(files), "file_bytes": sum(path.stat().st_size for path in files)}


def read_ids(tokenizer: Tokenizer, path: str | None, count: int) -> tuple[list[int], int]:
    """So many tokens of the text, and how often it is begun anew."""
    text = request.default_document() if path is None else request.read_file("--prompt-file", path)
    if not text.strip():
        raise UserError(f"--prompt-file {path} holds no text; name another file")
    text = text[: 16 * count]  # no tokenizer makes longer tokens on average
    ids = tokenizer.encode(text)
    repeated = -(-count // len(ids)) - 1
    return (ids * (repeated + 1))[:count], repeated


# -- memory, and what to use -------------------------------------------------------------------------------------------

def memory_of(engine: Engine, job: ways.Job, device: torch.device, stats_peak: int) -> dict:
    """Planned beside used. On a GPU the peak is compared, on a CPU the caches that are held: there the peak is that of
    the process, with transformers in it."""
    here = ways.Machine(device, memory.available(device), None)
    way = ways.way(job, here, offload=job.placement.offload)
    state, parts = engine.caches.state, {part.name: part.bytes for part in way.parts}
    held = {"tail", "chunk keys", "retrieval view", "draft cache", way.host.name}
    caches = sum(size for name, size in parts.items() if name in held or name.startswith("KV cache"))
    if device.type == "cuda" and way.host.bytes:
        caches += way.host.bytes
    told = {"name": "memory", "planned": way.bytes, "parts": parts, "caches_planned": caches,
            "caches_held": state.nbytes, "peak": stats_peak, "prompt_len": job.prompt_len}
    told["passed"] = caches == state.nbytes and (device.type != "cuda" or stats_peak <= 1.05 * way.bytes + WORKSPACES)
    if not told["passed"]:
        told["advice"] = ("More is held than was planned, so a run that is said to fit may not: please report this "
                          "file, and leave a part of the memory free.")
    return told


def advise(records: list[dict], tried: list[trials.Trial], engine: Engine, job: ways.Job, here: ways.Machine) -> dict:
    """What the measurements speak for. Each line names what it rests on."""
    lines = []
    steps = {record["name"].removeprefix("step, "): record for record in records if record["name"].startswith("step")}
    auto = next(record for record in records if record["name"] == "run, second")["milliseconds_a_token"]
    plain = steps["autoregression"]["milliseconds"] if "autoregression" in steps else auto
    verify = steps["verify"]["milliseconds"] if "verify" in steps else plain
    drawn = [trial for trial in tried if trial.temperature > 0 and trial.plan.gamma and trial.drafting is not None]
    hopes = {trial.way: trials.best_gamma(trial, verify, engine.settings.block_size - 1) for trial in drawn
             if trial.way in {"draft model", "n-grams", f"{engine.settings.draft_cache} view"}}
    if hopes:
        best = min(hopes, key=lambda name: hopes[name][1])
        gamma, cost = hopes[best]
        if cost < plain:
            flags = {"draft model": "--no-retrieval", "n-grams": "--draft ngram --no-retrieval"}.get(
                best, "--draft none" if engine.draft is not None else "")
            lines.append(f"gamma: by the times and rates above, of the single levels {best} with {gamma} tokens a "
                         f"verify would be the fastest, {cost:.1f} ms a token beside {plain:.1f} (and "
                         f"{auto:.1f} that 'auto' took, which mixes levels). "
                         f"{f'{flags} --gamma {gamma}'.strip()} fixes it, for texts that a seed repeats.")
        else:
            lines.append(f"gamma: no way to draft pays at {job.prompt_len:,} tokens (the best, {best}, would take "
                         f"{cost:.1f} ms a token beside {plain:.1f}). Leave 'auto', which then drafts nothing; longer "
                         "prompts speak for drafting.")
    rates = {trial.way: trial.rate for trial in drawn if trial.rate is not None}
    view, wide = rates.get("retrieval view"), next((name for name in rates if name.startswith("view of ")), None)
    if view is not None and wide is not None:
        if rates[wide] > view + 0.05:
            lines.append(f"budget: twice the tokens raise the rate from {view:.2f} to {rates[wide]:.2f}; try --budget "
                         f"{wide.removeprefix('view of ').replace(',', '')}.")
        else:
            lines.append(f"budget: twice the tokens bring {rates[wide]:.2f} instead of {view:.2f}; the default "
                         f"({engine.resolve_budget(job.prompt_len):,}) is enough for this text.")
    streaming = rates.get("streaming view")
    if view is not None and streaming is not None and streaming >= view - 0.03:
        lines.append(f"view: the first and newest tokens draft as well ({streaming:.2f}) as retrieved ones "
                     f"({view:.2f}) here; --draft-cache streaming saves choosing them.")
    room = engine.target.config.max_len - job.max_new_tokens
    if job.placement.max_seq_len is None:
        longest = replace(job, prompt_len=room)
        chosen = ways.best(ways.ways(longest, here))
        if chosen is None:
            lines.append(f"offload: {room:,} tokens, all that the model can attend over, do not fit this machine; at "
                         f"most {ways.longest_prompt(longest, here):,} do (triforce plan).")
        else:
            words = f"add {' '.join(chosen.flags)}" if chosen.flags else "no flag is needed"
            ranks = f" on {chosen.ranks} GPUs" if chosen.ranks > 1 else ""
            lines.append(f"offload and ranks: for all {room:,} tokens that the model can attend over, {words}{ranks}.")
    return {"name": "advice", "passed": None, "lines": lines}


# -- all of it ---------------------------------------------------------------------------------------------------------

class Progress:
    """Lines on stderr, so that nobody looks at a still screen; and records as they are made."""

    def __init__(self):
        self.records: list[dict] = []
        self.begun = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, *records: dict) -> None:
        self.records += records


def lengths_of(own, args, config, device: torch.device, longest: int) -> list[int]:
    """Prompt lengths, ascending."""
    if own.lengths:
        for length in own.lengths:
            whole(1, 2048)("--lengths", length)
        if max(own.lengths) + own.new > longest:
            raise UserError(f"--lengths {max(own.lengths)} and {own.new} new tokens exceed the {longest} that the "
                            f"model can attend over; use at most {longest - own.new}")
        found = sorted(set(own.lengths))
    else:
        most = longest - own.new
        found = [length for length in LENGTHS[device.type] if length <= most] or [max(most, 1)]
        while len(found) > 1 and not _way(args, found[-1], device).fits:
            found.pop()
    _way(args, found[-1], device)  # a setting that does not fit the others is found before anything is loaded
    return found[-1:] if own.quick else found


def _job(args, length: int) -> ways.Job:
    asked = {**vars(args), "prompt_len": length, "batch_size": 1}
    return plan.job_of(argparse.Namespace(**asked), None)


def _way(args, length: int, device: torch.device) -> ways.Way:
    here = ways.Machine(device, memory.available(device), memory.available(torch.device("cpu")))
    job = _job(args, length)
    return ways.way(job, here, offload=job.placement.offload)


def beside_transformers(own, args, folder: Path, ids: list[int], device: torch.device,
                        progress: Progress) -> list[agreement.Text]:
    """What transformers says, before our own model is loaded: the two need not fit side by side."""
    if importlib.util.find_spec("transformers") is None:
        progress.add({"name": "logits", "passed": None, "skipped": "transformers is not installed; "
                      "pip install transformers, and run this again"})
        return []
    config = read_config(folder)
    if own.reference is None and (config.float8 is not None or getattr(args, "weights", None) == "fp8"):
        progress.add({"name": "logits", "passed": None, "skipped": "weights are in fp8, and transformers multiplies "
                      "these in another way; --reference FOLDER compares with another folder"})
        return []
    count = min(agreement.TOKENS, config.max_len, len(ids))
    texts = [agreement.Text("first text", ids[:count], count, True)]
    far = 0 if own.quick else own.far
    progress.say(f"transformers over {count:,} tokens{'' if far == 0 else ', and at the far end'}")
    hushed()
    dtype = find_dtype(getattr(args, "dtype", None), config.dtype, device)
    reference = folder if own.reference is None else resolve(own.reference)
    try:
        length = agreement.of_transformers(reference, texts, ids, config, dtype, device, far)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        progress.add({"name": "logits", "passed": None, "skipped": f"transformers cannot load {reference}: {reason}"})
        return []
    except RuntimeError as error:
        if not memory.ran_out(error):
            raise
        progress.add({"name": "logits", "passed": None, "skipped": "transformers ran out of memory; --far 0 asks for "
                      "2,048 tokens alone"})
        return []
    if far is None and length < config.max_len:
        why = f"{length:,} of {config.max_len:,} tokens are affordable" if length else "more tokens are not affordable"
        progress.add({"name": "far end", "passed": None, "skipped": f"{why} here; --far N asks for more"})
    return texts


def hushed() -> None:
    """transformers speaks of errors alone, and draws no bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def examine(engine: Engine, own, args, ids: list[int], lengths: list[int], progress: Progress) -> None:
    """All that a loaded engine shows: adds records."""
    longest, device, law = lengths[-1], engine.device, Sampling(**request.given(args, Sampling))
    prompt = ids[:longest]
    most = min(trials.GREEDY, own.new)
    progress.say(f"first run, {longest:,} tokens")
    first = trials.times(engine, prompt, own.new, True, law) | {"name": "run, first"}
    progress.say("second run, and without speculation")
    second = trials.times(engine, prompt, own.new, True, law) | {"name": "run, second"}
    off = trials.times(engine, prompt, own.new, False, law) | {"name": f"off, {longest}"}
    peak = max(first["peak_memory"], second["peak_memory"])
    progress.add(memory_of(engine, _job(args, longest), device, peak))
    read = trials.step_bytes(engine, longest)

    progress.say("greedy, on and off")
    plain = trials.run(engine, prompt, own.new, "autoregression", AUTOREGRESSION, trials.GREEDILY, most)
    tried = [plain, trials.run(engine, prompt, own.new, "one row", ONE_ROW, law, most)]
    for way, chosen in trials.ways(engine).items():
        progress.say(f"drafting: {way}")
        greedy = trials.run(engine, prompt, own.new, way, chosen, trials.GREEDILY, most)
        progress.add(trials.greedy_bits(plain, greedy))
        tried += [greedy, trials.run(engine, prompt, own.new, way, chosen, law, own.new)]
    progress.add(*trials.steps(tried, read, next(record for record in progress.records
                                                 if record["name"] == "machine")["copy_bandwidth"]))
    progress.add(first, second, off, second | {"name": f"on, {longest}"})
    for length in lengths[:-1]:
        progress.say(f"{length:,} tokens, on and off")
        engine.release()  # or it would go on from what it holds, and there were no prefill to time
        progress.add(trials.times(engine, ids[:length], own.new, True, law) | {"name": f"on, {length}"},
                     trials.times(engine, ids[:length], own.new, False, law) | {"name": f"off, {length}"})
    engine.release()
    if engine.settings.retrieval and not own.quick:
        for way, changes in trials.other_views(engine, longest).items():
            progress.say(f"drafting: {way}")
            try:
                tried += trials.of_view(engine, changes, prompt, own.new, way, own.new, (trials.GREEDILY, law))
            except UserError as error:
                progress.add({"name": f"acceptance, {way}", "passed": None, "skipped": str(error)})
    common = {"passed": None, "prompt_len": longest, "budget": engine.resolve_budget(longest)}
    progress.add(*({**trial.record(), **common, "name": f"acceptance, {trial.way}, T {trial.temperature:g}"}
                   for trial in tried if trial.plan.gamma))
    here = ways.Machine(device, memory.available(device), memory.available(torch.device("cpu")),
                        torch.cuda.device_count() if device.type == "cuda" else 1)
    here = replace(here, memory=None if here.memory is None else here.memory + _held(engine))
    progress.add(advise(progress.records, tried, engine, _job(args, longest), here))


def _held(engine: Engine) -> int:
    """Bytes of the weights that are loaded, which a plan counts once more."""
    models = [model for model in (engine.target, engine.draft) if model is not None]
    return sum(model.weight_bytes for model in models)


def read(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Flags of this command, and those of `triforce` beside them."""
    own, rest = parser().parse_known_args(argv)
    args = cli.parse(rest)
    other = request.first_given(args, *OTHERS)
    if other is not None:
        raise UserError(f"triforce check asks its own questions; drop {other}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        raise UserError(f"torchrun started {ranks} processes, and this check runs in one; start it without torchrun")
    if own.far is not None and own.far != 0:
        whole(0, 8192)("--far", own.far)
    whole(8, NEW)("--new", own.new)
    args.max_new_tokens = own.new
    return own, args


def main(argv: list[str]) -> int:
    own, args = read(argv)
    folder = resolve(args.checkpoint)
    Settings(**request.given(args, Settings))
    Sampling(**request.given(args, Sampling)).columns(1)
    device = Placement(**request.given(args, Placement)).resolve().device
    use_one_stream(device)  # for transformers, too: or else what is timed later is slower than users have it
    config, draft = read_config(folder), find_draft(args.checkpoint, getattr(args, "draft", None))
    longest = getattr(args, "max_seq_len", None) or config.max_len
    if own.far is not None and own.far > config.max_len:
        raise UserError(f"--far ({own.far}) exceeds the {config.max_len} that the model can attend over; use at most "
                        f"{config.max_len}")
    if own.reference is not None:
        resolve(own.reference)
    out = Path(own.out)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it, or name another file")
    lengths = lengths_of(own, args, config, device, longest)
    progress = Progress()
    progress.add(machine(device), checkpoint(folder))
    if draft is not None:
        progress.add(checkpoint(draft, "draft"))
    wanted = max(lengths[-1], config.max_len if own.far is None and not own.quick else own.far or 0, agreement.TOKENS)
    ids, repeated = read_ids(Tokenizer(folder), own.prompt_file, min(wanted, config.max_len))
    progress.add({"name": "text", "passed": None, "file": own.prompt_file, "repeated": repeated,
                  "lengths": lengths, "new_tokens": own.new})
    texts = beside_transformers(own, args, folder, ids, device, progress)
    compiled = root().exists() and any(root().glob("*/complete"))
    progress.say("loading")
    begun = time.perf_counter()
    engine = load(args.checkpoint, **request.given(args, Settings, Placement))
    progress.add({"name": "load", "passed": None, "seconds": time.perf_counter() - begun, "compiled_before": compiled})
    for text in texts:
        progress.say(f"logits beside transformers': {text.name}, {len(text.ids):,} tokens")
        progress.add(agreement.compare(engine, text))
        text.logits, text.hidden = None, []
    try:
        examine(engine, own, args, ids, lengths, progress)
    except UserError as error:  # what was found before is worth a page
        progress.add({"name": "generation", "passed": False, "advice": str(error)})
    failed = [record["name"] for record in progress.records if record["passed"] is False]
    told = {"passed": not failed, "failed": failed, "seconds": time.perf_counter() - progress.begun,
            "records": progress.records}
    print(report.page(told))
    try:
        out.write_text(json.dumps(told, indent=1))
    except OSError as error:
        raise UserError(f"cannot write --out {out}: {error.strerror}; name another file") from None
    print(f"The same as JSON: {out}", file=sys.stderr)
    return 1 if failed else 0
