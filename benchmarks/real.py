"""Real weights on real texts: what each way to choose a view is worth, and what a token takes.

    triforce convert --gguf target.gguf --out target; triforce convert --gguf draft.gguf --out draft
    python benchmarks/real.py acceptance --checkpoint target --text code.txt book.txt --contexts 32768 122880 --yarn 4
    python benchmarks/real.py speed --checkpoint target --draft draft --text code.txt book.txt --contexts 122880 \
        --yarn 4 --peers --out rows.jsonl

`acceptance` goes on with the text itself (teacher forcing), --rows tokens at a time. A level with a view sees what lies
before these rows through the view, the full level sees all of it. For each way to choose, at each budget: the chance
that a token which the view's level draws is kept (the sum of the smaller of both probabilities), the mean over
--positions tokens.

With --draft, the draft model too, over its first and newest tokens (--draft-windows).

`speed` generates: medians over --seeds texts of --max-new-tokens each, which go on from as many places of a file, the
whole call (prefill and --whole tokens), autoregression, and with --peers transformers on the same weights (by itself,
assisted by the same draft, with prompt lookup). A text that loops flatters every draft, so the share of its 8-grams
that it has said before stands beside its time. --question asks this after the text, in the model's chat template.
--yarn stretches a window by this factor. Each --setting is measured in turn, and a table at the end has a line for
each. --quick does a few minutes of it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import harness
import torch
from on_chip import transformers_times
from torch import Tensor

import triforce
from triforce import Engine, attention
from triforce.cache.blocks import prefill_blocks
from triforce.cache.kv_cache import KVCache
from triforce.hf.folders import resolve
from triforce.model import Transformer

SINK, RECENT = 8, 0.25  # tokens, and the share of the budget, that every view holds
QUERIES = 16  # of the latest tokens, that choose a view which stays
GRAM = 8
MOST = 8192  # tokens of a distribution that top_p leaves, at most


@dataclass
class Seen:
    """What one layer's choice can go by.

    k: [K, S, D], all that lies before the rows. q: the rows' queries [K, G * M, D]; latest: those of the tokens before,
    [K, G * n, D].
    """

    k: Tensor
    q: Tensor
    latest: Tensor
    rows: int
    budget: int

    @property
    def window(self) -> int:
        return int(RECENT * self.budget)

    @property
    def candidates(self) -> slice:
        return slice(SINK, self.k.shape[1] - self.window)

    def means(self, chunk: int) -> Tensor:
        """Mean keys of the chunks to choose from: [K, C, D]."""
        k = self.k[:, self.candidates]
        return k[:, : k.shape[1] // chunk * chunk].unflatten(1, (-1, chunk)).float().mean(2).to(k.dtype)

    def mass(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What each row's queries pay to each of keys [K, C, D], over the heads that share it: [K, M, C] float32."""
        scores = (queries * queries.shape[-1] ** -0.5 @ keys.transpose(1, 2)).float()
        return scores.softmax(-1).unflatten(1, (-1, self.rows if queries is self.q else 1)).sum(1)

    def spread(self, chosen: Tensor, chunk: int) -> Tensor:
        """Chunks [K, M or 1, n] that are chosen -> the tokens of the view, boolean [K, M or 1, S]."""
        visible = torch.zeros(*chosen.shape[:2], self.k.shape[1], dtype=torch.bool, device=self.k.device)
        visible[..., :SINK] = True
        visible[..., self.k.shape[1] - self.window :] = True
        tokens = SINK + (chosen[..., None] * chunk + torch.arange(chunk, device=chosen.device)).flatten(2)
        return visible.scatter_(2, tokens, True)

    def count(self, chunk: int) -> int:
        return (self.budget - SINK - self.window) // chunk


def streaming(seen: Seen) -> Tensor:
    visible = torch.zeros(1, 1, seen.k.shape[1], dtype=torch.bool, device=seen.k.device)
    visible[..., :SINK] = True
    visible[..., seen.k.shape[1] - seen.budget + SINK :] = True
    return visible


