"""What each part of the hierarchy is worth, and the two observations about attention that it rests on.

    python benchmarks/ablation.py --shape llama-2-7b --contexts 122880 --budgets 4096 --text book.txt --out rows.jsonl
    python benchmarks/ablation.py --contexts 16384 --parts attention                 # on a CPU too
    python benchmarks/ablation.py --plot rows.jsonl

Parts (of TriForce, arXiv 2404.11912, sections 3 and 5):

- levels: the hierarchy, each of its levels left out, and StreamingLLM or SnapKV in place of retrieval (see batch.py);
- gamma: fixed gamma and gamma_inner beside the controller's choice;
- temperature: from 0 to 1.2; length: of the output, 256 to 2,048 tokens;
- depth: how many of the tokens drafted at each position of a round are kept, for each way to draft and temperature;
- attention: which share of a new token's attention the most attended tokens of the prompt hold, by layer and head, and
  which share those, once chosen, still hold later on. Always measured on a trained model (--checkpoint), not widened.

Shapes are widened as in on_chip.py. Speed-ups are over one-row autoregression in the same run.
"""

import argparse
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

import triforce
from triforce.config import Sampling
from triforce.engine import Engine
from triforce.kit import check
from triforce.plan import AUTOREGRESSION, Plan

sys.path.insert(0, str(Path(__file__).parent))
import on_chip  # noqa: E402
from batch import WAYS, engine_of, ways_of  # noqa: E402
from harness import cap_memory, pyplot, read_prompts, read_rows, report, run_or_plot, save  # noqa: E402

PARTS = ("levels", "gamma", "temperature", "length", "depth", "attention")
GAMMAS, INNER = (2, 4, 6, 9, 12, 15), (1, 2, 3)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
LENGTHS = (256, 512, 1024, 2048)
AGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def levels(base: Engine, ids: list[int], args):
    base.release()  # there is room for one cache
    for way in ways_of(base, args):
        engine = engine_of(base, way)
        yield {"setting": way, **on_chip.decode(engine, ids, args), "plan": last_plan(engine)}
        engine.release()


def last_plan(engine: Engine) -> str:
    return str(engine.caches.state.pilot.controller.plan)


