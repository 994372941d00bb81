"""`triforce check`: is all well with a checkpoint on this machine? Loads it, compares it, times it.

Each finding is a record; the page is made of them, and a file of JSON has the same.
"""

import argparse
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__, cli, memory, request
from ..config import Placement, Sampling, Settings, find_device, whole
from ..engine import Engine
from ..errors import UserError
from ..hf.checkpoint import read_config
from ..hf.folders import resolve
from ..hf.tokenizer import Tokenizer
from ..loading import find_dtype, load
from ..model import ModelConfig
from ..plan import AUTOREGRESSION, Plan
from ..prefix import first_difference
from ..streams import use_one_stream
from . import plan

NEW = 96  # tokens of a call
GREEDY = 64  # tokens that are compared
LAST = 2048  # positions whose logits are compared; tokens that transformers computes at a time
LENGTHS = {"cpu": (512, 2048), "cuda": (4096, 32768, 122880)}  # prompts, where nobody says others
REPEATS = 0.3  # of a text that says the same again, and is easily drafted
# By how many units in the last place two right implementations may differ, times the root of the number of layers,
# since each rounds once more: of the largest logit, and of a logit's mean size. In half precision products are added
# up in float32 and rounded once; in float32 a thousand numbers are added in any order.
HALF, FULL = (4.0, 1.5), (40.0, 16.0)
# Flags of `triforce` that have no meaning here.
OTHERS = ("prompt", "prompts", "question", "questions", "num_samples", "interactive", "system", "prefix", "save_prefix",
          "compare", "show_levels")


def parser() -> cli.Parser:
    p = cli.Parser(
        prog="triforce check", allow_abbrev=False, formatter_class=cli.Paragraphs,
        description="Is all well with a checkpoint on this machine? Compares its logits with those of transformers, "
                    "and greedy output with and without speculation; times both. Exit status: 0; 1 if a check failed; "
                    "2 for a mistake in the command.",
        epilog="Flags of `triforce` that load a model are known here, too: --checkpoint, --draft, --device, --dtype, "
               "--budget, --offload, ...; and --temperature, --top-p, ... of what is timed.\n\n"
               "    triforce check --checkpoint JackFram/llama-68m --lengths 512 1500")
    p.add_argument("--prompt-file", metavar="FILE", help="the text to continue (default: CPython's language "
                   "reference); it is repeated where it is too short")
    p.add_argument("--lengths", type=int, nargs="+", metavar="N", help="prompt lengths to time (default: 512 and "
                   "2,048; on a GPU 4,096, 32,768 and 122,880, as far as they fit)")
    p.add_argument("--new", type=int, metavar="N", default=NEW, help=f"tokens of a timed call (default {NEW})")
    p.add_argument("--far", type=int, metavar="N", help=f"compare the last {LAST:,} logits of so many tokens; 0: none "
                   "(default: of the longest prompt)")
    p.add_argument("--reference", metavar="FOLDER", help="of transformers, if it is not the checkpoint's own: the one "
                   "that a checkpoint was converted from")
    p.add_argument("--quick", action="store_true", help=f"time the longest prompt alone, and compare {LAST:,} tokens")
    p.add_argument("--out", metavar="FILE", default="triforce-check.json", help="of the JSON (default: "
                   "triforce-check.json)")
    return p


# -- logits beside those of transformers -------------------------------------------------------------------------------

def ask_transformers(folder: Path, tokens: list[int], dtype: torch.dtype, device: torch.device) -> Tensor | str:
    """Its logits after the last tokens, [LAST, V] float32 on the CPU; or why there are none, with what to do."""
    if importlib.util.find_spec("transformers") is None:
        return "pip install transformers"
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ids, first, model, cache, logits = torch.tensor([tokens]), len(tokens) - LAST, None, None, []
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        with torch.inference_mode():
            for start in range(0, len(tokens), LAST):
                stretch = ids[:, start : start + LAST].to(device)
                wanted = start + stretch.shape[1] - max(start, first)
                out = model(stretch, past_key_values=cache, use_cache=True, logits_to_keep=max(wanted, 1))
                cache = out.past_key_values
                if wanted > 0:
                    logits.append(out.logits[0].float().cpu())
    except (OSError, ValueError, ImportError, KeyError) as error:
        return f"transformers cannot load {folder}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        return f"transformers ran out of memory at {len(tokens):,} tokens; ask for a shorter --far"
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return torch.cat(logits)