def stays(seen: Seen) -> Tensor:
    """By the mean keys of chunks of 8 and the queries of the tokens before the rows: as a view that is chosen anew for
    every verify."""
    mass = seen.mass(seen.latest, seen.means(8))
    return seen.spread(mass.sum(1, keepdim=True).topk(seen.count(8)).indices, 8)


def follows(seen: Seen, chunk: int = 8, every: int = 1) -> Tensor:
    """By the rows' own queries: `every` rows by the first one's, for steps of so many rows. (By all of them would bias
    rejection sampling: a distribution must not depend on what is checked against it.)"""
    mass = first_of(seen.mass(seen.q, seen.means(chunk)), every)
    return seen.spread(mass.topk(seen.count(chunk)).indices, chunk)


def first_of(mass: Tensor, every: int) -> Tensor:
    return mass[:, ::every].repeat_interleave(every, 1)[:, : mass.shape[1]]


def classes(seen: Seen, chunk: int = 8, every: int = 1, best: int = 1) -> Tensor:
    """As `follows`, but the `best` chunks of each residue class: a maximum over rows of a table, where the best of all
    would have to be sorted out."""
    mass, number = first_of(seen.mass(seen.q, seen.means(chunk)), every), seen.count(chunk) // best
    rows = -(-mass.shape[2] // number)
    table = torch.nn.functional.pad(mass, (0, rows * number - mass.shape[2]), value=-1.0).unflatten(2, (rows, number))
    chosen = table.topk(min(best, rows), 2).indices * number + torch.arange(number, device=mass.device)
    return seen.spread(chosen.flatten(2).clamp(max=mass.shape[2] - 1), chunk)


def oracle(seen: Seen) -> Tensor:
    """By what each row's own queries really pay to each token."""
    return seen.spread(seen.mass(seen.q, seen.k[:, seen.candidates]).topk(seen.count(1)).indices, 1)


WAYS: dict[str, Callable[[Seen], Tensor]] = {
    "streaming": streaming, "stays": stays, "follows": follows,
    "follows, chunks of 16": lambda seen: follows(seen, 16), "follows, chunks of 4": lambda seen: follows(seen, 4),
    "follows, every 2": lambda seen: follows(seen, every=2), "follows, every 4": lambda seen: follows(seen, every=4),
    "classes": classes, "classes, best 4": lambda seen: classes(seen, best=4), "oracle": oracle}


class Rows:
    """`kv` of some rows after `start` exact tokens: see `triforce.cache.store`. Their own keys are those that the view
    leads to.

    Args:
        way: chooses what they see. None: all.
    """

    def __init__(self, cache: KVCache, start: int, rows: int, way, budget: int, latest: list[Tensor]):
        self.cache, self.start, self.rows, self.way, self.budget, self.latest = cache, start, rows, way, budget, latest
        self.cos, self.sin = cache.rope(torch.arange(start, start + rows, device=cache.prefix.len.device))

    def layer(self, i: int) -> "Rows":
        self.i, self.turned = i, self.cache.rope.of_layer(i, self.cos, self.sin)
        return self

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        config = self.cache.config
        q, k, self.v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], 1)
        self.k = attention.rotate(k, *self.turned)
        return attention.fold(attention.rotate(q, *self.turned), config.n_kv_head), []

    def read(self, q: Tensor) -> list:
        k, v = (x[self.i][:, :, : self.start] for x in (self.cache.prefix.k, self.cache.prefix.v))
        group = self.cache.group
        visible = torch.ones(1, self.rows, self.start, dtype=torch.bool, device=q.device)
        if self.way is not None:
            latest = self.latest[self.i] if self.latest else q[0]
            visible = self.way(Seen(k[0], q[0], latest, self.rows, self.budget)).expand(-1, self.rows, -1)
        own = torch.ones(self.rows, self.rows, dtype=torch.bool, device=q.device).tril()
        seen = torch.cat([visible, own.expand(len(visible), -1, -1)], 2)  # [K or 1, M, S + M]
        bias = torch.where(seen, 0.0, attention.HIDDEN).repeat(1, group, 1)
        k, v = torch.cat([k, self.k], 2)[0], torch.cat([v, self.v], 2)[0]
        scores = (q[0] * q.shape[-1] ** -0.5 @ k.transpose(1, 2)).float() + bias
        self.queries = q[0]
        return [((scores.softmax(-1).to(v.dtype) @ v)[None], scores.logsumexp(-1)[None])]


