"""One model over several GPUs: the steps, the all-reduce, and the whole, for as many ranks as torchrun starts.

    python benchmarks/tensor_parallel.py --shape llama-2-7b --contexts 124928 --text book.txt --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama-2-7b ... --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama-2-13b --offload --out results.jsonl
    python benchmarks/tensor_parallel.py --plot results.jsonl

Flags, shapes and figures are those of on_chip.py, with --offload those of offload.py. Every rank runs the same; the
first one reports. `--plot` prints each row beside that of one GPU, and draws them.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from triforce.decode.plan import AUTOREGRESSION, DraftPlan
from triforce.parallel import from_environment

sys.path.insert(0, str(Path(__file__).parent))
import offload  # noqa: E402
import on_chip  # noqa: E402
from harness import (  # noqa: E402
    cap_memory,
    milliseconds,
    print_kernels,
    pyplot,
    read_prompts,
    read_rows,
    report,
    run_or_plot,
    save,
)

CHAIN = 50  # all-reduces in a graph


def all_reduce_us(group, dim: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of an all-reduce of a block's activations inside a CUDA graph: by NCCL, through shared memory."""
    row, device = {}, torch.device("cuda", torch.cuda.current_device())
    for rows in (1, 8, 16, 64):
        for name, ranks in (("nccl", replace(group, buffer=None)), ("one_shot", group)):
            if ranks.buffer is None and name == "one_shot":
                continue
            x = torch.ones(1, rows, dim, dtype=dtype, device=device)

            def chain(x=x, ranks=ranks):
                for _ in range(CHAIN):
                    y = ranks.all_reduce(x)
                return y

            chain()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                chain()
            row[f"{name}_us_{rows}_rows"] = milliseconds(graph.replay, device, 20, 3, group) / CHAIN * 1e3
    return row


def profile(engine, ids: list[int]) -> None:
    """Prints the kernels of rounds without drafts, of rounds of one drafted token, and of a rebuild."""
    state = engine.prepare([ids], 256, temperature=0.6, top_p=0.9, top_k=None, min_p=None, seed=[0])
    print_kernels("full verify", lambda: state.round(AUTOREGRESSION), engine.device)
    print_kernels("a retrieval step and a verify", lambda: state.round(DraftPlan(1, None, True, 0, 1)), engine.device)
    print_kernels("rebuild", lambda: state.hierarchy.view.choose(0), engine.device)


def parser() -> argparse.ArgumentParser:
    p = on_chip.parser()
    p.description = __doc__
    p.add_argument("--offload", action="store_true", help="the cache in host memory, measured as by offload.py")
    p.add_argument("--resident", type=int, default=0, help="with --offload: layers that stay on the devices")
    p.add_argument("--profile", action="store_true", help="print the kernels of the steps instead")
    p.add_argument("--prefill-chunk-size", type=int, default=8192)
    p.add_argument("--flush-interval", type=int, default=128)
    p.set_defaults(contexts=[124928])
    return p


def run(args) -> None:
    group, args.device = from_environment(args.device)
    size = 1 if group is None else group.size
    if not torch.cuda.is_available() and (args.offload or args.profile):
        raise SystemExit("--offload and --profile measure a GPU, and there is none; drop them")
    if args.offload and args.peers:
        raise SystemExit("--peers beside --offload are those of one GPU; take offload.py --peers")
    cap_memory(args.memory_cap)
    engine, tokenizer = on_chip.load(args, group, prefill_chunk_size=args.prefill_chunk_size,
                                     flush_interval=args.flush_interval)
    common = {"gpus": size, **on_chip.about(engine, args), "offload": args.offload}
    if group is not None and engine.device.type == "cuda":
        common |= all_reduce_us(group, engine.target.config.dim, engine.target.dtype)
    for ids in read_prompts(tokenizer, args):
        for budget in args.budgets or [None]:
            engine.buffers.settings = replace(engine.settings, budget=budget)
            if args.offload:
                row = offload.measure(engine, ids, args.resident, args)
            elif args.profile:
                profile(engine, ids)
                continue
            else:
                row = on_chip.measure_context(engine, ids, args)
            report(f"{args.shape or args.checkpoint}, {len(ids):,} tokens, {size} GPUs", row, common, args.out)


def relations(rows: list[dict]) -> list[str]:
    """A line for each row: its figures, and each over that of the same work on one GPU."""
    def work(row) -> tuple:
        return row["shape"] or row["checkpoint"], row["context"], row["draft_dtype"], row["offload"]

    alone = {work(row): row for row in rows if row["gpus"] == 1}
    lines = [f"{'':<34}GPUs  verify ms  of one   one row    retrieval  per token  of one  over autoregression"]
    for row in sorted(rows, key=lambda row: (*map(str, work(row)), row["gpus"])):
        one = alone.get(work(row))
        shares = [f"{row[name] / one[name]:>6.2f}" if one else f"{'':>6}" for name in ("verify_ms", "tbt_ms")]
        kind = f"{work(row)[0]} {row['context']:,}{' fp8' if row['draft_dtype'] else ''}"
        kind += " offloaded" if row["offload"] else ""
        one_row = row.get("one_row_ms", 0.0)
        lines.append(f"{kind:<34}{row['gpus']:>4}{row['verify_ms']:>11.2f}  {shares[0]}{one_row:>10.2f}"
                     f"{row['retrieval_ms']:>13.2f}{row['tbt_ms']:>11.2f}  {shares[1]}{row['speedup']:>21.2f}")
    return lines


def plot(path: str) -> None:
    rows = [row for row in read_rows(path) if "share_of" not in row]  # of 0.1.0: shares of GPUs that were not there
    print("\n".join(relations(rows)))
    plt, groups = pyplot(), {}
    rows = [row for row in rows if not row["offload"]]  # those take a hundred times as long
    for row in sorted(rows, key=lambda row: row["gpus"]):
        name = (row["shape"] or row["checkpoint"]) + (", fp8" if row["draft_dtype"] else "")
        groups.setdefault((name, row["context"]), []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for (name, context), group in groups.items():
        label = f"{name}, {context // 1000}K"
        gpus = [row["gpus"] for row in group]
        [line] = axes[0].plot(gpus, [row["verify_ms"] for row in group], "o-", label=label)
        for key, style, what in (("tbt_ms", "o-", "speculation"), ("autoregression_tbt_ms", "s--", "autoregression")):
            axes[1].plot(gpus, [row[key] for row in group], style, color=line.get_color(), label=f"{label}: {what}")
    counts = sorted({row["gpus"] for row in rows})
    for axis, what in zip(axes, ("ms per full verify of a whole block", "ms per token"), strict=True):
        axis.set(xlabel="GPUs", ylabel=what, xscale="log", ylim=(0, 1.3 * axis.get_ylim()[1]))
        axis.set_xticks(counts, counts)
        axis.minorticks_off()
        axis.legend(fontsize=6, loc="upper right")
    save(figure, path, rows)


def main() -> None:
    run_or_plot(run, plot, parser().parse_args())


if __name__ == "__main__":
    main()
