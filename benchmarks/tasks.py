"""Tasks over long texts, answered in lossless and in lossy ways: how good the answers are, and what a token takes.

    python benchmarks/tasks.py --text book.txt --samples 4 --out rows.jsonl            # the embedded pair on a CPU
    python benchmarks/tasks.py --tasks recall vt --text book.txt --length 8192 --budgets 512 --sampled 2
    python benchmarks/tasks.py --read longbench-v2=data.json infinitebench=passkey.jsonl --checkpoint DIR --draft DIR
    python benchmarks/tasks.py --plot rows.jsonl                                       # the table and the plot

`--tasks` are made of any text and a seed (ruler.py), `--read KIND=FILE` takes the files of a suite (suites.py). Ways:

    full cache     autoregression, one token a step
    triforce       the hierarchy, which the full cache checks
    retrieval      the target over its retrieval view alone, at each of --budgets: nothing checks it (lossy.py)
    streaming      the same over the first and the newest tokens (StreamingLLM)
    snapkv         the same over the tokens that the prompt's end attends to (SnapKV)

All ways continue the same keys and values. The prompt is prefilled once, over the full cache; the lossy ways compute
its last tokens once more, over the full cache too, whose queries choose the view. So what StreamingLLM saves in a
prefill is not counted. An answer is identical if its tokens are the full cache's: greedy, those of the padded step,
whose bits are promised; drawn, those of the same seed. A drawn answer of the hierarchy follows the full cache's law,
and need not be the same text.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean, median

import torch

import triforce
from triforce.config import VIEWS
from triforce.engine import Engine
from triforce.errors import UserError, not_known

sys.path.insert(0, str(Path(__file__).parent))
import ruler  # noqa: E402
import suites  # noqa: E402
from harness import pyplot, read_rows, read_text, run_or_plot, save  # noqa: E402
from lossy import ViewEngine, lend  # noqa: E402
from samples import Sample  # noqa: E402

FULL, TRIFORCE = "full cache", "triforce"
WAYS = (FULL, TRIFORCE, *VIEWS)
LAST = 64  # tokens at a prompt's end, at least, that every lossy way computes for itself
MARKERS = dict(zip(WAYS, "s*ov^", strict=True))


def gather(args, tokenizer) -> list[Sample]:
    """All that is to be answered.

    Raises:
        UserError: a task, a kind or a file does not fit, or there is none.
    """
    samples: list[Sample] = []
    for pair in args.read:
        kind, _, path = pair.partition("=")
        if kind not in suites.KINDS:
            raise UserError(not_known(kind, "kind of file", suites.KINDS) + "; --read takes KIND=FILE")
        samples += suites.read(kind, Path(path), tokenizer, length=args.length, count=args.samples,
                               new_tokens=args.new_tokens)
    tasks = args.tasks if args.tasks is not None else [] if args.read else list(ruler.FAMILIES)
    for task in tasks:
        if task not in ruler.FAMILIES:
            raise UserError(not_known(task, "task", ruler.FAMILIES))
    if not tasks and not args.read:
        raise UserError("--tasks names no task, and there is no --read; name one, or leave --tasks out for all")
    source = ruler.Text(read_text(args.text)) if tasks else None
    samples += [ruler.make(task, source, tokenizer, length=args.length, number=number, seed=args.seed,
                           new_tokens=args.new_tokens) for task in tasks for number in range(args.samples)]
    return samples


def laws(args) -> list[dict]:
    """How answers are drawn: greedy, and with each seed."""
    drawn = [{"temperature": args.temperature, "top_p": args.top_p, "seed": seed} for seed in range(args.sampled)]
    return [{"temperature": 0.0, "top_p": 1.0, "seed": 0}, *drawn]


class Ways:
    """The engines, over the weights of one.

    Args:
        base: drafts as the hierarchy does.
    """

    def __init__(self, base: Engine, names: list[str], budgets: list[int]):
        for name in names:
            if name not in WAYS:
                raise UserError(not_known(name, "way", WAYS))
        self.base, self.names = base, names
        self.views = {(kind, budget): ViewEngine(base, kind, budget)
                      for kind in VIEWS if kind in names for budget in budgets}

    def answers(self, sample: Sample, args) -> Iterator[dict]:
        """A row for each way and each law."""
        common = {"task": sample.task, "sample": sample.number, "prompt_tokens": len(sample.prompt),
                  "dropped_tokens": sample.dropped, "wanted": list(sample.answers)}
        wanted: list[list[int]] = []

        def rows(way: str, engine: Engine, prompt: list[int], **how) -> Iterator[dict]:
            engine.generate(prompt, min(args.warm_up, sample.new_tokens), **laws(args)[-1], **how)
            for law, tokens in zip(laws(args), wanted, strict=True):
                result = engine.generate(prompt, sample.new_tokens, **law, **how)
                stats = result.stats
                yield {**common, "way": way, **law, "score": sample.scored(result.text),
                       "identical": result.tokens == tokens, "tbt_ms": stats.tbt * 1e3 if stats.tbt else None,
                       "tokens_per_verify": stats.block_efficiency if way in (FULL, TRIFORCE) else None,
                       "new_tokens": stats.new_tokens, "said": result.text[:200],
                       "budget": engine.resolve_budget(len(sample.prompt)) if way != FULL else None}

        for law in laws(args):  # greedy, the padded step: the one whose bits are promised
            how = {"speculate": False, "one_row": law["temperature"] > 0}
            wanted.append(self.base.generate(sample.prompt, sample.new_tokens, **law, **how).tokens)
        if FULL in self.names:
            yield from rows(FULL, self.base, sample.prompt, speculate=False, one_row=True)
        if TRIFORCE in self.names:
            yield from rows(TRIFORCE, self.base, sample.prompt)
        for (kind, _), engine in self.views.items():
            document = lend(self.base, sample.prompt, engine, LAST)
            yield from rows(kind, engine, sample.prompt[len(document) :], prefix=document)
            engine.release()
        self.base.release()


def run(args) -> None:
    names = ("draft", "device", "dtype", "chunk_size", "rebuild_interval", "compile")
    options = {name: getattr(args, name) for name in names}
    engine = triforce.load(args.checkpoint, **{name: value for name, value in options.items() if value is not None})
    if args.length > engine.room(0):
        raise UserError(f"--length {args.length} exceeds what the model can hold; give at most {engine.room(0)}")
    ways, samples = Ways(engine, args.ways, args.budgets), gather(args, engine.tokenizer_or_raise())
    machine, rows = about(engine, args), []
    if args.out:
        write(args.out, [])
    for sample in samples:
        for row in ways.answers(sample, args):
            rows.append({**machine, **row})
            law = f"drawn, seed {row['seed']}" if row["temperature"] else "greedy"
            print(f"{row['task']} {row['sample']}, {row['way']}, budget {row['budget']}, {law}: score {row['score']}, "
                  f"identical {row['identical']}, {row['tbt_ms'] or 0:.1f} ms a token", flush=True)
            if args.out:
                write(args.out, rows[-1:])
    print("\n".join(table(rows)))


def write(path: str, rows: list[dict]) -> None:
    """Appends rows to a file, which is made if need be.

    Raises:
        UserError: it cannot be written.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}; name a file that can be written") from None