def compare(engine: Engine, tokens: list[int], theirs: Tensor | None) -> dict:
    """A record: whether all is finite, and how far the last logits are from those of transformers, beside what the
    dtype allows."""
    target, told, last = engine.target, {"name": "logits", "tokens": len(tokens)}, min(LAST, len(tokens))
    logits = engine.logits([tokens], last=last)[0].cpu()
    if not bool(logits.isfinite().all()):
        return told | {"name": "finite values", "passed": False, "why": str(engine.explain_not_finite(tokens))}
    if theirs is None:
        return told | {"name": "finite values", "passed": True}
    width = min(logits.shape[1], theirs.shape[1])
    ours, theirs = logits[:, :width], theirs[:, :width]
    apart = (ours - theirs).abs()
    most, mean = HALF if target.dtype.itemsize == 2 else FULL
    unit = torch.finfo(target.dtype).eps * target.config.n_layer**0.5
    told |= {"max_difference": float(apart.max()), "max_allowed": most * unit * float(theirs.abs().max()),
             "mean_difference": float(apart.mean()), "mean_allowed": mean * unit * float(theirs.abs().mean()),
             "same_top": float((ours.argmax(1) == theirs.argmax(1)).float().mean())}
    told["passed"] = told["max_difference"] <= told["max_allowed"] and told["mean_difference"] <= told["mean_allowed"]
    if not told["passed"]:
        position = len(tokens) - last + int((apart.amax(1) > told["max_allowed"]).float().argmax())
        told["why"] = (f"logits part from those of transformers at position {position}; download or convert the "
                       "checkpoint again. If a short --far passes, see rope_theta and rope_scaling of config.json")
    return told


# -- speculation on and off --------------------------------------------------------------------------------------------

