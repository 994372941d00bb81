"""The KV cache in host memory: prefill, autoregression, speculation, and what others do with the same memory.

    python benchmarks/offload.py --shape llama-2-7b --contexts 122880 --text book.txt --out results.jsonl
    python benchmarks/offload.py --shape llama-2-7b --contexts 122880 --resident 0 16 --peers --timeline verify.png
    python benchmarks/offload.py --plot results.jsonl

Flags, shapes, texts and the widened pair are those of on_chip.py. `--peers` adds attention on the CPU, where the cache
lies, beside the bandwidth of its memory, two ways to rebuild the view, and, in a line of their own, a resident prefill
and transformers with its offloaded cache. One JSON line per run.
"""

import gc
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from triforce.engine import Engine
from triforce.plan import AUTOREGRESSION
from triforce.state import State

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


def prefill_seconds(engine: Engine, ids: list[int], args, new: int) -> tuple[float, State]:
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


def cpu_attention(state: State) -> dict[str, float]:
    """One token's attention on the CPU, layer by layer where the prefix lies, the fastest of a few ways; how fast the
    same cores read memory; and a whole block's attention, to see whether they could take part of a verify."""
    offload, config = state.cache.prefix.offload, state.cache.config
    length, group = state.cache.lens[0], state.cache.group
    layers = list(offload.layers)[:4]  # gigabytes: no cache holds them
    q = torch.randn(config.n_kv_head, group, config.head_dim, dtype=state.target.dtype)

    def seconds(call) -> float:
        times = []
        for i in layers:
            begun = time.perf_counter()
            call(i)
            times.append(time.perf_counter() - begun)
        return sorted(times)[len(times) // 2]

    heads = {i: offload.host[i][:, 0, :length].transpose(1, 2).contiguous() for i in layers}  # [2, K, S, D]

    def plain(k, v):
        scores = (q @ k.transpose(1, 2)).float() * config.head_dim**-0.5
        return scores.softmax(-1).to(v.dtype) @ v

    def flash(i, q):
        k, v = heads[i]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None])

    threads = torch.get_num_threads()
    even = [n for n in range(1, threads + 1) if config.n_kv_head % n == 0]  # or some wait while others have two
    ways = {
        "tokens in order, as they stream": (threads, lambda i: plain(*offload.host[i][:, 0, :length].transpose(1, 2))),
        "head by head": (threads, lambda i: plain(*heads[i])),
    } | {f"head by head, flash, {n} threads": (n, lambda i: flash(i, q)) for n in {threads, *even[-2:]}}
    size = heads[layers[0]].nbytes
    timed = {}
    for name, (number, call) in ways.items():
        torch.set_num_threads(number)
        call(layers[0])
        timed[name] = seconds(call)
        print(f"    cpu attention, {name}: {timed[name] * 1e3:.0f} ms a layer, {size / timed[name] / 1e9:.0f} GB/s",
              flush=True)
    torch.set_num_threads(threads)
    best = min(timed, key=timed.get)
    flat = {i: heads[i].view(torch.int64).flatten() for i in layers}
    read = seconds(lambda i: flat[i].sum())
    block = q.repeat(1, state.hierarchy.outer.rows, 1)
    return {"cpu_attention_block_ms_a_layer": seconds(lambda i: flash(i, block)) * 1e3,
            "cpu_attention_ms_a_layer": timed[best] * 1e3, "cpu_attention_way": best,
            "cpu_attention_gb_s": size / timed[best] / 1e9, "host_memory_gb_s": size / read / 1e9,
            "cpu_attention_token_ms": timed[best] * 1e3 * config.n_layer, "cpu_threads": threads}


def rebuild_ways(state: State) -> dict[str, float]:
    """A rebuild of the view: picked out of what a verify streams past, or gathered on the host and copied."""
    outer, view, offload = state.hierarchy.outer, state.hierarchy.view, state.cache.prefix.offload

    def verify(gathers: bool) -> float:
        view.gathered()
        for _ in range(3):  # it is warmed up, and perhaps recorded
            if gathers:
                view.rebuild(0, at_once=False)
            begun = wait()
            outer.round(AUTOREGRESSION)
            last = wait() - begun
            view.gathered()
        return last * 1e3

    def from_host() -> None:
        for i in offload.layers:
            at = view.positions(0, i).cpu()[None, ..., None].expand(2, -1, -1, view.k[i].shape[-1])
            torch.gather(offload.host[i][:, 0].transpose(1, 2), 2, at, out=pinned)
            for target, source in zip((view.k[i], view.v[i]), pinned, strict=True):
                target[0, :, : view.held].copy_(source, non_blocking=True)
            wait()  # before `pinned` is overwritten

    pinned = torch.empty(2, view.k[0].shape[1], view.held, view.k[0].shape[-1], dtype=view.k[0].dtype,
                         pin_memory=True)
    with torch.inference_mode():
        outer.gathering = view
        row = {"verify_plain_ms": verify(False), "verify_gathering_ms": verify(True)}
        from_host()
        begun = wait()
        from_host()
        row["rebuild_from_host_ms"] = (wait() - begun) * 1e3
    state.rewind(8)
    return row


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


def timeline(state: State, path: str) -> dict[str, float]:
    """Profiles one verify and draws 60 ms from its middle: copies above, kernels below."""
    plt = pyplot()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        state.round(AUTOREGRESSION)
        torch.cuda.synchronize()
    events = [(e.time_range.start / 1e3, e.time_range.elapsed_us() / 1e3, e.name) for e in profile.events()
              if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.elapsed_us() > 0]
    copies = sorted((start, span) for start, span, name in events if "HtoD" in name)
    kernels = sorted((start, span) for start, span, name in events if "Mem" not in name)
    begun, ended = copies[0][0], copies[-1][0] + copies[-1][1]
    busy = sum(span for _, span in copies) / (ended - begun)
    low = begun + (ended - begun) / 2
    figure, axis = plt.subplots(figsize=(10, 2.4))
    for row, (label, spans) in enumerate((("kernels", kernels), ("host to device", copies))):
        shown = [(start - low, span) for start, span in spans if low <= start < low + 60]
        edge = "white" if row else "C0"
        axis.broken_barh(shown, (row - 0.35, 0.7), facecolors=f"C{row}", edgecolor=edge, linewidth=0.3)
        axis.text(-0.5, row, label, ha="right", va="center", fontsize=9)
    axis.set(xlim=(0, 60), yticks=[], xlabel="ms, from the middle of a verify")
    axis.set_title(f"one verify: {ended - begun:.0f} ms, the bus busy {busy:.1%} of it", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return {"verify_copies_busy": busy, "verify_span_ms": ended - begun}


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
    if args.timeline and resident == args.resident[0]:
        row |= timeline(state, args.timeline)
    if args.peers and resident == args.resident[0]:
        row |= rebuild_ways(state)
        row |= cpu_attention(state)
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
             ("cpu_attention_token_ms", "v:", "attention on the CPU"),
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
    p.add_argument("--timeline", help="draw one verify to this file")
    p.set_defaults(shape="llama-2-7b", checkpoint=None, contexts=[122880], budgets=[4096], block_size=64, seeds=2,
                   plain_tokens=6, warm_up=64)
    run_or_plot(run, plot, p.parse_args())


if __name__ == "__main__":
    main()