def about(engine: Engine, args) -> dict:
    """What ran the rows."""
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"date": str(date.today()), "commit": commit(), "device": name, "torch": torch.__version__,
            "checkpoint": args.checkpoint, "widened": False, "dtype": str(engine.target.dtype).removeprefix("torch."),
            "chunk_size": engine.settings.chunk_size, "rebuild_interval": args.rebuild_interval, "length": args.length,
            "text": Path(args.text).name if args.text else "CPython's language reference", "task_seed": args.seed}


def commit() -> str | None:
    """Of the code that runs; None where it is no clone."""
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, check=True,
                              capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def grouped(rows: list[dict]) -> dict[tuple[bool, str, int | None], list[dict]]:
    """By (drawn, way, budget), in the order of WAYS. The hierarchy has one budget a prompt, which is not told apart."""
    groups: dict = {}
    for row in rows:
        key = row["temperature"] > 0, row["way"], row["budget"] if row["way"] in VIEWS else None
        groups.setdefault(key, []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (item[0][0], WAYS.index(item[0][1]), item[0][2] or 0)))


def mean_score(rows: list[dict]) -> float | None:
    """The mean over tasks of the mean over a task's answers. None: nothing is scored."""
    tasks = {row["task"] for row in rows if row["score"] is not None}
    return mean(mean(row["score"] for row in rows if row["task"] == task) for task in tasks) if tasks else None


def time_per_token(rows: list[dict]) -> float | None:
    """In milliseconds: the median over answers, which a busy machine disturbs least."""
    times = [row["tbt_ms"] for row in rows if row["tbt_ms"] is not None]
    return median(times) if times else None


