"""What one round costs, step by step, and end to end, with the whole cache on one device, beside its peers.

    python benchmarks/on_chip.py --shape llama-2-7b --contexts 4096 32768 122880 --text book.txt --out results.jsonl
    python benchmarks/on_chip.py --checkpoint tiny --contexts 16384 32768            # on a CPU too
    python benchmarks/on_chip.py --plot results.jsonl

`--shape` fills a named shape by widening the embedded pair (see widen.py): the cost is the shape's, the text and the
acceptance are those of the small trained model. Prints a table for each context; each is also a line of JSON in --out.
`--peers` adds transformers on the same weights: autoregression, assisted by the same draft, and by prompt lookup.
`--sweep` adds fixed settings to compare "auto" with.
"""

import argparse
import contextlib
import gc
import json
import platform
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import mean

import torch

import triforce
from triforce.config import Placement, Settings
from triforce.decode.batch import DecodeBatch
from triforce.decode.controller import Controller
from triforce.decode.plan import DraftPlan
from triforce.engine.engine import Engine
from triforce.engine.loading import check_draft_ranks
from triforce.fp8 import fp8_copy
from triforce.model import Transformer
from triforce.parallel import subgroup

sys.path.insert(0, str(Path(__file__).parent))
from harness import (  # noqa: E402
    cap_memory,
    milliseconds,
    pyplot,
    read_prompts,
    read_rows,
    report,
    run_or_plot,
    save,
    step_times,
)
from widen import SHAPES, widen  # noqa: E402


def decode(engine: Engine, ids: list[int], args, watch=None, **how) -> dict[str, float]:
    """Generations after a warm-up of the same kind, on the same prefill: means over the seeds, and all their times.

    A text drawn from a small model may loop, and loops flatter acceptance: hence several, with their spread. watch: is
    entered for all but the warm-up.
    """
    options = {"temperature": args.temperature, "top_p": args.top_p, "ignore_eos": True, **how}
    speculate = how.get("speculate", True)
    count = args.max_new_tokens if speculate else args.plain_tokens
    warm_up = args.warm_up if speculate else min(count, 8)
    engine.generate(ids, warm_up, seed=0, **options)
    seeds = range(args.seeds if speculate else 1)
    with watch or contextlib.nullcontext():
        runs = [engine.generate(ids, count, seed=seed, **options).stats for seed in seeds]
    row = {"tbt_ms": mean(run.tbt * 1e3 for run in runs), "tbt_ms_by_seed": [round(run.tbt * 1e3, 2) for run in runs],
           "block_efficiency": mean(run.block_efficiency for run in runs),
           "rebuilds": sum(run.retrieval_rebuilds for run in runs), "peak_memory_gib": runs[-1].peak_memory / 2**30}
    names = {name for run in runs for name in run.acceptance_rate}
    rates = {name: [run.acceptance_rate.get(name, 0.0) for run in runs] for name in sorted(names)}
    return row | {f"acceptance_{name}": mean(values) for name, values in rates.items()}


class Rounds:
    """While it is entered: what the rounds that a controller plans take, what their steps take by their own times, and
    what the levels accept."""

    def __init__(self):
        self.count, self.ms, self.parts = 0, 0.0, dict.fromkeys(("verify", "retrieval", "draft"), 0.0)
        self.seen: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> "Rounds":
        self.originals = run, choose, update = DecodeBatch.round, Controller.choose, Controller.update

        def running(state, *args, **how):
            count, begun = self.count, time.perf_counter()
            emitted = run(state, *args, **how)  # waits for the device
            if self.count > count:
                self.ms += (time.perf_counter() - begun) * 1e3
            return emitted

        def choosing(controller, **known):
            plan = choose(controller, **known)
            self.add(plan, controller.costs)
            return plan

        def updating(controller, num_tokens, **observed):
            for name, (hits, tests) in observed.items():
                before = self.seen.get(name, (0, 0))
                self.seen[name] = before[0] + hits, before[1] + tests
            update(controller, num_tokens, **observed)

        DecodeBatch.round, Controller.choose, Controller.update = running, choosing, updating
        return self

    def __exit__(self, *args) -> None:
        DecodeBatch.round, Controller.choose, Controller.update = self.originals

    def add(self, plan: DraftPlan, costs) -> None:
        self.count += 1
        self.parts["verify"] += float(costs.checking(plan) @ costs.values)
        for (what, _), took in zip(costs.number, costs.drafting(plan) * costs.values, strict=True):
            self.parts["retrieval" if what == "retrieval" else "draft"] += took

    def row(self) -> dict[str, float]:
        """Of a mean round; and the chance that a level keeps a token whose predecessors it kept."""
        parts = {f"round_{name}_ms": ms / self.count for name, ms in self.parts.items()}
        parts |= {"round_ms": self.ms / self.count, "round_over_steps": self.ms / sum(self.parts.values())}
        return parts | {f"rate_{name}": hits / tests for name, (hits, tests) in self.seen.items() if tests}


