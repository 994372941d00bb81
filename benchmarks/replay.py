"""Chains and trees on paper: the draws of a full cache, replayed against those of a view of it.

    python benchmarks/replay.py --text book.txt --out rows.jsonl        # minutes, on a CPU

Along a text, each position is drawn twice with the same noise: by all tokens before it, and by the newest ones alone,
as a view would have them. Which choice of the view the full draw is (the first, the second, ..., none) is all that a
verify needs. So rounds are replayed, with the times of steps that were measured on a GPU: chains by rejection, coupled
chains, coupled trees, each as the controller chooses, and trees of fixed shapes. Prints milliseconds a token and tokens
a verify. What the cheap draft proposes to the retrieval level is kept at random, at a given rate.
"""

import argparse
import random
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from controller import kept
from harness import read_text, report, run_or_plot
from torch import Tensor

import triforce
from triforce.controller import Controller
from triforce.costs import Costs
from triforce.coupled import exponential
from triforce.pilot import Tally
from triforce.plan import Plan
from triforce.sampling import SamplingParams, key_of, probabilities
from triforce.speculator import RowRound
from triforce.tape import ACCEPTED, BONUS, LEAF, MISSED
from triforce.tree import Chances, likeliest

VERIFY = {"8B, offloaded": (315.0, 301.0), "7B, offloaded": (1190.0, 1200.0)}  # milliseconds: of a chain of 63, a tree
RETRIEVAL, LEAVES, GROWTH, DRAFT = 6.0, 1.3, 8.2, (0.25, 0.2)  # LEAVES: more, of a retrieval step that checks some
BLOCK, SIZE, WIDTH, INNER = 64, 512, 64, 4
FIXED = [(spine, rounds, branch) for spine, rounds in ((24, 9), (32, 12), (48, 16), (63, 20)) for branch in (4, 8, 12)]
CHANCES = Chances(0.94, (0.045, 0.005, 0.001))  # that fixed trees are shaped by
STEP = 256  # positions that a view serves
SEED, NONE = 5, 9  # NONE: the full draw is none of the view's first choices


class Text(NamedTuple):
    ranks: list[int]  # at each position: which choice of the view the full cache draws
    kept: list[bool]  # whether rejection sampling keeps what the view drafts


def logits_at(engine, ids: list[int], start: int, args) -> tuple[Tensor, Tensor]:
    """Of all positions behind a place of the text: by the full cache, and by a view. [1, positions, V] each."""
    ids = ids[start : start + args.context + args.positions]
    views = [engine.logits([ids[at - args.window : at + STEP]], last=STEP)
             for at in range(args.context, len(ids), STEP)]
    return engine.logits([ids], last=args.positions), torch.cat(views, 1)


def text_of(logits: tuple[Tensor, Tensor], law: dict) -> Text:
    params = SamplingParams(1, "cpu", logits[0].shape[-1])
    params.set(**law, top_k=None, min_p=None, seed=[SEED])
    full, view = (probabilities(one, params) for one in logits)
    position = torch.arange(full.shape[1])[None]
    noise = exponential(key_of(params.seed, position)[..., None], torch.arange(full.shape[-1]))
    drawn = (noise / full.double()).argmin(-1)
    choices = (noise / view.double()).topk(4, dim=-1, largest=False).indices
    same = choices == drawn[..., None]
    ranks = torch.where(same.any(-1), same.long().argmax(-1), NONE)[0]
    distance = (full - view).abs().sum(-1)[0] / 2
    uniform = torch.rand(len(distance), generator=torch.Generator().manual_seed(SEED))
    return Text(ranks.tolist(), (uniform < 1 - distance).tolist())


def one_round(dice: random.Random, plan: Plan, text: Text, at: int, rule: str, args) -> RowRound:
    """A round whose pending token stands at `at`."""
    origins: list[int] = []
    for _ in range(plan.rounds):
        right = kept(dice, args.draft_kept, plan.gamma_inner)
        origins += [ACCEPTED] * right
        if right == plan.gamma_inner:
            origins.append(BONUS)
        else:
            origins += [LEAF, BONUS] if rule != "rejection" and dice.random() < args.leaf_kept else [MISSED]
    drafted = min(len(origins), plan.gamma)
    fits = text.kept if rule == "rejection" else [rank == 0 for rank in text.ranks]
    accepted = next((i for i in range(drafted) if not fits[at + 1 + i]), drafted)
    path = list(range(accepted + 1))
    while plan.branches and not (path[-1] <= plan.shape.spine and path[-1] >= drafted):
        rank, here = text.ranks[at + len(path)], path[-1]
        beside = [row for row in plan.shape.followers[here] if plan.shape.rank(row) == rank
                  and (rank > 0 or here > plan.shape.spine)]
        if not beside:
            break
        path.append(beside[0])
    padded = (origins + [0] * BLOCK)[: BLOCK - 1]
    return RowRound([0] * len(path), padded, accepted, drafted, False, len(path) - 1 - accepted, path)