def table(rows: list[dict]) -> list[str]:
    """Lines of Markdown: a row for each way, a column for each task's score."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["score"] is not None))
    names = ["answers", "way", "budget", *tasks, "identical", "ms a token", "tokens a verify"]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for (drawn, way, budget), group in grouped(rows).items():
        scores = [mean_score([row for row in group if row["task"] == task]) for task in tasks]
        took = time_per_token(group)
        verify = [row["tokens_per_verify"] for row in group if row["tokens_per_verify"] is not None]
        cells = ["drawn" if drawn else "greedy", way, "" if budget is None else f"{budget:,}",
                 *("-" if score is None else f"{score:.2f}" for score in scores),
                 f"{sum(row['identical'] for row in group)} of {len(group)}", "-" if took is None else f"{took:.1f}",
                 f"{mean(verify):.1f}" if verify else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(path: str) -> None:
    """Score against time per token, over the tasks at which the full cache scores at all; and the table."""
    rows, plt = read_rows(path), pyplot()
    print("\n".join(table(rows)))
    able = {row["task"] for row in rows if row["way"] == FULL and row["score"]}
    rows = [row for row in rows if row["task"] in able]
    if not rows:
        raise SystemExit(f"--plot {path}: the full cache scores at none of the tasks, so there is nothing to compare")
    kinds = sorted({row["temperature"] > 0 for row in rows})
    figure, panels = plt.subplots(1, len(kinds), figsize=(5.2 * len(kinds) + 0.6, 4.6), squeeze=False, sharey=True)
    for axes, drawn in zip(panels[0], kinds, strict=True):
        groups = {key[1:]: group for key, group in grouped(rows).items() if key[0] == drawn}
        axes.axhline(mean_score(groups[FULL, None]), color="grey", linestyle="--", linewidth=1)
        for way in WAYS:
            points = [(time_per_token(group), mean_score(group), budget) for (name, budget), group in groups.items()
                      if name == way and time_per_token(group) is not None]
            if not points:
                continue
            axes.plot([x for x, *_ in points], [y for _, y, _ in points], marker=MARKERS[way], linewidth=0.8,
                      markersize=12 if way == TRIFORCE else 7,
                      markerfacecolor="white" if way in VIEWS else None,
                      label=f"{way} alone" if way in VIEWS else way)
            for x, y, budget in points:
                if budget is not None:
                    axes.annotate(f"{budget:,}", (x, y), xytext=(0, -7), textcoords="offset points", fontsize=7,
                                  rotation=-55, va="top")
        axes.set_title("drawn" if drawn else "greedy", fontsize=10)
        axes.set_xlabel("milliseconds a token")
        axes.set_xlim(left=0)
        axes.set_ylim(-0.14, 1.06)
    panels[0][0].set_ylabel("mean score: " + ", ".join(sorted(able)), fontsize=8, wrap=True)
    panels[0][-1].legend(fontsize=8, loc="center right")
    save(figure, path, rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", default="tiny")
    p.add_argument("--draft", help="the hierarchy's draft model")
    p.add_argument("--device")
    p.add_argument("--dtype")
    p.add_argument("--tasks", nargs="*", help="those to make (default: all, or with --read none); known: "
                                              + ", ".join(ruler.FAMILIES))
    p.add_argument("--read", nargs="+", default=[], metavar="KIND=FILE", help="kinds: " + ", ".join(suites.KINDS))
    p.add_argument("--text", help="what tasks are made of, a book say (default: CPython's language reference)")
    p.add_argument("--length", type=int, default=16_384, help="tokens of a prompt and its answer, at most")
    p.add_argument("--samples", type=int, default=1, help="of each task")
    p.add_argument("--seed", type=int, default=0, help="of the tasks that are made")
    p.add_argument("--new-tokens", type=int, help="of an answer (default: as the suite has it)")
    p.add_argument("--ways", nargs="+", default=list(WAYS), help=", ".join(WAYS))
    p.add_argument("--budgets", type=int, nargs="+", default=[256, 1024, 4096], help="tokens of a lossy way's view")
    p.add_argument("--chunk-size", type=int)
    p.add_argument("--rebuild-interval", type=int, help="tokens between two choices of a retrieval view")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="wait for compiled steps, or have none")
    p.add_argument("--sampled", type=int, default=0, help="answers drawn of each prompt, with the seeds 0, 1, ...")
    p.add_argument("--temperature", type=float, default=0.6, help="of the drawn answers")
    p.add_argument("--top-p", type=float, default=0.9)
    p.add_argument("--warm-up", type=int, default=16, help="tokens of an untimed answer before a way's first")
    p.add_argument("--out", help="append rows to this file of JSON lines")
    p.add_argument("--plot", help="print the table of such a file, and draw its plot beside it")
    args = p.parse_args()
    for name in ("length", "samples", "new_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.sampled < 0 or args.temperature <= 0:
        raise SystemExit(f"--sampled {args.sampled} and --temperature {args.temperature}: must be at least 0, and "
                         "above 0; greedy answers are always given")
    run_or_plot(run, plot, args)


if __name__ == "__main__":
    main()