def forced(model: Transformer, cache: KVCache, ids: Tensor, start: int, positions: int, rows: int, way, budget: int,
           ) -> Iterator[Tensor]:
    """Logits [rows, V] after the text's own tokens, for `positions` tokens from `start` on."""
    latest = []
    for begin in range(start, start + positions, rows):
        block = Rows(cache, begin, rows, way, budget, latest)
        queries, x = [], model.embedding(ids[:, begin : begin + rows])
        for i, layer in enumerate(model.layers):
            x = layer(x, block.layer(i))
            queries.append(block.queries)
        latest = queries
        yield model.output(model.norm(x))[0].float()


def filled(model: Transformer, ids: Tensor, engine: Engine) -> KVCache:
    """A cache of the text."""
    total = ids.shape[1]
    cache = KVCache(model.config, model.rope, batch=1, capacity=total, block_size=1, flush_interval=1, chunk_size=0,
                    device=engine.device, dtype=model.dtype)
    blocks = prefill_blocks(cache, range(1), 0, total, engine.settings.prefill_chunk_size)
    model.prefill(ids, blocks, cache_only=True)
    return cache


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    probs = (logits / temperature).softmax(-1)
    if top_p == 1:
        return probs
    best, order = probs.topk(min(MOST, probs.shape[1]))
    best = torch.where(best.cumsum(-1) - best < top_p, best, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, best / best.sum(-1, keepdim=True))


@torch.inference_mode()
def acceptance(engine: Engine, ids: list[int], context: int, args) -> dict[str, dict[str, float]]:
    """Of one text: by way and budget, the chance that a token is kept, for each temperature."""
    row = torch.tensor([ids[: context + args.positions]], device=engine.device)
    laws, found = ((0.6, 0.9), (1.0, 1.0)), {}

    def logits(model: Transformer, cache: KVCache, way, budget: int) -> Iterator[Tensor]:
        for rows in forced(model, cache, row, context, args.positions, args.rows, way, budget):
            yield rows[:, : engine.vocab_size]

    cache = filled(engine.target, row, engine)
    exact = [[distribution(rows, *law) for law in laws] for rows in logits(engine.target, cache, None, 0)]
    tries = [(name, engine.target, budget) for budget in args.budgets for name in args.ways]
    if engine.draft is not None:
        tries += [("draft", engine.draft, window + SINK) for window in args.draft_windows]
    for name, model, budget in tries:
        begun, chances = time.perf_counter(), {law: [] for law in laws}
        if model is not engine.target and cache.config is engine.target.config:
            cache = filled(model, row, engine)
        way = WAYS.get(name, streaming if budget < context else None)
        for exactly, rows in zip(exact, logits(model, cache, way, budget), strict=True):
            for p, (law, seen) in zip(exactly, chances.items(), strict=True):
                seen.append(torch.minimum(p, distribution(rows, *law)).sum(-1))
        kept = {f"T {law[0]}": round(torch.cat(seen).mean().item(), 4) for law, seen in chances.items()}
        found[f"{name}, {budget}"] = kept
        print(f"{name:<24}{budget:>7,}  " + "  ".join(f"{key} {value:.3f}" for key, value in kept.items())
              + f"  ({time.perf_counter() - begun:.0f} s)", flush=True)
    return found


