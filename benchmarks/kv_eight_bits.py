"""Keys and values in fp8: what they would save, and how far the model with such a cache is from its own.

    python benchmarks/kv_eight_bits.py --text book.txt --contexts 4096 16384                     # laws, on a CPU too
    python benchmarks/kv_eight_bits.py --text book.txt --contexts 122880 --times --out rows.jsonl

The library has no such cache. This measures what one would bring: e4m3 numbers with a scale for each layer and KV head.

laws: the embedded target (--checkpoint) over a text whose keys and values were rounded so; for the last tokens, the
chance that rejection sampling would keep a token of the rounded model (1 - TV of the two laws at temperature 1), on the
text and on the facts that the embedded pair was trained to recall.
times (a GPU): one layer's attention over a context, in the shapes of Llama-2-7B and Llama-3.1-8B, one row and a block:
- chip: bf16 by the library's kernel; fp8 widened as a whole and read by the same; and fp8 read by FlexAttention;
- bus: copies from host memory piece by piece with attention beside them, bf16 as the library has it, and fp8 which the
  device widens.
"""

import argparse
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

import triforce
from triforce import attention
from triforce.float8 import FP8, LARGEST
from triforce.kv.blocks import prefill_blocks
from triforce.kv.target import TargetCache

sys.path.insert(0, str(Path(__file__).parent))
import ruler  # noqa: E402
from harness import read_prompts, read_text, report, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402
from widen import SHAPES  # noqa: E402

LAST = 256  # positions of a text whose laws are compared
FACTS, VALUE = 3, 3  # of each kind of recall so many texts; tokens of a value
NAMES = ("llama-2-7b", "llama-3.1-8b")  # of shapes that are timed
DIM, ROWS, PIECE = 128, 16, 32 * 2**20


def rounded(x: Tensor) -> Tensor:
    """[K, S, D] rounded to fp8, one scale a head."""
    scale = x.abs().amax((1, 2), keepdim=True).float().clamp(min=1e-12) / LARGEST
    return ((x.float() / scale).to(FP8).float() * scale).to(x.dtype)


@torch.inference_mode()
def laws(engine, ids: list[int], last: int) -> tuple[Tensor, Tensor]:
    """[last, V] of the model's own and of the one with a rounded cache; the last tokens' own K/V stay wide in both."""
    model, device, length, found = engine.target, engine.device, len(ids), []
    for changed in (False, True):
        cache = TargetCache(model.config, model.rope, batch=1, capacity=length, block_size=1, flush_interval=1,
                            chunk_size=0, device=device, dtype=model.dtype)
        for start, stop in ((0, length - last), (length - last, length)):
            blocks = prefill_blocks(cache, range(1), start, stop, engine.settings.prefill_chunk_size)
            hidden = model.prefill(torch.tensor([ids[start:stop]], device=device), blocks)
            if changed and start == 0:
                for kept in (*cache.prefix.k, *cache.prefix.v):
                    kept[0, :, :stop] = rounded(kept[0, :, :stop])
        found.append(model.output(hidden[0]).float().softmax(-1))
    return found[0], found[1]


def compare(engine, texts: list[list[int]], last: int) -> dict[str, float]:
    """Over the last positions of some texts."""
    own, other = (torch.cat(found) for found in zip(*(laws(engine, ids, last) for ids in texts), strict=True))
    kept = torch.minimum(own, other).sum(-1)
    return {"context": max(map(len, texts)), "texts": len(texts), "positions": len(kept),
            "kept_mean": float(kept.mean()), "kept_least": float(kept.min()),
            "same_top": float((own.argmax(-1) == other.argmax(-1)).float().mean())}


def facts(engine, length: int, args) -> list[list[int]]:
    """Texts that end in a recalled value."""
    source, tokenizer = ruler.Text(read_text(args.text)), engine.tokenizer
    made = [ruler.make(task, source, tokenizer, length=length, number=number, seed=0, new_tokens=None)
            for task in ("recall", "recall_40") for number in range(FACTS)]
    return [[*sample.prompt, *tokenizer.encode(f" {sample.answers[0]}", bos=False)[-VALUE:]] for sample in made]