def plans(engine: Engine) -> dict[str, Plan]:
    """Those that the levels of this engine allow, by the way to draft. There is a State."""
    hierarchy, settings, gamma = engine.buffers.state.hierarchy, engine.settings, min(engine.settings.block_size - 1, 7)
    has_view, found = "retrieval" in hierarchy.drafters, {}
    if "model" in hierarchy.sources and has_view:
        found["draft + view"] = Plan(gamma, "model", True, min(settings.gamma_inner, 2), -(-gamma // 2))
    if "model" in hierarchy.sources:
        found["draft model"] = Plan(gamma, "model")
    if has_view:
        found[f"{settings.draft_cache} view"] = Plan(gamma, None, True, 0, gamma)
    if "ngram" in hierarchy.sources:
        found["n-grams"] = Plan(gamma, "ngram")
    return found if gamma else {}


def run(engine: Engine, ids: list[int], plan: Plan, count: int, room: int) -> tuple[list[int], int, int]:
    """Greedy rounds of one plan: (tokens, how many were drafted, how many of these kept). room: see `prepare`."""
    with engine.working():
        state = engine.prepare([ids], room, plan=plan, **vars(Sampling(temperature=0.0, seed=[0])))
    tokens, drafted, kept = [], 0, 0
    while len(tokens) < count:
        with engine.working():
            tokens += state.round()[0]
        row = state.last_round.rows[0]
        drafted, kept = drafted + row.num_drafted, kept + row.num_accepted
    return tokens[:count], drafted, kept


def greedy_bits(engine: Engine, ids: list[int], new: int) -> Iterator[dict]:
    """A record for each way to draft: does it say what autoregression says?"""
    count = min(GREEDY, new)
    plain, _, _ = run(engine, ids, AUTOREGRESSION, count, new)
    for way, chosen in plans(engine).items():
        tokens, drafted, kept = run(engine, ids, chosen, count, new)
        differ = first_difference(plain, tokens)
        why = {} if differ is None else {
            "why": f"token {differ} differs from that without speculation, so output is not exact here: please report "
                   "this file, and use --no-speculation until then"}
        yield {"name": f"greedy, {way}", "passed": differ is None, "tokens": count, "drafted": drafted, "kept": kept,
               "repeats": repeated(tokens), **why}


def repeated(tokens: list[int]) -> float:
    """Of the runs of four tokens, the share that stood before in the same text."""
    runs = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def timed(engine: Engine, ids: list[int], new: int, law: Sampling) -> dict:
    """A record of calls as a user makes them. On a GPU the second one counts: the first records its steps."""
    runs, told = 2 if engine.device.type == "cuda" else 1, {"name": f"times, {len(ids)}", "passed": None}
    engine.release()  # or it would go on from what it holds, and there were no prefill to time
    for name, how in (("on", {}), ("off", {"speculate": False, "one_row": True})):
        for _ in range(runs):
            done = engine.generate(ids, new, ignore_eos=True, **vars(replace(law, seed=law.seed or 0)), **how)
            told["prefill"] = max(told.get("prefill", 0.0), done.stats.prefill)
        told[f"{name}_ms"] = 1e3 * done.stats.tbt
        if name == "on":
            told |= {"tokens_a_verify": done.stats.block_efficiency, "acceptance": done.stats.acceptance_rate,
                     "peak_memory": done.stats.peak_memory, "repeats": repeated(done.tokens)}
    return told | {"prompt_len": len(ids), "new_tokens": new}


# -- all of it ---------------------------------------------------------------------------------------------------------

def estimate(config: ModelConfig, lengths: list[int], far: int, new: int, device: torch.device,
             dtype: torch.dtype) -> float:
    """Seconds that all will take, about, from products and copies that are timed here for half a second.

    Args:
        far: tokens that transformers computes, too.
    """
    cuda = device.type == "cuda"
    x, weight = (torch.ones(rows, config.dim, device=device, dtype=dtype) for rows in (1024, config.ffn_dim))
    copied = torch.ones(2**26, dtype=torch.uint8, device=device)
    operation = _seconds(lambda: x @ weight.T, device) / (x.shape[0] * weight.numel())
    byte = _seconds(copied.clone, device) / (2 * copied.nbytes)
    weights, heads = config.num_parameters, config.n_layer * config.n_head * config.head_dim
    # Attention and all that lies between products take as long again; on a CPU a layer's calls take a millisecond.
    prefill = 2 * operation * sum(weights * length + heads * length**2 for length in [*lengths, far, far])
    steps = [(weights + length * config.kv_elements_per_token) * dtype.itemsize * byte
             + (0.0 if cuda else 1e-3 * config.n_layer) for length in lengths]
    decoding = 2 * new * (1 + cuda) * sum(steps) + 5 * GREEDY * steps[-1]  # of which none is drafted, at worst
    return prefill + decoding + 2e-9 * weights * dtype.itemsize + (40 if cuda else 10)  # to load both; to start


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of a call, on average."""
    def call() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    begun, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begun < 0.25:
        call()
        count += 1
    return (time.perf_counter() - begun) / count


def read_ids(tokenizer: Tokenizer, path: str | None, count: int) -> tuple[list[int], int]:
    """So many tokens of the text, and how often it is begun anew."""
    text = request.default_document() if path is None else request.read_file("--prompt-file", path)
    if not text.strip():
        raise UserError(f"--prompt-file {path} holds no text; name another file")
    ids = tokenizer.encode(text[: 16 * count])  # no tokenizer makes longer tokens on average
    repeated = -(-count // len(ids)) - 1
    return (ids * (repeated + 1))[:count], repeated


def lengths_of(own, args, longest: int, device: torch.device) -> list[int]:
    """Prompt lengths, ascending. Settings that do not fit each other are found here."""
    most = longest - own.new
    for length in own.lengths or ():
        whole(1, 2048)("--lengths", length)
        if length > most:
            raise UserError(f"--lengths {length} and {own.new} new tokens exceed the {longest} that the model can "
                            f"attend over; use at most {most}")
    here = plan.Machine(device, memory.available(device), memory.available(torch.device("cpu")))

    def fits(length: int) -> bool:
        job = plan.job_of(argparse.Namespace(**{**vars(args), "prompt_len": length, "batch_size": 1}))
        return plan.need(job, here, job.placement.offload).fits

    usual = [length for length in LENGTHS[device.type] if length <= most] or [max(most, 1)]
    found = sorted(set(own.lengths or [length for length in usual if fits(length)] or usual[:1]))
    fits(found[-1])
    return found[-1:] if own.quick else found


def page(told: dict) -> str:
    """told: what is written as JSON."""
    records = told["records"]
    failed, passed = ([one for one in records if one["passed"] is value] for value in (False, True))
    skipped = [one["skipped"] for one in records if "skipped" in one]
    counts = [f"{len(failed)} failed"] * bool(failed) + [f"{len(passed)} passed"]
    counts += [f"{len(skipped)} skipped: {'; '.join(skipped)}"] * bool(skipped)
    tables = [
        (("logits of", "max", "allowed", "mean", "allowed", "same top", ""), [
            (f"{one['tokens']:,} tokens", f"{one['max_difference']:.1e}", f"{one['max_allowed']:.1e}",
             f"{one['mean_difference']:.1e}", f"{one['mean_allowed']:.1e}", f"{one['same_top']:.1%}",
             "ok" if one["passed"] else "FAILED") for one in records if "max_difference" in one]),
        (("greedy, drafts by", "tokens", "drafted", "kept", ""), [
            (one["name"].removeprefix("greedy, "), str(one["tokens"]), str(one["drafted"]), str(one["kept"]),
             "identical" if one["passed"] else "DIFFERENT") for one in records if "drafted" in one]),
        (("prompt", "prefill, s", "off, ms", "on, ms", "speed-up", "tokens a verify"), [
            (f"{one['prompt_len']:,}", f"{one['prefill']:.2f}", f"{one['off_ms']:.2f}", f"{one['on_ms']:.2f}",
             f"{one['off_ms'] / one['on_ms']:.2f}x", f"{one['tokens_a_verify']:.2f}")
            for one in records if "on_ms" in one])]
    notes = [f"**{one['name']}**: {one['why']}" for one in failed]
    if told["begun_anew"]:
        notes.append(f"the prompt begins anew {told['begun_anew']} times, so it is easily drafted; give a longer text")
    loops = max((one["repeats"] for one in records if "repeats" in one), default=0)
    if loops > REPEATS:
        notes.append(f"what the model writes here repeats itself (up to {loops:.0%} of its runs of four tokens stood "
                     "before), so drafted tokens and the speed-up say little about other texts")
    return "\n\n".join([f"# triforce check: {told['checkpoint']}",
                        f"**{', '.join(counts)}.** It took {told['seconds']:.0f} s.",
                        *(plan.table(head, rows) for head, rows in tables if rows), *[plan.items(notes)] * bool(notes)])


def examine(own, args, far: list[int], prompts: list[list[int]], device: torch.device, say) -> Iterator[dict]:
    """Records of all that is compared and timed. transformers comes first: two models need not fit side by side.

    Args:
        far: tokens whose last logits are compared. prompts: to time, ascending. say: tells the user what is done.
    """
    folder, law = resolve(args.checkpoint), Sampling(**request.given(args, Sampling))
    config = read_config(folder, weights=getattr(args, "weights", None))
    if not far:
        theirs = "drop --far 0"
    elif own.reference is None and config.float8 is not None:
        theirs = "weights are in fp8, which transformers multiplies in another way; name another folder by --reference"
    else:
        say(f"transformers over {len(far):,} tokens")
        dtype = find_dtype(getattr(args, "dtype", None), config.dtype, device)
        theirs = ask_transformers(folder if own.reference is None else resolve(own.reference), far, dtype, device)
    if isinstance(theirs, str):
        yield {"name": "logits", "passed": None, "skipped": theirs}
    say("loading")
    engine = load(args.checkpoint, **request.given(args, Settings, Placement))
    try:
        say(f"logits of {len(far or prompts[-1]):,} tokens")
        record = compare(engine, far or prompts[-1], None if isinstance(theirs, str) else theirs)
        yield record
        if record["name"] == "finite values" and not record["passed"]:  # nothing else says anything then
            return
        say("greedy, with and without speculation")
        yield from greedy_bits(engine, prompts[-1], own.new)
        for prompt in prompts:
            say(f"times at {len(prompt):,} tokens")
            yield timed(engine, prompt, own.new, law)
    except UserError as error:  # what was found before is worth a page
        yield {"name": "generation", "passed": False, "why": str(error)}


def read(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Flags of this command, and those of `triforce` beside them."""
    own, rest = parser().parse_known_args(argv)
    args = cli.parse(rest)
    other, ranks = request.first_given(args, *OTHERS), int(os.environ.get("WORLD_SIZE", 1))
    if other is not None:
        raise UserError(f"triforce check asks its own questions; drop {other}")
    if ranks > 1:
        raise UserError(f"torchrun started {ranks} processes, and this check runs in one; start it without torchrun")
    if own.far:
        whole(0, 8192)("--far", own.far)
    whole(8, NEW)("--new", own.new)
    if own.reference is not None:
        resolve(own.reference)
    if not Path(own.out).parent.is_dir():
        raise UserError(f"--out {own.out}: there is no folder {Path(own.out).parent}; make it, or name another file")
    Sampling(**request.given(args, Sampling)).columns(1)
    args.max_new_tokens = own.new
    return own, args


def main(argv: list[str]) -> int:
    own, args = read(argv)
    begun, folder, device = time.perf_counter(), resolve(args.checkpoint), find_device(getattr(args, "device", None))
    use_one_stream(device)  # for transformers, too: or else what is timed later is slower than users have it
    config = read_config(folder)
    if (own.far or 0) > config.max_len:
        raise UserError(f"--far ({own.far}) exceeds the {config.max_len} that the model can attend over; use at most "
                        f"{config.max_len}")
    lengths = lengths_of(own, args, getattr(args, "max_seq_len", None) or config.max_len, device)
    far = own.far if own.far is not None else min(lengths[-1], LAST) if own.quick else lengths[-1]
    ids, begun_anew = read_ids(Tokenizer(folder), own.prompt_file, max(lengths[-1], far))

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    dtype = find_dtype(getattr(args, "dtype", None), config.dtype, device)
    seconds = estimate(config, lengths, far, own.new, device, dtype)
    took = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    say(f"this takes about {took}, at {', '.join(f'{length:,}' for length in lengths)} tokens (--lengths, --quick)")
    records = list(examine(own, args, ids[:far], [ids[:length] for length in lengths], device, say))
    told = {"checkpoint": str(folder), "device": str(device), "dtype": str(dtype).removeprefix("torch."),
            "torch": torch.__version__, "triforce": __version__, "text": own.prompt_file, "begun_anew": begun_anew,
            "estimated_seconds": seconds, "seconds": time.perf_counter() - begun,
            "passed": all(record["passed"] is not False for record in records), "records": records}
    print(page(told))
    try:
        Path(own.out).write_text(json.dumps(told, indent=1))
    except OSError as error:
        raise UserError(f"cannot write --out {own.out}: {error.strerror}; name another file") from None
    print(f"The same as JSON: {own.out}", file=sys.stderr)
    return 0 if told["passed"] else 1
