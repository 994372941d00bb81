"""What each part of the hierarchy is worth, and the two observations about attention that it rests on.

    python benchmarks/ablation.py --shape llama-2-7b --contexts 122880 --budgets 4096 --text book.txt --out rows.jsonl
    python benchmarks/ablation.py --contexts 16384 --parts attention                 # on a CPU too
    python benchmarks/ablation.py --plot rows.jsonl

Parts (of TriForce, arXiv 2404.11912, sections 3 and 5):

- levels: the hierarchy, each of its levels left out, and StreamingLLM or SnapKV in place of retrieval (see batch.py);
- gamma: fixed gamma and gamma_inner beside the controller's choice;
- temperature: from 0 to 1.2; length: of the output, 256 to 2,048 tokens;
- attention: which share of a new token's attention the most attended tokens of the prompt hold, layer by layer, and
  which share those, once chosen, still hold later on. Always measured on a trained model (--checkpoint), not widened.

Shapes are widened as in on_chip.py. Speed-ups are over one-row autoregression in the same run.
"""

import argparse
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path

import torch

import triforce
from triforce.engine import Engine
from triforce.plan import AUTOREGRESSION, Plan

sys.path.insert(0, str(Path(__file__).parent))
import on_chip  # noqa: E402
from batch import WAYS, engine_of, ways_of  # noqa: E402
from harness import cap_memory, pyplot, read_prompts, read_rows, report, run_or_plot, save  # noqa: E402

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


@torch.inference_mode()
def attention(engine: Engine, ids: list[int], budget: int, args):
    """Shares of the attention that new tokens pay to the prompt, means over heads; one token a round."""
    state = engine.prepare([ids], max(AGES) + 1, plan=AUTOREGRESSION, temperature=args.temperature, top_p=args.top_p,
                           top_k=None, min_p=None, seed=[0])
    cache, retrieval, prefix_len = state.cache, state.hierarchy.view, state.cache.lens[0]
    layers = range(cache.config.n_layer)

    def weights(i: int) -> torch.Tensor:
        """[H, S]: the newest token's attention over the prompt."""
        k = cache.prefix.k[i][0, :, :prefix_len].float()
        q = cache.queries[i][0, :, 0].float().unflatten(0, (k.shape[0], -1))  # [K, G, D]
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1).flatten(0, 1)

    def held(i: int, chosen: torch.Tensor) -> float:
        return weights(i).gather(1, chosen).sum(1).mean().item()

    def top(i: int) -> torch.Tensor:
        return weights(i).topk(budget, 1).indices

    if not retrieval.selected[0]:
        raise SystemExit(f"the view of {budget:,} tokens holds all {len(ids):,} of the prompt; give fewer --budgets")
    heads = cache.config.n_head // cache.config.n_kv_head
    view = [retrieval.positions(0, i).repeat_interleave(heads, 0) for i in layers]  # as chosen after the prompt
    chosen = []
    for age in range(1, max(AGES) + 1):
        state.round()
        if age == 1:
            chosen = [top(i) for i in layers]
            for i in layers:
                yield {"setting": f"layer {i}", "layer": i, "top": held(i, chosen[i]), "view": held(i, view[i])}
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
    base.settings = replace(base.settings, budget=budget)
    common = {**on_chip.about(base, args), "context": len(ids), "budget": budget, "seeds": args.seeds}
    parts = {"gamma": gammas, "temperature": temperatures, "length": lengths, "levels": levels}
    timed = [name for name in parts if name in args.parts and (name != "gamma" or base.draft is not None)]
    if timed:
        plain = on_chip.decode(base, ids, args, speculate=False, one_row=True)["tbt_ms"]
        report("autoregression", {"part": "autoregression", "tbt_ms": plain}, common, args.out)
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

    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
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
    for axis in axes.flat:
        labelled = axis.get_legend_handles_labels()[0]
        if labelled:
            axis.legend(fontsize=8, loc="lower left" if axis is axes[0, 1] else "upper right")
        axis.set_visible(bool(labelled or axis.patches))
    save(figure, path, rows)


def main() -> None:
    p = on_chip.parser()
    p.description, p.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    p.add_argument("--parts", nargs="+", choices=["levels", "gamma", "temperature", "length", "attention"],
                   default=["levels", "gamma", "temperature", "length", "attention"])
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    p.set_defaults(budgets=[4096])
    run_or_plot(run, plot, p.parse_args())


if __name__ == "__main__":
    main()
