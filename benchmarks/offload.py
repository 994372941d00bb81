"""The KV cache in host memory: prefill, autoregression, speculation, and what others do with the same memory.

    python benchmarks/offload.py --shape llama-2-7b --contexts 122880 --text book.txt --out results.jsonl
    python benchmarks/offload.py --shape llama-2-7b --contexts 122880 --resident 0 16 --peers
    python benchmarks/offload.py --plot results.jsonl

Flags, shapes, texts and the widened pair are those of on_chip.py. `--peers` adds, in a line of their own, a resident
prefill and transformers with its offloaded cache. One JSON line per run.
"""

import gc
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from triforce.decode.batch import DecodeBatch
from triforce.decode.plan import AUTOREGRESSION
from triforce.engine.engine import Engine

sys.path.insert(0, str(Path(__file__).parent))
import on_chip  # noqa: E402
from harness import cap_memory, pyplot, read_prompts, read_rows, report, run_or_plot, save  # noqa: E402

STARTED = time.perf_counter()


def wait() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def stage(what: str) -> None:
    """Progress, on stderr: a run takes minutes."""
    print(f"    {time.perf_counter() - STARTED:7.1f} s  {what}", file=sys.stderr, flush=True)


def prefill_seconds(engine: Engine, ids: list[int], args, new: int) -> tuple[float, DecodeBatch]:
    """A prefill once everything is compiled and allocated."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": None, "min_p": None, "seed": [0]}
    if engine.buffers.state is not None:
        engine.buffers.state.reset()
    state = engine.buffers.find([ids], new, None)
    state.params.set(**sampling)
    state.reset()
    begun = wait()
    state.prefill(0, ids)
    seconds = wait() - begun
    state.begin(new)
    state.prompts = [ids]
    return seconds, state


def transformers_offloaded(engine: Engine, ids: list[int], tokens: int = 2) -> dict[str, float]:
    """transformers with the same weights and its cache offloaded."""
    from transformers import DynamicCache

    model = on_chip.transformers_model(engine.target)
    cache = DynamicCache(config=model.config, offloading=True)
    prompt = torch.tensor([ids], device=engine.device)
    with torch.inference_mode():
        begun = wait()
        out = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        prefill, times = wait() - begun, []
        for _ in range(tokens):
            token = out.logits[:, -1:].argmax(-1)
            begun = wait()
            out = model(token, past_key_values=cache, use_cache=True)
            times.append(wait() - begun)
    return {"transformers_prefill_s": prefill, "transformers_tbt_ms": min(times) * 1e3}


def measure(engine: Engine, ids: list[int], resident: int | None, args) -> dict[str, float]:
    new = max(args.max_new_tokens, args.warm_up) + 80
    engine.release()
    engine.buffers.placement = replace(engine.placement, offload=True, num_resident_layers=resident)
    begun = wait()
    torch.cuda.reset_peak_memory_stats()
    engine.generate(ids, 8, temperature=args.temperature, top_p=args.top_p, seed=0, ignore_eos=True)
    row = {"context": len(ids), "resident": resident, "first_call_s": wait() - begun}
    stage("first call done")
    row["prefill_s"], state = prefill_seconds(engine, ids, args, new)
    stage(f"prefill again: {row['prefill_s']:.2f} s")
    offload, outer = state.cache.prefix.offload, state.hierarchy.outer
    row |= {"budget": state.budget, "piece_tokens": offload.piece, "host_gib": offload.nbytes / 2**30}
    streamed = sum(kv[:, 0, : state.cache.lens[0]].nbytes for kv in offload.host.values())
    with torch.inference_mode():
        for _ in range(3):  # it is warmed up, and perhaps recorded
            outer.round(AUTOREGRESSION)
            begun = wait()
        state.rewind(new)
        row["rewind_s"] = wait() - begun
        enqueued = wait()
        outer.round(AUTOREGRESSION)
    row["verify_enqueue_ms"] = (time.perf_counter() - enqueued) * 1e3  # the host's part of a verify
    row["verify_alone_ms"] = (wait() - enqueued) * 1e3
    stage(f"a verify: {row['verify_alone_ms']:.0f} ms")
    state.rewind(new)
    plain = on_chip.decode(engine, ids, args, speculate=False, one_row=True)
    stage("autoregression done")
    row["autoregression_tbt_ms"] = plain["tbt_ms"]
    row["streamed_gb"] = streamed / 1e9
    row["streamed_gb_s"] = streamed / 1e6 / plain["tbt_ms"]
    row |= on_chip.decode(engine, ids, args)
    stage(f"speculation: {row['tbt_ms']:.1f} ms per token")
    chosen = engine.buffers.state.pilot.controller
    row["plan"] = str(chosen.plan)
    row |= {f"rate_{name}": rate.value for name, rate in chosen.rates.items()}
    costs = chosen.learned.now()
    row["verify_ms"], row["retrieval_ms"] = max(costs.verify.values()), max(costs.retrieval.values())
    row["speedup"] = plain["tbt_ms"] / row["tbt_ms"]
    row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    row["weights_gib"] = sum(p.nbytes for m in (engine.target, engine.draft, engine.drafting) if m is not None
                             for p in m.parameters()) / 2**30
    return row


def peers(engine: Engine, ids: list[int], args) -> dict[str, float]:
    """What needs the memory that the offloaded cache took: the resident prefill, and transformers."""
    row = {}
    engine.release()
    engine.buffers.placement = replace(engine.placement, offload=False, num_resident_layers=None)
    engine.generate(ids, 2, temperature=0)
    row["resident_prefill_s"] = prefill_seconds(engine, ids, args, 256)[0]
    engine.release()
    try:
        row |= transformers_offloaded(engine, ids)
    except Exception as error:  # a peer's fault is a finding, not the end of the run
        row["transformers_error"] = f"{type(error).__name__}: {error}"[:300]
    gc.collect()
    torch.cuda.empty_cache()
    return row


def plot(path: str) -> None:
    """Time per token against context and against resident layers."""
    plt, rows = pyplot(), read_rows(path)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    kinds = [("autoregression_tbt_ms", "s--", "autoregression"),
             ("transformers_tbt_ms", "^:", "transformers, offloaded cache"), ("tbt_ms", "o-", "speculation")]
    contexts = [row["context"] for row in rows if "tbt_ms" in row]  # not those of the peers alone
    swept = max(contexts, key=contexts.count)  # where the most numbers of resident layers were tried
    for axis, key, chosen in ((axes[0], "context", [r for r in rows if r["resident"] == 0]),
                              (axes[1], "resident", [r for r in rows if r["context"] == swept])):
        scale = 1000 if key == "context" else 1
        for shape in sorted({row["shape"] for row in chosen}):
            own = [row for row in chosen if row["shape"] == shape]
            for i, (name, style, label) in enumerate(kinds):
                for j, budget in enumerate(sorted({row["budget"] for row in own}) if name == "tbt_ms" else [None]):
                    points = sorted((row[key] / scale, row[name]) for row in own
                                    if name in row and budget in (None, row["budget"]))
                    if points:
                        what = f"{label}, {shape}" + (f", budget {budget:,}" if budget else "")
                        axis.plot(*zip(*points, strict=True), style, color=f"C{i + j}", label=what)
        axis.set(yscale="log", ylabel="ms per token")
    axes[0].set(xlabel="context, thousand tokens (all layers in host memory)")
    axes[1].set(xlabel=f"resident layers, at {swept:,} tokens")
    for axis in axes:
        low, high = axis.get_ylim()
        axis.set_ylim(low * (low / high) ** 0.4)  # room for the legend
        axis.legend(fontsize=7, loc="lower right")
    save(figure, path, rows)


def run(args) -> None:
    if not torch.cuda.is_available() or args.device == "cpu":
        raise SystemExit("this measures a GPU and its bus; on a CPU there is none")
    if args.sweep:
        raise SystemExit("--sweep is on_chip.py's; drop it")
    if args.checkpoint:
        raise SystemExit(f"--checkpoint {args.checkpoint}: here are shapes only (--shape); for a checkpoint, take "
                         "generate.py --offload --compare")
    cap_memory(args.memory_cap)
    engine, tokenizer = on_chip.load(args, prefill_chunk_size=args.prefill_chunk_size,
                                     flush_interval=args.flush_interval)
    stage("loaded")
    prompts = read_prompts(tokenizer, args)
    machine = {**on_chip.about(engine, args), "flush_interval": args.flush_interval}
    for ids, budget, resident in itertools.product(prompts, args.budgets, args.resident):
        engine.buffers.settings = replace(engine.settings, budget=budget)
        row = measure(engine, ids, resident, args)
        title = f"{args.shape} (widened), {len(ids):,} tokens, {resident} resident layers"
        report(title, row, machine, args.out)
        if args.peers and resident == args.resident[0]:
            same = {key: row[key] for key in ("context", "resident", "budget")}
            report(f"{title}: peers", same | peers(engine, ids, args), machine, args.out)


def main() -> None:
    p = on_chip.parser()
    p.description = __doc__
    p.add_argument("--resident", type=int, nargs="+", default=[0], help="layers that stay on the device, one run each")
    p.add_argument("--prefill-chunk-size", type=int, default=8192)
    p.add_argument("--flush-interval", type=int, default=256)
    p.set_defaults(shape="llama-2-7b", checkpoint=None, contexts=[122880], budgets=[4096], block_size=64, seeds=2,
                   plain_tokens=6, warm_up=64)
    run_or_plot(run, plot, p.parse_args())


if __name__ == "__main__":
    main()
