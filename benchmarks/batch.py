"""Many long sequences at once: throughput of each way to draft, beside autoregression, against batch size and length.

    python benchmarks/batch.py --shape llama-3.1-8b --contexts 32768 --batches 1 4 8 16 --text book.txt --out rows.jsonl
    torchrun --nproc-per-node 8 benchmarks/batch.py --shape llama-3.1-8b --contexts 102400 --batches 32 ...
    torchrun --nproc-per-node 8 benchmarks/batch.py --shape llama-2-7b --contexts 16000 --batches 64 --ways draft \\
                                                    --draft-shape tinyllama-1.1b --draft-ranks 0 1 2 3 --gammas 3 ...
    python benchmarks/batch.py --plot rows.jsonl

Each row of a batch continues another stretch of the text. Throughput is that of `--rounds` rounds of all rows, from a
state that is warm, so no row waits for another to end. `--gammas` sweeps fixed plans beside the controller's. Shapes
are widened as in on_chip.py.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from triforce.decode.batch import DecodeBatch
from triforce.decode.plan import ONE_ROW, DraftPlan
from triforce.engine.engine import Engine
from triforce.parallel import from_environment

sys.path.insert(0, str(Path(__file__).parent))
import on_chip  # noqa: E402
from harness import cap_memory, milliseconds, pyplot, read_rows, read_text, report, run_or_plot, save  # noqa: E402

# Ways to draft: (draft model, level over a view of the target's cache, draft_cache)
WAYS = {"retrieval": (False, True, "retrieval"), "snapkv": (False, True, "snapkv"),
        "streaming": (False, True, "streaming"), "draft": (True, False, "streaming"),
        "hierarchy": (True, True, "retrieval"), "hierarchy over streaming": (True, True, "streaming")}

MARKERS = "ov^Dsp*h"  # one a way: their lines may lie upon each other


def bandwidth_gb_s(device: torch.device) -> float:
    """What a copy of 4 GB moves, reads and writes."""
    source = torch.empty(2**31, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    seconds = milliseconds(lambda: target.copy_(source), device, 7, 2) / 1e3
    return 2 * source.nbytes / 1e9 / seconds


def throughput(state: DecodeBatch, rounds: int, warm_up: int, limit: int,
               plan: DraftPlan | None = None) -> dict[str, float]:
    """Tokens per second of all rows, over rounds that begin warm. plan: of all of them; None: the controller's."""
    state.rewind(limit, plan, state.pilot.padding)
    for _ in range(warm_up):
        state.round()
    begun = time.perf_counter()
    tokens = sum(len(row) for _ in range(rounds) for row in state.round())  # each round waits for the device
    seconds = time.perf_counter() - begun
    return {"tokens_per_second": tokens / seconds, "tbt_ms": seconds * 1e3 * state.batch / tokens,
            "tokens_per_verify": tokens / rounds / state.batch, "rounds": rounds}


def ways_of(base: Engine, args) -> list[str]:
    """Those of args.ways that there are weights for."""
    drafts = base.draft is not None or base.placement.draft_ranks is not None  # the latter: perhaps on another rank
    return [way for way in args.ways if drafts or not WAYS[way][0]]


def engine_of(base: Engine, way: str) -> Engine:
    """The same weights, drafting in another way."""
    drafts, view, cache = WAYS[way]
    settings = replace(base.settings, retrieval=view, draft_cache=cache, ngram=False)
    placement = replace(base.placement, max_batch_size=128, draft_ranks=base.placement.draft_ranks if drafts else None)
    return Engine(base.target, None, base.draft if drafts else None, drafting=base.drafting if view else None,
                  settings=settings, placement=placement)


