"""`triforce check`: is all well with a checkpoint on this machine? Loads it, compares it, times it.

Each finding is a record. The page is made of them, and --json prints them.
"""

import gc
import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..config import Placement, Sampling, Settings, find_device
from ..decode.plan import AUTOREGRESSION, DraftPlan
from ..engine.engine import Engine
from ..engine.finite import explain
from ..engine.loading import find_dtype, load
from ..engine.prompt_cache import first_difference
from ..errors import UserError
from ..hf.checkpoint import read_config
from ..hf.folders import resolve
from ..hf.tokenizer import Tokenizer
from ..render import say
from ..runtime.streams import use_one_stream
from . import plan, request
from .main import COUNT, FILE, SWITCH, parse, parse_both

GREEDY = 64  # tokens that are compared
LAST = 2048  # positions whose logits are compared; tokens that transformers computes at a time
LENGTHS = {"cpu": (512, 2048), "cuda": (4096, 32768, 122880)}  # prompts, where nobody says others
RATES = {"cpu": 4e10 * torch.get_num_threads(), "cuda": 1e14}  # operations a second, about
# Units in the last place by which two right implementations may differ, times the root of the number of layers, since
# each layer rounds once more: units of the largest logit, and of a logit's mean size. Half precision adds products in
# float32 and rounds once. In float32 a thousand numbers are added in any order.
HALF, FULL = (4.0, 1.5), (40.0, 16.0)
FLAGS = (
    ("prompt-file", FILE, "the text to continue, repeated where it is too short (default: CPython's reference)"),
    ("lengths", {**COUNT, "nargs": "+"}, "prompt lengths to time (default: 512 and 2,048; on a GPU up to 122,880)"),
    ("new", {**COUNT, "default": 96}, "tokens of a timed call (default 96)"),
    ("far", {"type": int}, f"tokens whose last {LAST:,} logits are compared; 0: none (default: the longest prompt)"),
    ("reference", {"metavar": "FOLDER"}, "what transformers loads: the folder that a checkpoint was converted from"),
    ("json", SWITCH, "print one JSON object instead of Markdown"))


# -- logits beside those of transformers -------------------------------------------------------------------------------