def replay(rule: str, costs: Costs, corpus: list[Text], args, plan: Plan | None = None) -> dict[str, float]:
    """plan: of all rounds. None: the controller's."""
    spent, verifies, tokens = [], 0, 0
    for seed, (text, start) in enumerate((text, start) for text in corpus
                                         for start in range(0, args.positions - 2 * args.new_tokens, args.new_tokens)):
        dice, at, took = random.Random(seed), start, 0.0
        controller = Controller(costs, BLOCK - 1, INNER, leaves=(False, rule != "rejection"),
                                trees=(SIZE, WIDTH) if rule == "tree" else None)
        while at < start + args.new_tokens:
            now = plan or controller.choose()
            brought = one_round(dice, now, text, at, rule, args)
            tally = Tally(now)
            tally.add(brought)
            controller.update(tally.tokens_a_row, **tally.counts)
            took += sum(costs.milliseconds(now))
            at += len(brought.tokens)
            verifies += 1
        tokens += at - start
        spent.append(took / (at - start))
    return {"ms_a_token": fmean(spent), "tokens_a_verify": tokens / verifies, "texts": len(spent)}


def costs_of(rule: str, chain: float, tree: float) -> Costs:
    step = RETRIEVAL + (LEAVES if rule != "rejection" else 0.0)
    return Costs({BLOCK: tree if rule == "tree" else chain}, {1 + INNER: step}, {"model": DRAFT},
                 growth=GROWTH if rule == "tree" else None)


def run(args) -> None:
    engine = triforce.load("tiny", device="cpu")
    ids = engine.tokenizer.encode(read_text(args.text))
    needed = max(args.starts) + args.context + args.positions
    if needed > len(ids):
        raise SystemExit(f"the text has {len(ids):,} tokens, and --starts, --context and --positions need {needed:,}; "
                         "give a longer one")
    machine = {"checkpoint": "tiny", "context": args.context, "window": args.window, "new_tokens": args.new_tokens}
    logits = [logits_at(engine, ids, start, args) for start in args.starts]
    for law in ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.0, "top_p": 1.0}):
        corpus = [text_of(one, law) for one in logits]
        ranks = [rank for text in corpus for rank in text.ranks]
        shares = {"first": ranks.count(0), "second": ranks.count(1), "third": ranks.count(2)}
        share = fmean(one for text in corpus for one in text.kept)
        report("choices", {**law, "kept_by_rejection": share, **{name: n / len(ranks) for name, n in shares.items()}},
               machine, args.out)
        for shape, (chain, tree) in VERIFY.items():
            for rule in ("rejection", "coupled", "tree"):
                row = replay(rule, costs_of(rule, chain, tree), corpus, args)
                report(f"{shape}, {rule}", {"shape": shape, "rule": rule, **law, **row}, machine, args.out)
            found = []
            for spine, rounds, branch in FIXED:
                made, _ = likeliest(CHANCES, spine, branch, rows=SIZE, depth=BLOCK - 1, width=WIDTH)
                plan = replace(Plan(spine, "model", True, INNER, rounds), branches=made.length, shape=made)
                row = replay("tree", costs_of("tree", chain, tree), corpus, args, plan)
                found.append({**row, "spine": spine, "rounds": rounds, "branches": branch})
            best = min(found, key=lambda row: row["ms_a_token"])
            report(f"{shape}, best of {len(FIXED)} fixed trees", {"shape": shape, "rule": "fixed tree", **law, **best},
                   machine, args.out)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--text", help="a file; default: CPython's language reference")
    flags.add_argument("--starts", type=int, nargs="+", default=[0, 22_000, 52_000],
                       help="places of the text, in tokens")
    flags.add_argument("--context", type=int, default=8192, help="tokens before the first position")
    flags.add_argument("--window", type=int, default=4096, help="newest tokens that the view has")
    flags.add_argument("--positions", type=int, default=3072, help="of each place; a multiple of 256")
    flags.add_argument("--new-tokens", type=int, default=128, help="of each text")
    flags.add_argument("--draft-kept", type=float, default=0.55, help="share of the draft's tokens that is kept")
    flags.add_argument("--leaf-kept", type=float, default=0.35, help="share of the others where a leaf is")
    flags.add_argument("--out", help="append rows to this file")
    flags.set_defaults(plot=None)
    run_or_plot(run, None, flags.parse_args())