def measure(base: Engine, way: str, prompts: list[list[int]], budget: int, args, autoregression: bool) -> list[dict]:
    """Rows of one way at one budget: the controller's plans, each fixed gamma, and autoregression if asked for."""
    engine, (drafts, view, _) = engine_of(base, way), WAYS[way]
    engine.buffers.settings = replace(engine.settings, budget=budget or None)
    limit = (args.warm_up + args.rounds + 1) * engine.settings.block_size  # more than they can emit
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": None, "min_p": None,
                "seed": list(range(len(prompts)))}
    begun = time.perf_counter()
    state = engine.prepare(prompts, limit, **sampling)
    common = {"context": len(prompts[0]), "batch": len(prompts), "way": way, "budget": state.budget,
              "prefill_s": time.perf_counter() - begun}
    rows = []
    if autoregression:
        plain = throughput(state, args.rounds, args.warm_up, limit, ONE_ROW)
        config, weights = engine.target.config, sum(p.nbytes for p in engine.target.parameters())
        kv = 2 * sum(state.lens) * config.n_layer * config.n_kv_head * config.head_dim * engine.target.dtype.itemsize
        moved = (weights + kv) / 1e9  # by each GPU: a rank's config and parameters are its own
        rows.append({**common, "way": "autoregression", "plan": "", **plain, "moved_gb": moved,
                     "moved_gb_s": moved * plain["tokens_per_second"] / len(prompts)})
    chosen = throughput(state, args.rounds, args.warm_up, limit)
    controller = state.pilot.controller
    rates = {f"rate_{name}": rate.value for name, rate in controller.rates.items()}
    rows.append({**common, "plan": "auto", **chosen, "chosen": str(controller.plan), **rates})
    for gamma in (gamma for gamma in args.gammas if gamma < engine.settings.block_size):
        inner = min(2, gamma) if drafts and view else 0
        plan = DraftPlan(gamma, "model" if drafts else None, view, inner,
                    0 if not view else gamma if not inner else -(-gamma // 2), state.pilot.padding.drafts)
        rows.append({**common, "plan": f"gamma {gamma}", **throughput(state, args.rounds, args.warm_up, limit, plan)})
    return rows


def run(args) -> None:
    if args.sweep or args.peers:
        raise SystemExit("--sweep and --peers are on_chip.py's; --gammas and --ways say here what is compared")
    if args.quote:
        raise SystemExit(f"--quote {args.quote} ends a single prompt; a batch takes stretches of the text, drop it")
    if args.warm_up < 8:
        raise SystemExit(f"--warm-up {args.warm_up}: the first rounds time steps and record graphs; take at least 8")
    group, args.device = from_environment(args.device)
    cap_memory(args.memory_cap)
    base, tokenizer = on_chip.load(args, group, prefill_chunk_size=args.prefill_chunk_size)
    ids = tokenizer.encode(read_text(args.text))
    common = {"gpus": 1 if group is None else group.size, **on_chip.about(base, args)}
    del common["seeds"]  # each sequence has one
    if base.device.type == "cuda":
        common["bandwidth_gb_s"] = bandwidth_gb_s(base.device)
    for context in args.contexts:
        for batch in args.batches:
            step = max((len(ids) - context) // max(batch - 1, 1), 0)
            if not step and batch > 1:
                raise SystemExit(f"the text has {len(ids):,} tokens; {batch} stretches of {context:,} need more")
            prompts = [ids[i * step : i * step + context] for i in range(batch)]
            ways = ways_of(base, args)
            for way in ways:
                budgets = (args.budgets or [512]) if engine_of(base, way).settings.retrieval else [0]
                for budget in budgets:
                    rows = measure(base, way, prompts, budget, args, (way, budget) == (ways[0], budgets[0]))
                    base.release()  # what the engine of this way left
                    for row in rows:
                        title = f"{row['way']} {row['plan']}, {batch} x {context:,} tokens, budget {row['budget']}"
                        report(title, row, common, args.out)


def by_size(rows: list[dict]) -> list[tuple[tuple, dict[tuple[int, str], dict]]]:
    """For each (shape, GPUs, context), within which rows may be compared: (batch, way) -> the fastest row."""
    best: dict[tuple, dict[tuple[int, str], dict]] = {}
    for row in rows:
        of_size = best.setdefault((str(row["shape"]), row["gpus"], row["context"]), {})
        key = row["batch"], row["way"]
        if key not in of_size or row["tokens_per_second"] > of_size[key]["tokens_per_second"]:
            of_size[key] = row
    return sorted(best.items(), key=lambda item: item[0])


def table(rows: list[dict]) -> list[str]:
    """The best plan of each way at each size, over autoregression."""
    lines = []
    for (shape, gpus, context), best in by_size(rows):
        lines += [f"{shape}, {context:,} tokens, GPUs: {gpus}",
                  " batch  way                     plan    budget tokens/s ms/token speed-up bandwidth"]
        for (batch, way), row in sorted(best.items()):
            one = best.get((batch, "autoregression"))
            times = f"{row['tokens_per_second'] / one['tokens_per_second']:.2f}" if one else ""
            timed = "moved_gb_s" in row and "bandwidth_gb_s" in row
            share = f"{row['moved_gb_s'] / row['bandwidth_gb_s']:.0%}" if timed else ""
            lines.append(f"{batch:>6}  {way:<24}{row['plan']:<8}{row['budget']:>6}{row['tokens_per_second']:>9.1f}"
                         f"{row['tbt_ms']:>9.2f}{times:>9}{share:>10}")
    return lines


def draw_lines(axis, best: dict[tuple[int, str], dict], styles: dict[str, tuple[str, str]]) -> None:
    """Throughput against batch size; no line across a size that was not measured."""
    batches = sorted({batch for batch, _ in best})
    for way, (color, marker) in styles.items():
        if any(name == way for _, name in best):
            ys = [best[batch, way]["tokens_per_second"] if (batch, way) in best else float("nan") for batch in batches]
            dashes = "--" if way == "autoregression" else "-"
            axis.plot(batches, ys, marker + dashes, label=way, fillstyle="none", ms=8, color=color)
    axis.set(xlabel="sequences", xlim=(0, 1.05 * max(batches)))


def plot(path: str) -> None:
    """Throughput of each way: a panel for each size."""
    plt, rows = pyplot(), [row for row in read_rows(path) if "share_of" not in row]  # see tensor_parallel.py
    print("\n".join(table(rows)))
    sizes = by_size(rows)
    styles = {way: (f"C{i}", mark) for i, (way, mark) in enumerate(zip(("autoregression", *WAYS), "s" + MARKERS,
                                                                      strict=True))}
    figure, axes = plt.subplots(1, len(sizes), figsize=(max(6 * len(sizes), 7), 4.5), squeeze=False)
    for axis, ((shape, gpus, context), best) in zip(axes.flat, sizes, strict=True):
        draw_lines(axis, best, styles)
        axis.set_title(f"{shape}, {context:,} tokens each, GPUs: {gpus}", fontsize=10)
        axis.set(ylabel="tokens per second", ylim=(0, 1.35 * axis.get_ylim()[1]))
        axis.legend(fontsize=8, loc="upper left", ncols=2)
    save(figure, path, rows)


def main() -> None:
    p = on_chip.parser()
    p.description = __doc__
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    p.add_argument("--gammas", type=int, nargs="*", default=[1, 2, 3])
    p.add_argument("--rounds", type=int, default=48, help="timed in each setting")
    p.add_argument("--prefill-chunk-size", type=int, default=8192)
    p.set_defaults(contexts=[32768], block_size=4, warm_up=32)
    run_or_plot(run, plot, p.parse_args())


if __name__ == "__main__":
    main()
