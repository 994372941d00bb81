"""Which selection drafts best: acceptance of the retrieval level against the full cache, setting by setting.

    python benchmarks/retrieval.py --text book.txt --context 122880 --budget 4096 --out results.jsonl

Uses the embedded pair: acceptance is a matter of the model and the text, not of the size of its body. The level drafts
alone, one token a verify, so that the rate is kept / checked tokens, over several seeds. Times are those of a rebuild
for this small model: compare them with each other only. Variants by layer give some layers more of the same number of
chunks than others; "attention" chooses by what the verified rows attend to, token by token, instead of by chunk means.
"""

import argparse
import contextlib
import json
import math
import platform
import sys
from datetime import date
from pathlib import Path
from unittest import mock

import torch

import triforce
from triforce.config import split_view
from triforce.kv.blocks import TargetLayer
from triforce.kv.views import RetrievalView

sys.path.insert(0, str(Path(__file__).parent))
from harness import read_text, run_or_plot  # noqa: E402
from steps import milliseconds  # noqa: E402

# The tiny target has 8 layers; shares of a variant sum to 8, and none exceeds MOST.
MOST = 2
VARIANTS = [
    {}, {"rebuild_interval": 8}, {"rebuild_interval": 32}, {"rebuild_interval": 64}, {"rebuild_interval": 256},
    {"chunk_size": 4}, {"chunk_size": 16}, {"chunk_size": 32}, {"recent": 0.0625}, {"recent": 0.125}, {"recent": 0.5},
    {"recent": 0.95}, {"scores": "attention"}, {"scores": "attention", "rebuild_interval": 8}, {"by layer": (1,) * 8},
    {"by layer": (2, 2, *(0.667,) * 6)}, {"by layer": (*(0.667,) * 6, 2, 2)},
    {"by layer": (1.7, 1.5, 1.3, 1.1, 0.9, 0.7, 0.5, 0.3)}, {"by layer": (0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7)},
]


@contextlib.contextmanager
def by_layer(shares: tuple[float, ...], num_selected: int):
    """Of a view's selected chunks, layer i sees the best `shares[i] * num_selected`, the others are masked."""
    hidden: dict[int, torch.Tensor] = {}
    choose, init = RetrievalView.choose, TargetLayer.__init__

    def choosing(view, row, at_once=True):
        choose(view, row, at_once)
        for i, share in enumerate(shares):
            scores = view._scores(slice(i, i + 1))[0]
            ranks = scores.argsort(-1, descending=True).argsort(-1).gather(1, view._chunks[row, i])  # [K, chunks]
            seen = torch.ones(len(scores), view.cache.tail.storage[i].shape[3], dtype=torch.bool)  # [K, view and tail]
            start = view.held - view.num_selected * view.select_size
            seen[:, start : view.held] = (ranks < share * num_selected).repeat_interleave(view.select_size, 1)
            hidden[i] = torch.where(seen, 0.0, float("-inf"))[None, :, None]

    def beginning(layer, block, i):
        init(layer, block, i)
        if block.view.joined and hidden:
            layer.bias = block.bias + hidden[i]

    with mock.patch.object(RetrievalView, "choose", choosing), mock.patch.object(TargetLayer, "__init__", beginning):
        yield


def by_attention():
    """Chunks are chosen by the attention of the rows that were verified last, summed over a chunk's tokens: what a pass
    over all keys gives, where chunk means estimate it."""
    def scores(view, i):
        row, cache, chunk = int(view._row), view.cache, view.chunk_size
        length = cache.lens[row]
        keys = cache.prefix.k[i][row, :, :length]  # [K, S, D]
        q = cache.queries[i][row].reshape(len(keys), -1, keys.shape[-1])  # [K, G * M, D]
        weight = cache.query_weight[row].repeat(cache.group)[:, None]
        attended = ((q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) * weight).sum(1)  # [K, S]
        end = (length - view.window_size) // chunk
        found = torch.full(cache.prefix.chunk_keys[i][row].shape[:2], float("-inf"), device=q.device)
        found[:, 1:end] = attended.unflatten(1, (-1, chunk)).sum(2)[:, 1:end]
        return found

    return mock.patch.object(RetrievalView, "_all_scores", lambda view: torch.stack(
        [scores(view, i) for i in range(view.cache.config.n_layer)]))


def measure(ids: list[int], variant: dict, budget: int, args) -> tuple[float, int, float, triforce.Engine]:
    """Acceptance, how many tokens were checked, milliseconds of a rebuild."""
    settings, patches = dict(variant), contextlib.nullcontext()
    shares = settings.pop("by layer", None)
    exact = settings.pop("scores", None)
    if exact:
        patches = by_attention()
    if shares:
        window, chunks = split_view(budget, 8, 128)
        patches = by_layer(shares, chunks)
        budget += (MOST - 1) * chunks * 8
        settings["recent"] = window / budget
    device = "cpu" if shares or exact else None  # what is patched is no part of a graph
    engine = triforce.load("tiny", draft=False, gamma=1, block_size=8, budget=budget, device=device,
                           compile=args.compile, **settings)
    accepted = tested = 0
    with patches:
        for seed in range(args.seeds):
            engine.generate(ids, args.max_new_tokens, seed=seed, ignore_eos=True)
            kept, drafted, _ = engine.buffers.state.hierarchy.outer.totals[0].tolist()
            accepted, tested = accepted + kept, tested + drafted
    with torch.inference_mode():
        view = engine.buffers.state.hierarchy.view
        rebuild = milliseconds(lambda: view.rebuild(0), engine.device, repeats=9, warm_up=3)
    return accepted / tested, tested, rebuild, engine


def run(args) -> None:
    tokenizer = triforce.load("tiny", draft=False).tokenizer
    ids = tokenizer.encode(read_text(args.text))[: args.context]
    print(f"{'setting':<72}{'acceptance':>12}{'+-':>8}{'rebuild ms':>12}")
    for variant in VARIANTS:
        rate, tested, rebuild, engine = measure(ids, variant, args.budget, args)
        row = {"date": str(date.today()), "torch": torch.__version__, "context": len(ids), "budget": args.budget,
               "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else platform.machine(),
               "setting": variant, "acceptance": rate, "error": math.sqrt(rate * (1 - rate) / tested),
               "rebuild_ms": rebuild}
        name = ", ".join(f"{key} {value}" for key, value in variant.items()) or "default"
        print(f"{name:<72}{rate:>12.4f}{row['error']:>8.4f}{rebuild:>12.2f}", flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", help="a file to continue; default: CPython's language reference")
    p.add_argument("--context", type=int, default=16384)
    p.add_argument("--budget", type=int, default=1024)
    p.add_argument("--seeds", type=int, default=8)
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction)
    p.add_argument("--out", help="append JSON lines to this file")
    p.set_defaults(plot=None)
    run_or_plot(run, None, p.parse_args())


if __name__ == "__main__":
    main()