def on_chip(heads: int, group: int, rows: int, length: int, device) -> dict[str, float]:
    """Milliseconds of one layer."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, heads, rows * group, DIM, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(2))
    small = [x.to(FP8) for x in (k, v)]
    work = [torch.empty_like(k) for _ in range(2)]
    flex = torch.compile(flex_attention, dynamic=False)
    widen = torch.compile(lambda x, out: out.copy_(x), dynamic=False)
    many, places = torch.tensor([length], device=device, dtype=torch.int32), attention.places(k)
    single = attention.as_one_query(q)

    def library(k: Tensor, v: Tensor):
        return attention.up_to(single, rows * group, k, v, many, length, places)

    def widened():
        for x, out in zip(small, work, strict=True):
            widen(x, out)
        return library(*work)

    ways = {"bf16": lambda: library(k, v), "fp8_widened": widened, "bf16_flex": lambda: flex(q, k, v, return_lse=True),
            "fp8_flex": lambda: flex(q, *small, return_lse=True)}
    row = {}
    for name, way in ways.items():
        try:
            row[f"{name}_ms"] = milliseconds(way, device, repeats=15, warm_up=4)
        except Exception as error:  # a kernel that this version cannot write is a finding
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    exact = attention.partial(q, *(x.to(torch.bfloat16) for x in small))[0].float()
    if "fp8_flex_ms" in row:
        row["fp8_flex_error"] = float((ways["fp8_flex"]()[0].float() - exact).abs().max() / exact.abs().max())
    return row


def over_bus(heads: int, group: int, rows: int, length: int, device) -> dict[str, float]:
    """Milliseconds of one layer whose keys and values are copied from the host in pieces, three of them in flight."""
    q = torch.randn(1, heads, rows * group, DIM, device=device, dtype=torch.bfloat16)
    row, copying = {}, torch.cuda.Stream(device)
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", FP8)):
        count = -(-length * 2 * heads * DIM * dtype.itemsize // PIECE)
        tokens = length // count
        host = torch.zeros(count, 2, heads, tokens, DIM, dtype=torch.uint8 if dtype == FP8 else dtype).pin_memory()
        staging = [torch.empty_like(host[0], device=device) for _ in range(3)]
        wide = torch.empty(2, heads, tokens, DIM, device=device, dtype=torch.bfloat16)
        free: list[torch.cuda.Event | None] = [None] * 3

        def layer(host=host, staging=staging, wide=wide, free=free, dtype=dtype):
            compute, state = torch.cuda.current_stream(device), None
            for number, piece in enumerate(host):
                slot = number % 3
                if free[slot] is not None:
                    copying.wait_event(free[slot])
                with torch.cuda.stream(copying):
                    staging[slot].copy_(piece, non_blocking=True)
                compute.wait_stream(copying)
                kv = staging[slot] if dtype != FP8 else wide.copy_(staging[slot].view(FP8))
                part = attention.partial(q, kv[0][None], kv[1][None])
                state = part if state is None else attention.merge(state, part)
                free[slot] = compute.record_event()

        row[f"{name}_ms"] = milliseconds(layer, device, repeats=5, warm_up=2)
        row[f"{name}_gb_s"] = host.nbytes / row[f"{name}_ms"] / 1e6
    return row


def run(args) -> None:
    args.quote = 0
    if args.times and not torch.cuda.is_available():
        raise SystemExit("--times measures a GPU, and there is none; leave it out")
    engine = triforce.load(args.checkpoint, draft=False, device=args.device, compile=False)
    device = engine.device
    about = {"date": str(date.today()), "torch": torch.__version__, "checkpoint": args.checkpoint,
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
             "dtype": str(engine.target.dtype).removeprefix("torch.")}
    for ids in read_prompts(engine.tokenizer, args):
        for what, texts, last in (("text", [ids], LAST), ("facts", facts(engine, len(ids), args), VALUE + 1)):
            row = {"what": f"law, {what}", **compare(engine, texts, last)}
            report(f"laws, {len(ids):,} tokens, {what}", row, about, args.out)
    if not args.times:
        return
    del engine
    for name in NAMES:
        heads = SHAPES[name].n_kv_head
        group = SHAPES[name].n_head // heads
        for rows in (1, ROWS):
            for what, measure in (("chip", on_chip), ("bus", over_bus)):
                row = {"what": what, "shape": name, "rows": rows, "context": max(args.contexts),
                       **measure(heads, group, rows, max(args.contexts), device)}
                report(f"{what}: one layer of {name}, {rows} rows", row, about, args.out)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--checkpoint", default="tiny")
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384])
    flags.add_argument("--times", action="store_true", help="of kernels and copies, too")
    flags.add_argument("--device")
    flags.add_argument("--out", help="append rows to this file")
    flags.set_defaults(plot=None)
    run_or_plot(run, None, flags.parse_args())
