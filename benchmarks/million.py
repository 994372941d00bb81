"""Contexts of up to a million tokens on one GPU: the prefill beside its arithmetic, steps, memory planned and used.

    python benchmarks/widen.py --shape llama-3.1-8b --positions 1049600 --out DIR
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python benchmarks/million.py --checkpoint DIR/target \\
        --draft DIR/draft --text book.txt --tokens 262144 1048576 --offload auto --out rows.jsonl

What does not fit the GPU lies in host memory. A text that is too short is repeated, and what repeats itself is easily
drafted. A widened pair says little beyond the 131,072 tokens that it was trained on. So the times of steps are the
finding here; acceptance is reported as it is. The other flags are those of `triforce` that load a model.
"""

import argparse
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

import triforce
from triforce import cli, memory
from triforce.cli import check, plan, request
from triforce.config import Placement, Settings
from triforce.loading import find_dtype
from triforce.model import ModelConfig

sys.path.insert(0, str(Path(__file__).parent))
from harness import report, run_or_plot  # noqa: E402


def arithmetic(config: ModelConfig, length: int) -> dict[str, float]:
    """Operations of a prefill: two for each weight and token; four for each channel of a query, of each pair of a token
    and an earlier one."""
    layers = config.n_layer * config.dim * (2 * config.n_head + 2 * config.n_kv_head) * config.head_dim
    layers += config.n_layer * 3 * config.dim * config.ffn_dim
    attention = 2.0 * length**2 * config.n_layer * config.n_head * config.head_dim
    return {"attention_operations": attention, "weight_operations": 2.0 * layers * length}


def planned(args, length: int, device: torch.device) -> dict:
    """By `triforce plan`'s sums, with what is free now: the models are loaded, and counted once more."""
    asked = {**vars(args), "prompt_len": length, "batch_size": 1}
    job = plan.job_of(argparse.Namespace(**asked))
    weights = memory.weight_parts(job.target, job.draft, find_dtype(job.placement.dtype, job.target.dtype, device))
    free = memory.available(device)
    free = None if free is None else free + sum(part.bytes for part in weights)
    here = plan.Machine(device, free, memory.available(torch.device("cpu")))
    need = plan.need(job, here)
    return {"planned_gib": need.bytes / 2**30, "planned_host_gib": need.host.bytes / 2**30,
            "planned_resident_layers": need.resident,
            "parts_gib": {part.name: round(part.bytes / 2**30, 2) for part in need.parts}}


def measure(engine, args, ids: list[int], count: int) -> dict:
    begun, shown = time.perf_counter(), [0.0]

    def progress(share: float) -> None:
        if share >= shown[0] + 0.05:
            shown[0] = share
            print(f"    {time.perf_counter() - begun:7.1f} s  prefill, {share:.0%} of its work", file=sys.stderr,
                  flush=True)

    row = {"context": len(ids), **arithmetic(engine.target.config, len(ids)), **planned(args, len(ids), engine.device)}
    how = {"temperature": 0.6, "top_p": 0.9, "ignore_eos": True, "seed": 0}
    first = engine.generate(ids, count, on_prefill=progress, **how).stats
    row |= {"prefill_s": first.prefill, "ttft_s": first.ttft, "first_tbt_ms": 1e3 * first.tbt,
            "operations_a_second": (row["attention_operations"] + row["weight_operations"]) / first.prefill}
    print(f"    {time.perf_counter() - begun:7.1f} s  first answer", file=sys.stderr, flush=True)
    again = engine.generate(ids, count, **how).stats
    plain = engine.generate(ids, min(count, 8), speculate=False, one_row=True, **how).stats
    state = engine.buffers.state
    view = state.hierarchy.view
    return row | {"reused_tokens": again.reused_tokens, "speculation_tbt_ms": 1e3 * again.tbt,
                  "autoregression_tbt_ms": 1e3 * plain.tbt, "speedup": plain.tbt / again.tbt,
                  "tokens_a_verify": again.block_efficiency,
                  **{f"acceptance_{name}": rate for name, rate in again.acceptance_rate.items()},
                  "budget": None if view is None else state.budget, "resident_layers": state.cache.prefix.num_resident,
                  "peak_gib": max(first.peak_memory, again.peak_memory) / 2**30}


def run(own) -> None:
    args = own.args
    device = Placement(**request.given(args, Placement)).resolve().device
    longest = max(own.tokens) + own.new
    engine = triforce.load(args.checkpoint, **request.given(args, Settings, Placement))
    ids, repeated = check.read_ids(engine.tokenizer, own.text, longest)
    machine = {"date": str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint, "widened": True,
               "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
               "dtype": str(engine.target.dtype).removeprefix("torch."), "text_repeated": repeated,
               "chunk_size": engine.settings.chunk_size, "new_tokens": own.new}
    for length in sorted(own.tokens):
        # Just enough room: a cache as long as this may not be rounded up.
        room = -(-(length + own.new) // 256) * 256 + 256
        args.max_seq_len = room
        engine.buffers.placement = replace(engine.placement, max_seq_len=room)
        report(f"{length:,} tokens", measure(engine, args, ids[:length], own.new), machine, own.out)
        engine.release()


def main() -> None:
    flags = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--tokens", type=int, nargs="+", default=[262_144, 1_048_576])
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--new", type=int, default=48)
    flags.add_argument("--out", help="append rows to this file")
    own, rest = flags.parse_known_args()
    own.plot, own.args = None, cli.parse(rest)
    own.args.max_new_tokens = own.new
    run_or_plot(run, None, own)


if __name__ == "__main__":
    main()
