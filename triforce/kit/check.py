"""`triforce check`: is all well with a checkpoint on this machine? Loads it, compares it, times it.

Each finding is a record; the page is made of them, and a file of JSON has the same.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__, cli, memory, request
from ..config import Placement, Sampling, Settings, find_device, whole
from ..engine import Engine
from ..errors import UserError
from ..hf.checkpoint import open_tensors, read_config
from ..hf.folders import find_weights, resolve
from ..hf.tokenizer import Tokenizer
from ..loading import find_dtype, load
from ..model import ModelConfig
from ..plan import AUTOREGRESSION, Plan
from ..prefix import first_difference
from ..streams import use_one_stream
from . import plan

NEW = 96  # tokens of a call
GREEDY = 64  # tokens that are compared
FIRST, LAST = 2048, 64  # tokens of the first text; logits that are compared at the end of a longer one
CHUNK = 2048  # tokens that transformers computes at a time
LENGTHS = {"cpu": (512, 2048), "cuda": (4096, 32768, 122880)}  # prompts, where nobody says others
REPEATS = 0.3  # of a text that says the same again, and is easily drafted
# By how many units in the last place two right implementations may differ, times the root of the number of layers,
# since each rounds once more: of the largest logit, of a logit's mean size, of the norm of a hidden state. In half
# precision products are added up in float32 and rounded once; in float32 a thousand numbers are added in any order.
HALF, FULL = (4.0, 1.5, 6.0), (40.0, 16.0, 100.0)
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
    p.add_argument("--far", type=int, metavar="N", help="compare logits at the end of so many tokens, too; 0: do not "
                   "(default: of the longest prompt)")
    p.add_argument("--reference", metavar="FOLDER", help="of transformers, if it is not the checkpoint's own: the one "
                   "that a checkpoint was converted from")
    p.add_argument("--quick", action="store_true", help="the longest prompt alone, and no --far")
    p.add_argument("--out", metavar="FILE", default="triforce-check.json", help="of the JSON (default: "
                   "triforce-check.json)")
    return p


# -- logits beside those of transformers -------------------------------------------------------------------------------

@dataclass
class Text:
    """Tokens, and what transformers says of them."""

    name: str
    ids: list[int]
    last: int  # positions whose logits are compared
    logits: Tensor | None = None  # [last, V] float32
    hidden: list[Tensor] = field(default_factory=list)  # of the embedding and behind each layer, [S, dim]; or none


@contextlib.contextmanager
def watching(modules: Iterable[torch.nn.Module], what=lambda states: states) -> Iterator[list[list[Tensor]]]:
    """Within, keeps on the CPU what each module gives, part by part of a text. what: of [S, dim] hidden states."""
    kept, hooks = [], []
    for module in modules:
        kept.append([])
        hooks.append(module.register_forward_hook(lambda module, args, out, parts=kept[-1]: parts.append(
            what((out if isinstance(out, Tensor) else out[0])[0]).cpu().clone())))
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def fill(model, text: Text, device: torch.device) -> None:
    """What a model of transformers says of a text; its hidden states, too, if all logits are compared."""
    first, cache, logits, is_whole = len(text.ids) - text.last, None, [], text.last == len(text.ids)
    ids, inner = torch.tensor([text.ids], device=device), model.model
    with torch.inference_mode(), watching([inner.embed_tokens, *inner.layers] if is_whole else []) as parts:
        for start in range(0, len(text.ids), CHUNK):
            stretch = ids[:, start : start + CHUNK]
            wanted = max(start + stretch.shape[1] - max(start, first), 0)
            out = model(stretch, past_key_values=cache, use_cache=True, logits_to_keep=max(wanted, 1))
            cache = out.past_key_values
            if wanted:
                logits.append(out.logits[0, -wanted:].float().cpu())
    text.logits, text.hidden = torch.cat(logits), [torch.cat(of_layer) for of_layer in parts]


def ask_transformers(folder: Path, texts: list[Text], dtype: torch.dtype, device: torch.device) -> str | None:
    """Fills in the texts, one after the other. Returns why it could not, with what to do."""
    if importlib.util.find_spec("transformers") is None:
        return "pip install transformers"
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = None
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        for text in texts:
            fill(model, text, device)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"transformers cannot load {folder}: {reason}"
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        return "transformers ran out of memory; ask for a shorter --far, or 0"
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def compare(engine: Engine, text: Text, folder: Path) -> dict:
    """A record: whether all is finite, and how far logits are from those of transformers, beside what the dtype allows.
    If they differ by more: where the two part. folder: of the checkpoint."""
    target, is_whole = engine.target, text.last == len(text.ids)
    with watching([target.embedding, *target.layers], (lambda x: x) if is_whole else is_finite) as parts:
        logits = engine.logits([text.ids], last=text.last)[0].cpu()
    hidden = [torch.cat(of_layer) for of_layer in parts]
    finite = [*(map(is_finite, hidden) if is_whole else hidden), is_finite(logits)]
    told = {"name": f"logits, {text.name}", "tokens": len(text.ids)}
    if not all(bool(one.all()) for one in finite):
        why = not_finite(folder, target.dtype, finite, len(text.ids) - text.last)
        return told | {"passed": False, "finite": False, "why": why}
    if text.logits is None:
        return told | {"name": f"finite values, {text.name}", "passed": True}
    width = min(logits.shape[1], text.logits.shape[1])
    ours, theirs = logits[:, :width], text.logits[:, :width]
    apart, eps = (ours - theirs).abs(), torch.finfo(target.dtype).eps
    most, mean, in_hidden = HALF if target.dtype.itemsize == 2 else FULL
    unit = eps * target.config.n_layer**0.5
    told |= {"max_difference": float(apart.max()), "max_allowed": most * unit * float(theirs.abs().max()),
             "mean_difference": float(apart.mean()), "mean_allowed": mean * unit * float(theirs.abs().mean()),
             "same_top": float((ours.argmax(1) == theirs.argmax(1)).float().mean())}
    told["passed"] = told["max_difference"] <= told["max_allowed"] and told["mean_difference"] <= told["mean_allowed"]
    if not told["passed"]:
        over = [(a.float() - b.float()).norm(dim=1) > in_hidden * eps * max(i, 1) ** 0.5 * b.float().norm(dim=1)
                for i, (a, b) in enumerate(zip(hidden, text.hidden, strict=True))] if is_whole else []
        told["why"] = where_they_part(over, apart.amax(1), len(text.ids) - text.last)
    return told


def is_finite(x: Tensor) -> Tensor:
    """[S, N] -> [S]."""
    return x.isfinite().all(1)


def first_of(flags: list[Tensor]) -> tuple[int, int] | None:
    """(which tensor, which position) of the first that is True."""
    return next(((i, int(one.float().argmax())) for i, one in enumerate(flags) if bool(one.any())), None)


def place(index: int) -> str:
    """Of the embedding and the layers behind it."""
    return f"layer {index - 1}" if index else "the embedding"


def where_they_part(hidden: list[Tensor], logits: Tensor, offset: int) -> str:
    """hidden: [S] each, whether states are too far apart, or no such list. logits: [last], how far apart they are.
    offset: positions before the last ones."""
    if (found := first_of(hidden)) is not None:
        return (f"hidden states part first behind {place(found[0])}, at position {found[1]}: its tensors differ from "
                "those that transformers has; download or convert the checkpoint again")
    position = offset + int(logits.argmax())
    if hidden:
        return (f"hidden states agree behind every layer, and logits part most at position {position}: see model.norm, "
                "lm_head, and tie_word_embeddings of config.json")
    return (f"logits part most at position {position}. If the first text agrees, positions are counted in another way: "
            "see rope_theta and rope_scaling of config.json")


def not_finite(folder: Path, dtype: torch.dtype, finite: list[Tensor], offset: int) -> str:
    """Where the first value that is not finite comes from. finite: [S] of the embedding and behind each layer, and
    [last] of the logits, `offset` positions later."""
    index, position = first_of([~one for one in finite])
    is_last = index == len(finite) - 1
    tensors = f"model.layers.{index - 1}." if index else "model.embed_tokens."
    read = ("model.norm.", "lm_head.", "model.embed_tokens.") if is_last else tensors  # by what gave the value
    bad = [name for path in find_weights(folder) for name, tensor in open_tensors(path).items()
           if name.startswith(read) and not bool(tensor.float().isfinite().all())]
    cause = (f"{', '.join(bad)} of the checkpoint holds such values: download or convert it again" if bad else
             f"the tensors that it reads are finite, so {str(dtype).removeprefix('torch.')} overflows: try --dtype "
             "bfloat16 or float32")
    return (f"the first value that is not finite stands behind {'the output layer' if is_last else place(index)}, at "
            f"position {position + offset * is_last}; {cause}")


# -- speculation on and off --------------------------------------------------------------------------------------------

def plans(engine: Engine) -> dict[str, Plan]:
    """Those that the levels of this engine allow, by the way to draft. There is a State."""
    hierarchy, settings, gamma = engine.caches.state.hierarchy, engine.settings, min(engine.settings.block_size - 1, 7)
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


def greedy_bits(engine: Engine, ids: list[int], new: int) -> list[dict]:
    """A record for each way to draft: does it say what autoregression says?"""
    count = min(GREEDY, new)
    plain, _, _ = run(engine, ids, AUTOREGRESSION, count, new)
    records = []
    for way, chosen in plans(engine).items():
        tokens, drafted, kept = run(engine, ids, chosen, count, new)
        differ = first_difference(plain, tokens)
        records.append({"name": f"greedy, {way}", "passed": differ is None, "tokens": count, "drafted": drafted,
                        "kept": kept, "first_difference": differ, "repeats": repeated(tokens)})
        if differ is not None:
            records[-1]["why"] = (f"token {differ} differs from that without speculation, so output is not exact here: "
                                  "please report this file, and use --no-speculation until then")
    return records


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
            stats = done.stats
            told["prefill"] = max(told.get("prefill", 0.0), stats.prefill)
        told[f"{name}_ms"] = 1e3 * stats.tbt
        if name == "on":
            told |= {"tokens_a_verify": stats.block_efficiency, "acceptance": stats.acceptance_rate,
                     "peak_memory": stats.peak_memory, "repeats": repeated(done.tokens)}
    return told | {"prompt_len": len(ids), "new_tokens": new}


# -- all of it ---------------------------------------------------------------------------------------------------------

def estimate(config: ModelConfig, lengths: list[int], compared: list[int], new: int, device: torch.device,
             dtype: torch.dtype) -> float:
    """Seconds that all will take, about, from products and copies that are timed here for half a second.

    Args:
        compared: tokens of each text that transformers is asked about, too.
    """
    cuda = device.type == "cuda"
    x, weight = (torch.ones(rows, config.dim, device=device, dtype=dtype) for rows in (1024, config.ffn_dim))
    copied = torch.ones(2**26, dtype=torch.uint8, device=device)
    operation = _seconds(lambda: x @ weight.T, device) / (x.shape[0] * weight.numel())
    byte = _seconds(copied.clone, device) / (2 * copied.nbytes)
    weights, heads = config.num_parameters, config.n_layer * config.n_head * config.head_dim
    read = [(weights + length * config.kv_elements_per_token) * dtype.itemsize for length in lengths]
    # Attention and all that lies between products take as long again; on a CPU a layer's calls take a millisecond.
    prefill = 2 * operation * sum(weights * length + heads * length**2 for length in [*lengths, *compared, *compared])
    calls = 0.0 if cuda else 1e-3 * config.n_layer
    steps = sum(2 * new * (1 + cuda) * (byte * size + calls) for size in read)
    steps += 5 * GREEDY * (byte * read[-1] + calls)  # of which none is drafted, at worst
    return prefill + steps + 2e-9 * weights * dtype.itemsize + (40 if cuda else 10)  # to load both; to start


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of a call, on average."""
    function()
    begun, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begun < 0.25:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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
    records, counts = told["records"], []
    failed, passed = ([one for one in records if one["passed"] is value] for value in (False, True))
    skipped = [one["skipped"] for one in records if "skipped" in one]
    counts += [f"{len(failed)} failed"] * bool(failed) + [f"{len(passed)} passed"]
    counts += [f"{len(skipped)} skipped: {'; '.join(skipped)}"] * bool(skipped)
    tables = [
        (("logits", "tokens", "max", "allowed", "mean", "allowed", "same top", ""), [
            (one["name"].removeprefix("logits, "), f"{one['tokens']:,}", f"{one['max_difference']:.1e}",
             f"{one['max_allowed']:.1e}", f"{one['mean_difference']:.1e}", f"{one['mean_allowed']:.1e}",
             f"{one['same_top']:.1%}", "ok" if one["passed"] else "FAILED")
            for one in records if "max_difference" in one]),
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
    if own.far:
        whole(0, 8192)("--far", own.far)
    whole(8, NEW)("--new", own.new)
    if own.reference is not None:
        resolve(own.reference)
    if not Path(own.out).parent.is_dir():
        raise UserError(f"--out {own.out}: there is no folder {Path(own.out).parent}; make it, or name another file")
    args.max_new_tokens = own.new
    return own, args


def texts_of(own, config: ModelConfig, longest: int, ids: list[int]) -> list[Text]:
    """That are compared: the first tokens, and a longer text by the logits at its end."""
    first = min(FIRST, len(ids))
    far = own.far if own.far is not None else 0 if own.quick or longest <= first else longest
    texts = [Text("first text", ids[:first], first)]
    return texts + [Text("far end", ids[:far], min(LAST, far))] * bool(far)


def examine(own, args, texts: list[Text], prompts: list[list[int]], device: torch.device, say) -> Iterator[dict]:
    """Records of all that is compared and timed. transformers comes first: two models need not fit side by side.

    Args:
        prompts: to time, ascending. say: tells the user what is done.
    """
    folder, weights = resolve(own.reference or args.checkpoint), getattr(args, "weights", None)
    config = read_config(resolve(args.checkpoint), weights=weights)
    if own.reference is None and config.float8 is not None:
        skipped = "weights are in fp8, which transformers multiplies in another way; name another folder by --reference"
    else:
        say(f"transformers over {' and '.join(f'{len(text.ids):,}' for text in texts)} tokens")
        dtype = find_dtype(getattr(args, "dtype", None), config.dtype, device)
        skipped = ask_transformers(folder, texts, dtype, device)
    if skipped is not None:
        yield {"name": "logits", "passed": None, "skipped": skipped}
    say("loading")
    engine, law = load(args.checkpoint, **request.given(args, Settings, Placement)), request.given(args, Sampling)
    try:
        for text in texts:
            say(f"{text.name}, {len(text.ids):,} tokens")
            record = compare(engine, text, resolve(args.checkpoint))
            text.logits, text.hidden = None, []
            yield record
            if not record.get("finite", True):  # of which nothing else says anything
                return
        say("greedy, with and without speculation")
        yield from greedy_bits(engine, prompts[-1], own.new)
        for prompt in prompts:
            say(f"times at {len(prompt):,} tokens")
            yield timed(engine, prompt, own.new, Sampling(**law))
    except UserError as error:  # what was found before is worth a page
        yield {"name": "generation", "passed": False, "why": str(error)}


def main(argv: list[str]) -> int:
    own, args = read(argv)
    begun, folder = time.perf_counter(), resolve(args.checkpoint)
    Settings(**request.given(args, Settings))
    Sampling(**request.given(args, Sampling)).columns(1)
    device = find_device(getattr(args, "device", None))
    use_one_stream(device)  # for transformers, too: or else what is timed later is slower than users have it
    config = read_config(folder)
    if (own.far or 0) > config.max_len:
        raise UserError(f"--far ({own.far}) exceeds the {config.max_len} that the model can attend over; use at most "
                        f"{config.max_len}")
    lengths = lengths_of(own, args, getattr(args, "max_seq_len", None) or config.max_len, device)
    wanted = min(max(lengths[-1], own.far or 0, FIRST), config.max_len)
    ids, repeated = read_ids(Tokenizer(folder), own.prompt_file, wanted)
    texts = texts_of(own, config, lengths[-1], ids)

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    seconds = estimate(config, lengths, [len(text.ids) for text in texts], own.new, device,
                       find_dtype(getattr(args, "dtype", None), config.dtype, device))
    took = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    say(f"this takes about {took}, at {', '.join(f'{length:,}' for length in lengths)} tokens (--lengths, --quick)")
    records = list(examine(own, args, texts, [ids[:length] for length in lengths], device, say))
    told = {"checkpoint": str(folder), "device": str(device), "torch": torch.__version__, "triforce": __version__,
            "text": own.prompt_file, "begun_anew": repeated, "estimated_seconds": seconds,
            "seconds": time.perf_counter() - begun,
            "passed": all(record["passed"] is not False for record in records), "records": records}
    print(page(told))
    try:
        Path(own.out).write_text(json.dumps(told, indent=1))
    except OSError as error:
        raise UserError(f"cannot write --out {own.out}: {error.strerror}; name another file") from None
    print(f"The same as JSON: {own.out}", file=sys.stderr)
    return 0 if told["passed"] else 1