def gammas(engine: Engine, ids: list[int], args):
    yield {"setting": "auto", **on_chip.decode(engine, ids, args), "plan": last_plan(engine)}
    for inner in INNER:
        for gamma in (gamma for gamma in GAMMAS if gamma < engine.settings.block_size):
            on_chip.fixed(engine, Plan(gamma, "model", True, inner, -(-gamma // 2)))
            yield {"setting": f"gamma {gamma}, gamma_inner {inner}", "gamma": gamma, "gamma_inner": inner,
                   **on_chip.decode(engine, ids, args)}
    engine.caches.state.pilot.auto = True


def temperatures(engine: Engine, ids: list[int], args):
    for temperature in TEMPERATURES:
        yield {"setting": f"temperature {temperature}", "temperature": temperature,
               **on_chip.decode(engine, ids, args, temperature=temperature)}


def lengths(engine: Engine, ids: list[int], args):
    for length in LENGTHS:
        longer = copy(args)
        longer.max_new_tokens, longer.seeds = length, max(args.seeds // 2, 1)
        yield {"setting": f"{length} tokens", "new_tokens": length, **on_chip.decode(engine, ids, longer)}


def depths(engine: Engine, ids: list[int], args):
    """A token behind a rejected one counts as not kept."""
    engine.prepare([ids], args.max_new_tokens, **vars(Sampling(temperature=0.0, seed=[0])))
    for temperature in TEMPERATURES:
        for way, plan in check.plans(engine).items():
            runs = [by_position(engine, ids, args.max_new_tokens, plan,
                                Sampling(temperature=temperature, top_p=args.top_p, seed=[seed]))
                    for seed in range(args.seeds if temperature else 1)]  # a greedy text is the same for all
            drafted, kept = ([sum(counts) for counts in zip(*(run[i] for run in runs), strict=True)] for i in (1, 2))
            yield {"setting": f"{way}, temperature {temperature}", "way": way, "temperature": temperature,
                   "repeats": mean(check.repeated(run[0]) for run in runs), "drafted": drafted, "kept": kept,
                   "kept_by_position": [round(k / d, 3) if d else None for k, d in zip(kept, drafted, strict=True)]}


def by_position(engine: Engine, ids: list[int], count: int, plan: Plan, law: Sampling):
    """Rounds of a plan: (tokens, how often one was drafted at each position of a round, how often it was kept)."""
    with engine.working():
        state = engine.prepare([ids], count, plan=plan, **vars(law))
    tokens, drafted, kept = [], [0] * plan.gamma, [0] * plan.gamma
    while len(tokens) < count:
        with engine.working():
            tokens += state.round()[0]
        row = state.last_round.rows[0]
        for i in range(row.num_drafted):
            drafted[i] += 1
            kept[i] += i < row.num_accepted
    return tokens, drafted, kept


@torch.inference_mode()
def attention(engine: Engine, ids: list[int], budget: int, args):
    """Shares of the attention that new tokens pay to the prompt, means over heads but where they are told apart; one
    token a round."""
    state = engine.prepare([ids], max(AGES) + 1, plan=AUTOREGRESSION, temperature=args.temperature, top_p=args.top_p,
                           top_k=None, min_p=None, seed=[0])
    cache, retrieval, prefix_len = state.cache, state.hierarchy.view, state.cache.lens[0]
    layers = range(cache.config.n_layer)

    def weights(i: int) -> torch.Tensor:
        """[H, S]: the newest token's attention over the prompt."""
        k = cache.prefix.k[i][0, :, :prefix_len].float()
        q = cache.queries[i][0, :, 0].float().unflatten(0, (k.shape[0], -1))  # [K, G, D]
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1).flatten(0, 1)

    def by_head(i: int, chosen: torch.Tensor) -> torch.Tensor:
        return weights(i).gather(1, chosen).sum(1)

    def held(i: int, chosen: torch.Tensor) -> float:
        return by_head(i, chosen).mean().item()

    def top(i: int) -> torch.Tensor:
        return weights(i).topk(budget, 1).indices

    if not retrieval.selected[0]:
        raise SystemExit(f"the view of {budget:,} tokens holds all {len(ids):,} of the prompt; give fewer --budgets")
    group = cache.config.n_head // cache.config.n_kv_head
    retrieval.catch_up([0])
    view = [retrieval.positions(0, i).repeat_interleave(group, 0) for i in layers]  # as chosen after the prompt
    chosen = []
    for age in range(1, max(AGES) + 1):
        state.round()
        if age == 1:
            chosen = [top(i) for i in layers]
            for i in layers:
                shares = {"top": by_head(i, chosen[i]), "view": by_head(i, view[i])}
                means = {name: share.mean().item() for name, share in shares.items()}
                heads = {f"{name}_by_head": [round(x, 3) for x in share.tolist()] for name, share in shares.items()}
                yield {"setting": f"layer {i}", "layer": i, **means, **heads}
        if age in AGES:
            shares = {"fresh": [held(i, top(i)) for i in layers], "first": [held(i, chosen[i]) for i in layers],
                      "view": [held(i, view[i]) for i in layers]}
            yield {"setting": f"token {age}", "age": age, **{name: sum(s) / len(s) for name, s in shares.items()}}


def run(args) -> None:
    if len(args.contexts) > 1 or len(args.budgets) > 1:
        raise SystemExit(f"{len(args.contexts)} --contexts and {len(args.budgets)} --budgets; give one of each")
    cap_memory(args.memory_cap)
    base, tokenizer = on_chip.load(args)
    [ids], [budget] = read_prompts(tokenizer, args), args.budgets
    base.caches.settings = replace(base.settings, budget=budget)
    common = {**on_chip.about(base, args), "context": len(ids), "budget": budget, "seeds": args.seeds}
    parts = {"gamma": gammas, "temperature": temperatures, "length": lengths, "levels": levels}
    timed = [name for name in parts if name in args.parts and (name != "gamma" or base.draft is not None)]
    if timed:
        plain = on_chip.decode(base, ids, args, speculate=False, one_row=True)["tbt_ms"]
        report("autoregression", {"part": "autoregression", "tbt_ms": plain}, common, args.out)
    if "depth" in args.parts:
        for row in depths(base, ids, args):
            report(f"depth: {row['setting']}", {"part": "depth", **row}, common, args.out)
    for name in timed:
        for row in parts[name](base, ids, args):
            row = {"part": name, **row, "speedup": plain / row["tbt_ms"]}
            report(f"{name}: {row['setting']}", row, common, args.out)
    if "attention" in args.parts:
        base.release()
        trained = triforce.load(args.checkpoint, device=args.device, draft=False, budget=budget)
        common |= {"shape": None, "checkpoint": args.checkpoint, "widened": False}
        for row in attention(trained, ids, budget, args):
            report(f"attention: {row['setting']}", {"part": "attention", **row}, common, args.out)


def plot(path: str) -> None:
    plt, rows = pyplot(), read_rows(path)

    def of(part: str, key: str = "setting") -> list[dict]:
        return [row for row in rows if row["part"] == part and key in row]

    figure, axes = plt.subplots(2, 4)
    bars = of("levels")
    axes[0, 0].barh([row["setting"] for row in bars][::-1], [row["speedup"] for row in bars][::-1])
    axes[0, 0].axvline(1, color="grey", ls="--")  # autoregression
    axes[0, 0].set(xlabel="speed-up over autoregression", title="levels")
    for inner in INNER:
        points = [row for row in of("gamma", "gamma") if row["gamma_inner"] == inner]
        if not points:
            continue
        axes[0, 1].plot([row["gamma"] for row in points], [row["tbt_ms"] for row in points], "o-",
                        label=f"gamma_inner {inner}")
    for row in of("gamma"):
        if row["setting"] == "auto":
            axes[0, 1].axhline(row["tbt_ms"], color="k", ls="--", label="auto")
    axes[0, 1].set(xlabel="gamma", ylabel="ms per token", ylim=(0, None), title="fixed settings")
    for part, key, axis in (("temperature", "temperature", axes[0, 2]), ("length", "new_tokens", axes[1, 0])):
        points = of(part, key)
        if not points:
            continue
        axis.plot([row[key] for row in points], [row["speedup"] for row in points], "o-", label="speed-up")
        axis.plot([row[key] for row in points], [row.get("acceptance_full", 0) for row in points], "s--",
                  label="acceptance at full")
        axis.set(xlabel=key.replace("_", " "), ylim=(0, 1.4 * max(row["speedup"] for row in points)), title=part)
    points = of("attention", "layer")
    if points:
        xs, budget, context = [row["layer"] for row in points], points[0]["budget"], points[0]["context"]
        axes[1, 1].bar([x - 0.2 for x in xs], [row["top"] for row in points], 0.4, label=f"top {budget:,} tokens")
        axes[1, 1].bar([x + 0.2 for x in xs], [row["view"] for row in points], 0.4, label="the retrieval view")
        axes[1, 1].set(xlabel="layer", ylabel="share of attention", ylim=(0, 1.25),
                       title=f"{points[0]['checkpoint']}, {context:,} tokens")
    points = of("attention", "age")
    lines = (("fresh", "each token's own top"), ("first", "the first token's top"), ("view", "the first view"))
    for key, label in lines if points else ():
        axes[1, 2].plot([row["age"] for row in points], [row[key] for row in points], "o-", label=label)
    axes[1, 2].set(xlabel="tokens later", ylabel="share of attention", xscale="log", ylim=(0, 1.25),
                   title="how it ages")
    if points and "view_by_head" in (of("attention", "layer") or [{}])[0]:
        shares = [row["view_by_head"] for row in of("attention", "layer")]
        axes[0, 3].imshow(shares, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axes[0, 3].set(xlabel="head", ylabel="layer", title="share that the view holds")
    way = "retrieval view"  # the one that every model has
    for row in (row for row in of("depth") if row["way"] == way):
        axes[1, 3].plot(range(1, len(row["kept_by_position"]) + 1), row["kept_by_position"], "o-", markersize=3,
                        label=f"temperature {row['temperature']}")
    axes[1, 3].set(xlabel="position in a round", ylabel="share that is kept", ylim=(0, 1.05), title=f"depth: {way}")
    below = (axes[0, 1], axes[1, 2], axes[1, 3])  # where curves lie above
    shown = []
    for axis in axes.flat:
        labelled = axis.get_legend_handles_labels()[0]
        if labelled:
            axis.legend(fontsize=8, loc="lower left" if axis in below else "upper right")
        if labelled or axis.patches or axis.images:
            shown.append(axis)
        else:
            axis.remove()
    columns = min(len(shown), 4)
    lines = -(-len(shown) // columns)
    figure.set_size_inches(4.25 * columns, 3.5 * lines)
    grid = figure.add_gridspec(lines, columns)
    for place, axis in enumerate(shown):
        axis.set_subplotspec(grid[place // columns, place % columns])
        for image in axis.images:
            figure.colorbar(image, ax=axis)
    save(figure, path, rows)


def main() -> None:
    p = on_chip.parser()
    p.description, p.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    p.set_defaults(budgets=[4096])
    run_or_plot(run, plot, p.parse_args())


if __name__ == "__main__":
    main()