def ask_transformers(folder: Path, tokens: list[int], dtype: torch.dtype, device: torch.device) -> Tensor | str:
    """The logits of transformers after the last tokens, [LAST, V] float32 on the CPU; or an error, with what to do."""
    cache, first = None, (len(tokens) - 1) % LAST + 1  # so that the last stretch is a whole one
    try:
        from transformers import AutoModelForCausalLM

        way = "eager" if read_config(folder).sinks else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=way).to(device).eval()
        with torch.inference_mode():
            for start in range(first - LAST, len(tokens), LAST):
                ids = torch.tensor([tokens[max(start, 0) : start + LAST]], device=device)
                out = model(ids, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            return out.logits[0].float().cpu()
    except Exception as error:  # whatever it is, the checks that need no transformers go on
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"transformers failed: {told}; pip install transformers, or ask for a shorter --far"
    finally:
        model = cache = out = None
        gc.collect()
        torch.cuda.empty_cache()


def compare(engine: Engine, tokens: list[int], theirs: Tensor | str) -> dict:
    """A record: which part is not finite, or how far the last logits are from those of transformers, and how far the
    dtype allows. theirs: as `ask_transformers` gives them."""
    target, told, last = engine.target, {"name": "logits", "tokens": len(tokens)}, min(LAST, len(tokens))
    ours = engine.logits([tokens], last=last)[0].cpu()
    if not bool(ours.isfinite().all()):
        return {**told, "name": "finite values", "passed": False, "why": str(explain(target, len(tokens)))}
    if isinstance(theirs, str):
        return {**told, "passed": None, "why": theirs}
    width = min(ours.shape[1], theirs.shape[1])
    ours, theirs = ours[:, :width], theirs[:, :width]
    apart = (ours - theirs).abs()
    most, mean = HALF if target.dtype.itemsize == 2 else FULL
    unit = torch.finfo(target.dtype).eps * target.config.n_layer**0.5
    told |= {"max_difference": float(apart.max()), "max_allowed": most * unit * float(theirs.abs().max()),
             "mean_difference": float(apart.mean()), "mean_allowed": mean * unit * float(theirs.abs().mean()),
             "same_top": float((ours.argmax(1) == theirs.argmax(1)).float().mean())}
    told["says"] = ("at most {max_difference:.1e} of {max_allowed:.1e} apart, on average {mean_difference:.1e} of "
                    "{mean_allowed:.1e}; same top {same_top:.1%}").format(**told)
    told["passed"] = told["max_difference"] <= told["max_allowed"] and told["mean_difference"] <= told["mean_allowed"]
    if not told["passed"]:
        position = len(tokens) - last + int((apart.amax(1) > told["max_allowed"]).float().argmax())
        told["why"] = (f"logits part from those of transformers at position {position}; download or convert the "
                       "checkpoint again. If a short --far passes, see rope_theta and rope_scaling of config.json")
    return told


# -- speculation on and off --------------------------------------------------------------------------------------------

def plans(engine: Engine) -> dict[str, DraftPlan]:
    """The plans that this engine's levels allow, by the way to draft. A DecodeBatch must exist."""
    hierarchy, settings, gamma = engine.buffers.state.hierarchy, engine.settings, min(engine.settings.block_size - 1, 7)
    ways = {"draft + view": DraftPlan(gamma, "model", True, min(settings.gamma_inner, 2), -(-gamma // 2)),
            "draft model": DraftPlan(gamma, "model"),
            f"{settings.draft_cache} view": DraftPlan(gamma, None, True, 0, gamma),
            "n-grams": DraftPlan(gamma, "ngram")}
    sources, view = {None, *hierarchy.sources}, "retrieval" in hierarchy.drafters
    return {way: one for way, one in ways.items() if gamma and one.source in sources and (view or not one.retrieval)}


def greedy_bits(engine: Engine, ids: list[int]) -> Iterator[dict]:
    """A record for each way to draft: are its tokens those of autoregression?"""
    plain, _ = greedy(engine, ids, AUTOREGRESSION)
    for way, chosen in plans(engine).items():
        tokens, rows = greedy(engine, ids, chosen)
        drafted, kept = sum(row.num_drafted for row in rows), sum(row.num_accepted for row in rows)
        told = {"name": f"greedy, {way}", "passed": tokens == plain, "drafted": drafted, "kept": kept,
                "says": f"{GREEDY} tokens, {kept} of {drafted} drafted ones kept"}
        if tokens != plain:
            at = first_difference(plain, tokens)
            told["why"] = f"token {at} is DIFFERENT without speculation: please report this, and use --no-speculation"
        yield told


def greedy(engine: Engine, ids: list[int], plan: DraftPlan) -> tuple[list[int], list]:
    """Tokens of rounds that follow a plan, and what the rounds say of themselves."""
    with engine.working():
        state = engine.prepare([ids], GREEDY, plan=plan, temperature=0.0, seed=[0])
        tokens, rows = [], []
        while len(tokens) < GREEDY:
            tokens += state.round()[0]
            rows.append(state.last_round.rows[0])
    return tokens[:GREEDY], rows


def timed(engine: Engine, ids: list[int], new: int, sampling: Sampling) -> dict:
    """A record of calls as a user makes them. On a GPU the second one counts: the first records its steps."""
    engine.release()  # else it goes on from what it holds, without a prefill to time
    drawn, turns = vars(replace(sampling, seed=sampling.seed or 0)), 2 if engine.device.type == "cuda" else 1
    on, off = ([engine.generate(ids, new, ignore_eos=True, **drawn, **how).stats for _ in range(turns)]
               for how in ({}, {"speculate": False, "one_row": True}))
    prefill, on, off = on[0].prefill, on[-1], off[-1]
    return {"name": f"times, {len(ids):,}", "passed": None, "new_tokens": new, "prefill": prefill,
            "on_ms": 1e3 * on.tbt, "off_ms": 1e3 * off.tbt, "tokens_a_verify": on.block_efficiency,
            "acceptance": on.acceptance_rate, "peak_memory": on.peak_memory,
            "says": f"prefill {prefill:.2f} s; a token {1e3 * off.tbt:.2f} ms, with speculation {1e3 * on.tbt:.2f}: "
                    f"{off.tbt / (on.tbt or math.nan):.2f}x; {on.block_efficiency:.2f} tokens a verify"}


# -- all of it ---------------------------------------------------------------------------------------------------------

def lengths_of(own, args, longest: int, device: torch.device) -> list[int]:
    """Prompt lengths, ascending. Settings that do not fit each other are found here."""
    most = longest - own.new
    lengths = sorted(own.lengths or [length for length in LENGTHS[device.type] if length <= most] or [most])
    if most < 1 or lengths[-1] > most:
        raise UserError(f"--lengths {lengths[-1]} and {own.new} new tokens exceed the {longest} that fit; use {most}")
    job, here = plan.job_of(args), plan.machine_of(str(device))
    fitting = [length for length in lengths if plan.need(replace(job, prompt_len=length), here)["fits"]
               and 10 * job.target.num_parameters * length <= 180 * RATES[device.type]]  # seconds, about
    return lengths if own.lengths else fitting or lengths[:1]


def page(told: dict) -> str:
    """told: what --json prints."""
    verdicts = {True: "ok", False: "FAILED", None: "-"}
    lines = [f"- {one['name']}: {verdicts[one['passed']]}. {one.get('says', '')} {one.get('why', '')}".rstrip()
             for one in told["records"]]
    if told["begun_anew"]:
        lines.append(f"- the text begins anew {told['begun_anew']} times, so it is easily drafted; give a longer one")
    verdict = f"**{'All is well' if told['passed'] else 'NOT all is well'}**, in {told['seconds']:.0f} s."
    return "\n".join([f"# triforce check: {told['checkpoint']}", "", *lines, "", verdict])


def examine(own, args, far: list[int], prompts: list[list[int]], device: torch.device) -> Iterator[dict]:
    """Records of all that is compared and timed. transformers comes first: two models need not fit side by side.

    Args:
        far: tokens whose last logits are compared. prompts: to time, ascending.
    """
    config, theirs = read_config(resolve(args.checkpoint), weights=getattr(args, "weights", None)), "left out (--far 0)"
    if own.reference is None and config.float8 is not None:
        theirs = "transformers multiplies in fp8 in another way; name a folder of wide weights by --reference"
    elif far:
        say(f"logits of {len(far):,} tokens, by transformers and here")
        dtype = find_dtype(getattr(args, "dtype", None), config.dtype, device)
        theirs = ask_transformers(resolve(own.reference or args.checkpoint), far, dtype, device)
    engine = load(args.checkpoint, **request.given(args, Settings, Placement))
    try:
        yield (record := compare(engine, far or prompts[-1], theirs))
        if record["name"] == "finite values":  # no other check means anything then
            return
        say("greedy, with and without speculation")
        yield from greedy_bits(engine, prompts[-1])
        for prompt in prompts:
            say(f"times at {len(prompt):,} tokens")
            yield timed(engine, prompt, own.new, Sampling(**request.given(args, Sampling)))
    except UserError as error:  # what was found before is worth a page
        yield {"name": "generation", "passed": False, "why": str(error)}


def read(argv: list[str]) -> tuple[Namespace, Namespace]:
    """Flags of this command, and those of `triforce` beside them."""
    own, args = parse_both(
        argv, FLAGS, "check", "Is all well with a checkpoint on this machine? Compares logits with transformers, and "
        "greedy output with and without speculation; times both.", "triforce check --checkpoint FOLDER --lengths 512")
    usual = vars(parse([]))  # flags that are no options: but for the checkpoint they have no meaning here
    if other := next((name for name in usual if name != "checkpoint" and getattr(args, name) != usual[name]), None):
        raise UserError(f"triforce check asks its own questions; drop --{other.replace('_', '-')}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("triforce check asks its own questions, in one process; drop torchrun")
    if own.new < 2:
        raise UserError(f"--new ({own.new}) must be at least 2: the time a token is that of those after the first")
    args.max_new_tokens, args.prompt_len = own.new, None
    Sampling(**request.given(args, Sampling)).rows(1)
    resolve(own.reference or args.checkpoint)
    return own, args


def main(argv: list[str]) -> int:
    own, args = read(argv)
    begun, folder, device = time.perf_counter(), resolve(args.checkpoint), find_device(getattr(args, "device", None))
    use_one_stream(device)  # for transformers, too: else later times are slower than a user's
    config = read_config(folder)
    longest = getattr(args, "max_seq_len", None) or config.max_len
    lengths = lengths_of(own, args, longest, device)
    far = lengths[-1] if own.far is None else own.far
    if not 0 <= far <= longest:
        raise UserError(f"--far ({far}) must lie between 0 and the {longest} that the model can attend over")
    text = request.read_file("--prompt-file", own.prompt_file) if own.prompt_file else request.default_document()
    if not text.strip():
        raise UserError(f"--prompt-file {own.prompt_file} holds no text; name another file")
    ids = Tokenizer(folder).encode(text[: 16 * max(far, *lengths)])  # no tokenizer makes longer tokens on average
    begun_anew = -(-max(far, *lengths) // len(ids)) - 1
    ids *= begun_anew + 1
    minutes = math.ceil(2 * config.num_parameters * (2 * far + lengths[-1] + sum(lengths)) / RATES[device.type] / 60)
    say(f"at {', '.join(map('{:,}'.format, lengths))} tokens, some {minutes} min; less with --lengths")
    records = list(examine(own, args, ids[:far], [ids[:length] for length in lengths], device))
    told = {"checkpoint": str(folder), "device": str(device), "torch": torch.__version__, "triforce": __version__,
            "text": own.prompt_file, "begun_anew": begun_anew, "seconds": time.perf_counter() - begun,
            "passed": all(record["passed"] is not False for record in records), "records": records}
    print(json.dumps(told) if own.json else page(told))
    return 0 if told["passed"] else 1