def repeated(tokens: list[int]) -> float:
    """The share of a text's 8-grams that it has said before."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / max(len(grams), 1)


def speed(engine: Engine, prompts: list[list[int]], args) -> dict[str, float]:
    """Of prompts, one for each seed: medians for each temperature; seconds of whole calls."""
    begun, row, runs = time.perf_counter(), {}, {}

    def law(temperature: float) -> dict:
        return {"temperature": temperature, "top_p": 1.0 if temperature == 1 else args.top_p, "ignore_eos": True}

    for seed, ids in enumerate(prompts):
        for temperature in args.temperatures:
            if seed == 0:
                engine.generate(ids, min(64, args.max_new_tokens), seed=0, **law(temperature))
                row.setdefault("first_call_s", time.perf_counter() - begun)
            run = engine.generate(ids, args.max_new_tokens, seed=seed, **law(temperature))
            runs.setdefault(temperature, []).append(run)
            if controller := engine.buffers.state.pilot.controller:  # gamma="auto": what it knows at the end
                row[f"T{temperature:g}_plan"] = str(controller.plan)
                row[f"T{temperature:g}_rates"] = {name: round(rate.mean, 3) for name, rate in controller.rates.items()}
                row["costs_ms"] = {" ".join(map(str, part)): round(float(controller.costs.values[at]), 2)
                                   for part, at in controller.costs.number.items()}
    for temperature, some in runs.items():
        every = {"ms": [run.stats.tbt * 1e3 for run in some], "loops": [repeated(run.tokens) for run in some],
                 "tokens_a_verify": [run.stats.block_efficiency for run in some]}
        for name, values in every.items():
            row[f"T{temperature:g}_{name}"] = statistics.median(values)
        row[f"T{temperature:g}_ms_by_text"] = [round(value, 2) for value in every["ms"]]
    ids = prompts[0]
    for _ in range(2):  # the first records the step
        plain = engine.generate(ids, 48, seed=0, speculate=False, one_row=True, ignore_eos=True)
    row |= {"autoregression_ms": plain.stats.tbt * 1e3, "peak_memory_gib": run.stats.peak_memory / 2**30}
    for count in args.whole:
        engine.buffers.state.reset()  # prefills anew
        begun = time.perf_counter()
        run = engine.generate(ids, count, seed=0, **law(args.temperatures[0]))
        row[f"whole_{count}_s"] = time.perf_counter() - begun
        row[f"ttft_{count}_s"], row[f"compiling_{count}_s"] = run.stats.ttft, run.stats.compiling
    if args.peers:
        args.temperature = args.temperatures[0]
        engine.release()
        peers = [None if folder is None else peer(folder, engine) for folder in (args.checkpoint, args.draft)]
        row |= transformers_times(*peers, ids, args)
    return row


def peer(folder: str, engine: Engine):
    """transformers' own model of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=engine.target.dtype).to(engine.device).eval()


def table(rows: list[dict], whole: list[int]) -> str:
    """Whole calls in seconds, and tokens in milliseconds: transformers at its fastest, no drafts, with drafts."""
    head = ["text", "tokens"] + [f"{who}, {what}" for what in (*(f"{n} new, s" for n in whole), "ms a token")
                                 for who in ("transformers", "no drafts", "triforce")]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        peers = [value for name, value in row.items() if name.startswith("transformers") and name.endswith("_tbt_ms")]
        ms = {"peer": min(peers, default=None), "plain": row["autoregression_ms"],
              "ours": row[next(name for name in row if name.endswith("_ms") and name.startswith("T"))]}
        cells = [row["text"], f"{row['context']:,}"]
        for count in whole:
            first = {"peer": row.get("transformers_prefill_s"), "plain": row[f"ttft_{count}_s"]}  # of the same call
            cells += ["" if ms[who] is None else f"{first[who] + (count - 1) * ms[who] / 1e3:.1f}"
                      for who in ("peer", "plain")] + [f"{row[f'whole_{count}_s']:.1f}"]
        cells += ["" if value is None else f"{value:.2f}" for value in ms.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "Whole calls of others: their first token's time, and their time a token for the rest."])