def sweep_plans(state: DecodeBatch) -> list[DraftPlan]:
    """Fixed settings: looking up alone, the draft alone, the retrieval level alone, and the hierarchy."""
    most, sources, padded = state.settings.block_size - 1, state.hierarchy.sources, state.pilot.padding.drafts
    gammas = [gamma for gamma in (3, 6, 10, 15) if gamma <= most]
    plans = [DraftPlan(gamma, "ngram") for gamma in gammas]
    plans += [DraftPlan(gamma, "model") for gamma in (2, 3, 5, min(8, most))]
    plans += [DraftPlan(gamma, None, True, 0, gamma) for gamma in gammas[:3]]
    plans += [DraftPlan(gamma, "model", True, inner, -(-gamma // 2)) for gamma in gammas for inner in (1, 2, 3)]
    return [replace(plan, padded=padded) for plan in plans if plan.source is None or plan.source in sources]


def fixed(engine: Engine, plan: DraftPlan) -> None:
    """Turns the present state's controller off and sets a plan."""
    pilot = engine.buffers.state.pilot
    pilot.auto, pilot.default = False, plan


FEWEST_TOKENS = 32  # of a text: within fewer, rounds may not have shown yet what drafting takes


def load(args, group=None, **more) -> tuple[Engine, object]:
    """more: settings of a widened shape that have no flag here."""
    if args.plain_tokens < 2 or args.max_new_tokens < FEWEST_TOKENS:
        raise SystemExit(f"--plain-tokens ({args.plain_tokens}) must be at least 2, for a time per token lies between "
                         f"two, and --max-new-tokens ({args.max_new_tokens}) at least {FEWEST_TOKENS}, for with "
                         "fewer there may be no plan")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Waits for compiled steps: those compiled beside a prompt serve the next, and most benchmarks have only one prompt.
    compiled = True if device.startswith("cuda") else None
    if args.shape is None:
        engine = triforce.load(args.checkpoint, device=args.device, draft_dtype=args.draft_dtype,
                               block_size=args.block_size, chunk_size=args.chunk_size, group=group,
                               draft_ranks=args.draft_ranks, compile=compiled)
        return engine, engine.tokenizer
    tiny = triforce.load("tiny", device="cpu", compile=True)  # weights stay unpacked
    dtype = getattr(torch, getattr(args, "dtype", None) or ("bfloat16" if device.startswith("cuda") else "float32"))
    shape = SHAPES[args.shape]
    draft = widened_draft(tiny.draft, args, group, vocab_size=shape.vocab_size, device=device, dtype=dtype)
    target = widen(tiny.target, shape, positions=max(args.contexts) + 4096, device=device, dtype=dtype, group=group)
    block_size = args.block_size or 16
    settings = Settings(gamma_inner=min(4, block_size - 1), block_size=block_size, chunk_size=args.chunk_size,
                        **{"prefill_chunk_size": 8192, **more})
    drafting = fp8_copy(target) if args.draft_dtype else None
    engine = Engine(target, None, draft, drafting=drafting, settings=settings,
                    placement=Placement(draft_ranks=args.draft_ranks, compile=compiled))
    return engine, tiny.tokenizer


def widened_draft(small: Transformer, args, group, **how) -> Transformer | None:
    """The draft of a widened shape: whole, or of --draft-ranks this rank's share; None on a rank without one."""
    shape, ranks = SHAPES[args.draft_shape], args.draft_ranks
    if ranks is None:
        return widen(small, shape, **how)
    mine = check_draft_ranks(ranks, group, shape)
    part = subgroup(group, ranks) if len(ranks) > 1 else None  # all ranks call it
    return None if mine is None else widen(small, shape, group=part, **how)


def transformers_model(target: Transformer):
    """transformers' own model over the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = target.config
    config = LlamaConfig(vocab_size=c.vocab_size, hidden_size=c.dim, intermediate_size=c.ffn_dim,
                         num_hidden_layers=c.n_layer, num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head,
                         head_dim=c.head_dim, rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta,
                         max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=False,
                         torch_dtype=target.dtype, bos_token_id=None, eos_token_id=None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    own = {"model.embed_tokens.weight": target.embedding.weight, "model.norm.weight": target.norm.weight,
           "lm_head.weight": target.output.weight}
    for i, layer in enumerate(target.layers):  # the same memory, cut where transformers has separate matrices
        sizes = [c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim]
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        parts = dict(zip(names, layer.attention.qkv.weight.split(sizes), strict=True))
        parts |= dict(zip(["mlp.gate_proj", "mlp.up_proj"], layer.mlp.gate_up.weight.chunk(2), strict=True))
        parts |= {"self_attn.o_proj": layer.attention.out.weight, "mlp.down_proj": layer.mlp.down.weight,
                  "input_layernorm": layer.attention_norm.weight, "post_attention_layernorm": layer.mlp_norm.weight}
        own |= {f"model.layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    model.load_state_dict(own, assign=True)
    with torch.device(target.device):  # its buffers are no parameters, and are still on no device
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def transformers_times(model, assistant, ids: list[int], args) -> dict[str, float]:
    """Milliseconds per token of a model of transformers, with sdpa attention and its own cache: by itself, with an
    assistant, if there is one, and with prompt lookup. From the first token on, prefill not counted."""
    from transformers import StoppingCriteria

    class Clock(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, tokens, scores, **more):
            if tokens.is_cuda:  # or the first token's time would lack a prefill that still runs
                torch.cuda.synchronize()
            self.seen.append((time.perf_counter(), tokens.shape[1]))
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    row, prompt = {}, torch.tensor([ids], device=model.device)
    ways = {"": {}, "_lookup": {"prompt_lookup_num_tokens": 10}}
    if assistant is not None:
        ways["_assisted"] = {"assistant_model": assistant}
    for name, how in ways.items():
        if not name:
            model.generate(prompt, max_new_tokens=2, pad_token_id=0)  # kernels are loaded, memory is taken
        torch.manual_seed(0)
        clock, begun = Clock(), time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.peer_tokens, do_sample=True,
                       temperature=args.temperature, top_p=args.top_p, top_k=0, pad_token_id=0,
                       stopping_criteria=[clock], **how)
        (first, start), (last, stop) = clock.seen[0], clock.seen[-1]
        if not name:
            row["transformers_prefill_s"] = first - begun
        row[f"transformers{name}_tbt_ms"] = (last - first) / (stop - start) * 1e3
        gc.collect()
        torch.cuda.empty_cache()  # what transformers left
    return row


def measure_context(engine: Engine, ids: list[int], args) -> dict[str, float]:
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": None, "min_p": None, "seed": [0]}
    cuda = engine.device.type == "cuda"
    longest = max(args.warm_up, args.max_new_tokens) + 16
    row: dict[str, float] = {"context": len(ids)}
    engine.release()
    begun = time.perf_counter()
    stats = engine.generate(ids, 8, **{**sampling, "seed": 0}, ignore_eos=True).stats
    row["first_call_s"] = time.perf_counter() - begun  # prefill, compiling and recording included
    row["ttft_s"] = stats.ttft
    engine.buffers.state.reset()  # prefills anew
    begun = time.perf_counter()
    state = engine.prepare([ids], longest, **sampling)
    if cuda:
        torch.cuda.synchronize()
    row["prefill_s"] = time.perf_counter() - begun
    row["budget"] = state.budget
    row |= step_times(state)
    if state.hierarchy.view is not None:
        row["rebuild_ms"] = milliseconds(lambda: state.hierarchy.view.choose(0), engine.device, repeats=5, warm_up=2,
                                         group=engine.target.group)
    rounds = Rounds()
    row |= decode(engine, ids, args, rounds)
    row |= rounds.row()
    row["plan"] = str(state.pilot.controller.plan)  # the last one
    plain = decode(engine, ids, args, speculate=False, one_row=True)
    row["autoregression_tbt_ms"] = plain["tbt_ms"]
    row["speedup"] = plain["tbt_ms"] / row["tbt_ms"]
    if args.sweep:
        row["sweep"] = []
        print(f"    {row['tbt_ms']:8.2f} ms  auto", flush=True)
        for plan in sweep_plans(state):
            fixed(engine, plan)
            row["sweep"].append({"plan": str(plan), **decode(engine, ids, args)})
            print(f"    {row['sweep'][-1]['tbt_ms']:8.2f} ms  {plan}", flush=True)
        best = min(row["sweep"], key=lambda one: one["tbt_ms"])
        row["best_fixed"] = best["plan"]
        row["best_fixed_tbt_ms"] = best["tbt_ms"]
    if args.peers:
        state = None  # 64 GB of K/V at 7B
        engine.release()
        draft = None if engine.draft is None else transformers_model(engine.draft)
        row |= transformers_times(transformers_model(engine.target), draft, ids, args)
    return row


def plot(path: str) -> None:
    """From a file of JSON lines: time per token against context, the steps, a mean round, and what a budget gives."""
    plt, rows = pyplot(), read_rows(path)
    rows.sort(key=lambda row: (row["shape"] or row["checkpoint"], row["context"], row["budget"]))
    groups: dict[str, list[dict]] = {}
    for row in rows:
        name = row["shape"] or row["checkpoint"]
        groups.setdefault(name + (", fp8 drafting" if row["draft_dtype"] else ""), []).append(row)
    figure, axes = plt.subplots(2, 2, figsize=(12, 9))
    against_context(axes[0, 0], groups)
    slanted = {"fontsize": 6, "rotation": 30, "ha": "right"}
    labels = [f"{row['shape'] or row['checkpoint']}, {row['context']:,}, budget {row['budget']:,}"
              f"{', fp8' if row['draft_dtype'] else ''}, chunks of {row['chunk_size']}" for row in rows]
    steps = {"full verify": ("verify_ms",), "retrieval step": ("retrieval_ms",), "rebuild": ("rebuild_ms",),
             "draft step, of two": ("draft_first_ms", "draft_next_ms")}
    for i, (label, keys) in enumerate(steps.items()):
        times = [mean(row.get(key, 0.0) for key in keys) for row in rows]
        axes[0, 1].bar([x + i * 0.2 for x in range(len(rows))], times, 0.2, label=label)
    axes[0, 1].set_xticks([x + 0.3 for x in range(len(rows))], labels, **slanted)
    axes[0, 1].set(ylabel="ms a step (logarithmic)", yscale="log", ylim=(0.1, None))
    timed = [i for i, row in enumerate(rows) if "round_verify_ms" in row]
    below = [0.0] * len(timed)
    for key, label in (("verify", "its verify"), ("retrieval", "its retrieval steps"), ("draft", "its draft steps")):
        parts = [rows[i][f"round_{key}_ms"] for i in timed]
        axes[1, 0].bar(range(len(timed)), parts, 0.6, bottom=below, label=label)
        below = [a + b for a, b in zip(below, parts, strict=True)]
    axes[1, 0].plot(range(len(timed)), [rows[i]["round_ms"] for i in timed], "k_", ms=22, label="as it took")
    axes[1, 0].set_xticks(range(len(timed)), [labels[i] for i in timed], **slanted)
    axes[1, 0].set(ylabel="ms a round: its steps by their own times")
    against_budget(axes[1, 1], groups)
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
        else:
            axis.set_visible(False)
    save(figure, path, rows)


def against_context(axis, groups: dict[str, list[dict]]) -> None:
    """With the best of the budgets that were tried."""
    drawn = set()
    for name, rows in groups.items():
        best = {row["context"]: row for row in sorted(rows, key=lambda row: row["speedup"])}
        group = [best[context] for context in sorted(best)]
        xs, model = [row["context"] / 1000 for row in group], name.removesuffix(", fp8 drafting")
        axis.plot(xs, [row["tbt_ms"] for row in group], "o-", label=f"{name}: speculation")
        if model not in drawn:
            drawn.add(model)
            axis.plot(xs, [row["autoregression_tbt_ms"] for row in group], "s--", label=f"{model}: autoregression")
            timed = [row for row in group if "transformers_tbt_ms" in row]
            theirs = [(row["context"] / 1000, row["transformers_tbt_ms"]) for row in timed]
            if theirs:
                axis.plot(*zip(*theirs, strict=True), "^:", label=f"{model}: transformers")
    axis.set(xlabel="context, thousand tokens", ylabel="ms per token", ylim=(0, None))


def against_budget(axis, groups: dict[str, list[dict]]) -> None:
    """Speed-up, and how often the full cache keeps what a view of it drafted."""
    for name, group in groups.items():
        for context in sorted({row["context"] for row in group}):
            own = [row for row in group if row["context"] == context and "rate_retrieval" in row]
            budgets = [row["budget"] for row in own]
            if len(set(budgets)) < 2:
                continue
            line = axis.plot(budgets, [row["speedup"] for row in own], "o-", label=f"{name}, {context:,}: speed-up")[0]
            axis.plot(budgets, [row["rate_retrieval"] for row in own], "s--", color=line.get_color(),
                      label=f"{name}, {context:,}: kept of what is drafted")
    axis.set(xlabel="budget, tokens", ylabel="speed-up, and a share", ylim=(0, None))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny")
    p.add_argument("--shape", choices=sorted(SHAPES))
    p.add_argument("--draft-shape", choices=sorted(SHAPES), default="llama-68m", help="of the draft, with --shape")
    p.add_argument("--draft-ranks", type=int, nargs="+", help="under torchrun: those that hold the draft, 0 and others")
    p.add_argument("--device")
    p.add_argument("--contexts", type=int, nargs="+", default=[16384])
    p.add_argument("--budgets", type=int, nargs="+",
                   help="default: 1/32 of the context, 1,024 to 4,096; batch.py: 512")
    p.add_argument("--text", help="a file to continue; default: CPython's language reference")
    p.add_argument("--quote", type=int, default=0, help="end the prompt with so many tokens of its middle: recall")
    p.add_argument("--block-size", type=int, help="default: 16 for a shape (batch.py: 4), else as load chooses")
    p.add_argument("--chunk-size", type=int, default=8)
    p.add_argument("--draft-dtype", choices=["fp8"])
    p.add_argument("--temperature", type=float, default=0.6)
    p.add_argument("--top-p", type=float, default=0.9)
    p.add_argument("--seeds", type=int, default=4, help="generations per figure")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--plain-tokens", type=int, default=64, help="tokens of the autoregressive run")
    p.add_argument("--warm-up", type=int, default=160, help="tokens before anything is timed; batch.py: rounds")
    p.add_argument("--sweep", action="store_true", help="fixed settings beside auto")
    p.add_argument("--peers", action="store_true", help="transformers on the same model")
    p.add_argument("--peer-tokens", type=int, default=24, help="tokens of each of transformers' runs")
    p.add_argument("--memory-cap", type=float, help="GiB of GPU memory that this process may allocate")
    p.add_argument("--out", help="append JSON lines to this file")
    p.add_argument("--plot", help="draw such a file and do nothing else")
    return p


def about(engine: Engine, args) -> dict[str, object]:
    """What ran a row."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"date": str(date.today()), "device": name, "torch": torch.__version__, "shape": args.shape,
            "checkpoint": None if args.shape else args.checkpoint, "widened": args.shape is not None,
            "draft_shape": args.draft_shape if args.shape else None, "draft_ranks": args.draft_ranks,
            "dtype": str(engine.target.dtype).removeprefix("torch."), "draft_dtype": args.draft_dtype,
            "block_size": engine.settings.block_size, "chunk_size": engine.settings.chunk_size,
            "temperature": args.temperature, "top_p": args.top_p, "quote": args.quote, "seeds": args.seeds,
            "text": Path(args.text).name if args.text else "CPython's language reference",
            "prefill_chunk_size": engine.settings.prefill_chunk_size, "memory_cap_gib": args.memory_cap}


def run(args) -> None:
    cap_memory(args.memory_cap)
    begun = time.perf_counter()
    engine, tokenizer = load(args)
    if args.peers and engine.target.output.weight is None:
        raise SystemExit("--peers shares the weights with transformers, and on a CPU they are packed; take a GPU")
    prompts = read_prompts(tokenizer, args)
    machine = {**about(engine, args), "load_s": time.perf_counter() - begun}
    rows = []
    model = f"{args.shape} (widened)" if args.shape else args.checkpoint
    for ids in prompts:
        for budget in args.budgets or [None]:
            engine.buffers.settings = replace(engine.settings, budget=budget)
            rows.append(measure_context(engine, ids, args))
            title = f"{model}, {len(ids):,} tokens, {machine['device']}, torch {torch.__version__}"
            report(title, rows[-1], machine, args.out)
    print(json.dumps({**machine, "rows": rows}))


def main() -> None:
    run_or_plot(run, plot, parser().parse_args())


if __name__ == "__main__":
    main()
