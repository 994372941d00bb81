"""One model over several GPUs: the steps, the all-reduce, and the whole, for as many ranks as torchrun starts.

    python benchmarks/tensor_parallel.py --shape llama-2-7b --contexts 124928 --text book.txt --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama-2-7b ... --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama-2-13b --offload --out results.jsonl
    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --shape llama-2-13b --share-of 8 --out results.jsonl
    python benchmarks/tensor_parallel.py --plot results.jsonl

Flags, shapes and figures are those of on_chip.py, with --offload those of offload.py. Every rank runs the same; the
first one reports. `--share-of 8` has each do the work of one of eight, of which only the first run: see shares.py.
`--plot` prints each row beside that of one GPU, and draws them.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from triforce.parallel import from_environment
from triforce.plan import AUTOREGRESSION, Plan

sys.path.insert(0, str(Path(__file__).parent))
import offload  # noqa: E402
import on_chip  # noqa: E402
from harness import cap_memory, print_kernels, pyplot, read_prompts, read_rows, report, run_or_plot, save  # noqa: E402
from steps import milliseconds  # noqa: E402

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
    print_kernels("a retrieval step and a verify", lambda: state.round(Plan(1, None, True, 0, 1)), engine.device)
    print_kernels("rebuild", lambda: state.hierarchy.view.rebuild(0), engine.device)


def parser() -> argparse.ArgumentParser:
    p = on_chip.parser()
    p.description = __doc__
    p.add_argument("--offload", action="store_true", help="the cache in host memory, measured as by offload.py")
    p.add_argument("--resident", type=int, default=0, help="with --offload: layers that stay on the devices")
    p.add_argument("--profile", action="store_true", help="print the kernels of the steps instead")
    p.add_argument("--prefill-chunk-size", type=int, default=8192)
    p.add_argument("--flush-interval", type=int, default=128)
    p.set_defaults(contexts=[124928], timeline=None)
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


def ranks(row: dict) -> int:
    """Among how many the model is divided; with --share-of, more than ran."""
    return row.get("share_of", row["gpus"])


def relations(rows: list[dict]) -> list[str]:
    """A line for each row: its figures, and each over that of the same work on one GPU."""
    def work(row) -> tuple:
        return row["shape"] or row["checkpoint"], row["context"], row["draft_dtype"], row["offload"]

    alone = {work(row): row for row in rows if row["gpus"] == 1}
    lines = [f"{'':<34}GPUs  verify ms  of one   one row    retrieval  per token  of one  over autoregression"]
    for row in sorted(rows, key=lambda row: (*map(str, work(row)), ranks(row))):
        one = alone.get(work(row))
        shares = [f"{row[name] / one[name]:>6.2f}" if one else f"{'':>6}" for name in ("verify_ms", "tbt_ms")]
        kind = f"{work(row)[0]} {row['context']:,}{' fp8' if row['draft_dtype'] else ''}"
        kind += " offloaded" if row["offload"] else ""
        kind += f", {row['gpus']} of" if "share_of" in row else ""
        one_row, said = row.get("one_row_ms", 0.0), f"{row['tbt_ms']:>11.2f}  {shares[1]}{row['speedup']:>21.2f}"
        lines.append(f"{kind:<34}{ranks(row):>4}{row['verify_ms']:>11.2f}  {shares[0]}{one_row:>10.2f}"
                     f"{row['retrieval_ms']:>13.2f}{said if row.get('whole_text', True) else ''}")
    return lines


def plot(path: str) -> None:
    rows = read_rows(path)
    print("\n".join(relations(rows)))
    plt, groups = pyplot(), {}
    rows = [row for row in rows if not row["offload"]]  # those take a hundred times as long
    for row in sorted(rows, key=ranks):
        name = (row["shape"] or row["checkpoint"]) + (", fp8" if row["draft_dtype"] else "")
        groups.setdefault((name, row["context"]), []).append(row)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for (name, context), group in groups.items():
        label = f"{name}, {context // 1000}K"
        color = draw(axes[0], group, "verify_ms", "o-", label)
        draw(axes[1], group, "tbt_ms", "o-", f"{label}: speculation", color)
        draw(axes[1], group, "autoregression_tbt_ms", "s--", f"{label}: autoregression", color)
    counts = sorted({ranks(row) for row in rows})
    hollow = " (hollow: shares of so many, fewer ran)" if any("share_of" in row for row in rows) else ""
    for axis, what in zip(axes, ("ms per full verify of a whole block", "ms per token"), strict=True):
        axis.set(xlabel=f"GPUs{hollow}", ylabel=what, xscale="log", ylim=(0, 1.3 * axis.get_ylim()[1]))
        axis.set_xticks(counts, counts)
        axis.minorticks_off()
        axis.legend(fontsize=6, loc="upper right")
    save(figure, path, rows)


def draw(axis, rows: list[dict], name: str, style: str, label: str, color=None):
    """A line through the rows that ran, hollow markers for shares of more ranks than ran. Returns the colour."""
    ran = [row for row in rows if "share_of" not in row]
    line = axis.plot([row["gpus"] for row in ran], [row[name] for row in ran], style, color=color, label=label)[0]
    timed = [row for row in rows if "share_of" in row and (row["whole_text"] or name == "verify_ms")]
    axis.plot([ranks(row) for row in timed], [row[name] for row in timed], style[0], ms=8, fillstyle="none",
              color=line.get_color())
    return line.get_color()


def main() -> None:
    run_or_plot(run, plot, parser().parse_args())


if __name__ == "__main__":
    main()