def stretched(folder: str, factor: float, place: Path) -> str:
    """The same folder with YaRN by this factor in its config.json."""
    if factor == 1:
        return folder
    made = place / Path(folder).resolve().name
    made.mkdir()
    for path in Path(folder).resolve().iterdir():
        (made / path.name).symlink_to(path)
    config = json.loads((made / "config.json").read_text())
    window = config["max_position_embeddings"]
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    config[key] = {**(config.get(key) or {}), "rope_type": "yarn", "factor": factor,
                   "original_max_position_embeddings": window}
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def run(args) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        checkpoint, draft = (None if one is None else stretched(str(resolve(one)), args.yarn, Path(place))
                             for one in (args.checkpoint, args.draft))
        args.checkpoint, args.draft = checkpoint, draft
        for setting in args.setting:
            rows += measured(args, setting)
    if args.what == "speed":
        print(table(rows, args.whole))


def measured(args, setting: dict) -> list[dict]:
    """A row for each text and context."""
    engine = triforce.load(args.checkpoint, draft=args.draft or False, device=args.device, dtype=args.dtype,
                           compile=args.compile, offload=args.offload, **setting)
    machine = {"device": harness.device_name(args.device), "torch": torch.__version__, "date": str(date.today()),
               "what": args.what, "checkpoint": Path(args.checkpoint).name, "dtype": engine.target.dtype_name,
               "yarn": args.yarn, "compile": args.compile, "offload": args.offload, **setting}
    rows = []
    for path in args.text:
        ids = engine.encode_prompt(harness.read_text(path))
        for context in args.contexts:
            if len(ids) < context + args.positions:
                raise SystemExit(f"{path} has {len(ids):,} tokens, and {context + args.positions:,} are needed")
            title = f"{Path(path).stem}, {context:,} tokens {setting or ''}"
            about = {"text": Path(path).stem, "context": context}
            if args.what == "acceptance":
                print(f"--- {title}", flush=True)
                about |= {"positions": args.positions, "rows": args.rows}
                row = about | {"kept": acceptance(engine, ids, context, args)}
                if args.out:
                    harness.append(args.out, machine | row)
            else:
                apart = (len(ids) - context) // args.seeds
                prompts = [ids[seed * apart :][:context] for seed in range(args.seeds)]
                if args.question:
                    about["question"] = args.question
                    texts = [engine.tokenizer.decode(prompt) + "\n\n" + args.question for prompt in prompts]
                    prompts = [engine.encode_prompt([{"role": "user", "content": text}]) for text in texts]
                row = about | speed(engine, prompts, args)
                harness.report(title, row, machine, args.out)
            rows.append(row)
    engine.release()  # or the caches count as the next setting's memory, too
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("acceptance", "speed"))
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--draft", help="the draft model of `speed`; default: none")
    p.add_argument("--text", nargs="+", required=True, help="text files")
    p.add_argument("--contexts", type=int, nargs="+", default=[32768])
    p.add_argument("--yarn", type=float, default=1.0)
    p.add_argument("--positions", type=int, default=1024, help="tokens that are looked at, after each context")
    p.add_argument("--rows", type=int, default=8, help="tokens between two looks at the exact text")
    p.add_argument("--budgets", type=int, nargs="+", default=[4096])
    p.add_argument("--draft-windows", type=int, nargs="+", default=[256, 1024, 4096, 10**9], help="newest tokens")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0, 0.0])
    p.add_argument("--top-p", type=float, default=0.9)
    p.add_argument("--question")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--seeds", type=int, default=6)
    p.add_argument("--whole", type=int, nargs="*", default=[256, 2048], help="new tokens of whole calls")
    p.add_argument("--setting", type=json.loads, nargs="+", default=[{}],
                   help='options of `load`, as JSON: {"draft_window": 1024}')
    p.add_argument("--quick", action="store_true", help="a few minutes: one temperature, 3 texts, peers")
    p.add_argument("--device")
    p.add_argument("--dtype", default=None)
    p.add_argument("--compile", action="store_true", default=None)
    p.add_argument("--offload", action="store_true")
    p.add_argument("--peers", action="store_true")
    p.add_argument("--peer-tokens", type=int, default=64)
    p.add_argument("--out", help="a file of JSON lines")
    args = p.parse_args()
    args.plot = None
    if args.quick:
        args.temperatures, args.seeds, args.peers = args.temperatures[:1], 3, True
    harness.run_or_plot(run, None, args)


if __name__ == "__main__":
    sys.exit(main())
