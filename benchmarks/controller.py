"""How near the controller comes to the best fixed plan: simulated texts, on any machine, in some minutes.

    python benchmarks/controller.py

Steps take what they took on a GPU or a CPU. Levels keep what is drafted with given chances, less in the hard stretches
that each text has. The controller begins with a wrong guess of all times. First, by setting and acceptance: the time
per token over that of the best fixed plan, of a first text and of the next one. Then, where nearly nothing drafted is
right: the time over that of autoregression, of first texts and of next ones of so many tokens.
"""

import argparse
import copy
import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from statistics import mean

from triforce.decode.controller import Controller, Costs
from triforce.decode.drafters.ngram import NgramMeter
from triforce.decode.plan import LENGTHS, PADDED, DraftPlan, Padding

ROW = 0.08  # on a CPU a further row takes so much of the first
UNPADDED, ONE_ROW = Padding(False, False, False), Padding(plain=False)


def by_rows(first: float, most: int) -> dict[int, float]:
    return {1 + count: first * (1 + ROW * count) for count in {0, *(n for n in LENGTHS if n < most), most}}


# Costs, padding, tokens that the full level and the retrieval level check, rows.
SETTINGS = {
    "7B, 122,880": (Costs({16: 20.5}, {5: 5.4}, {"model": (0.25, 0.2)}, plain=20.0), ONE_ROW, 15, 4, 1),
    "8B, 32,768": (Costs({16: 8.6}, {5: 5.5}, {"model": (0.35, 0.3)}, plain=8.4), ONE_ROW, 15, 4, 1),
    "1.5B, 0.5B": (Costs({16: 4.9}, {5: 2.3}, {"model": (0.7, 0.6)}, plain=4.8), ONE_ROW, 15, 4, 1),
    "1.5B, n-grams": (Costs({10: 3.95}, {5: 2.2}, {"model": (1.3, 1.0), "ngram": (0.2, 0.0)}), PADDED, 9, 4, 1),
    "7B, offloaded": (Costs({64: 1180.0}, {5: 5.5}, {"model": (0.3, 0.25)}), PADDED, 63, 4, 1),
    "a CPU": (Costs(by_rows(12.0, 7), by_rows(6.0, 3), {"model": (1.0, 0.9)}), UNPADDED, 7, 3, 1),
    "a CPU, n-grams": (Costs(by_rows(12.0, 7), {}, {"model": (1.0, 0.9), "ngram": (0.05, 0.0)}), UNPADDED, 7, 3, 1),
    "batch of 16": (Costs({16: 26.0}, {5: 9.0}, {"model": (0.5, 0.4)}, plain=24.0), ONE_ROW, 15, 4, 16),
}
RATES = [(0.97, 0.75, 0.9), (0.93, 0.6, 0.4), (0.93, 0.3, 0.1), (0.85, 0.6, 0.1), (0.8, 0.1, 0.05), (0.5, 0.6, 0.6)]
NO_GOOD, TOKENS = (0.05, 0.03, 0.02), (32, 64, 128, 256)


def milliseconds(costs: Costs, plan: DraftPlan) -> tuple[float, float]:
    """Of a round of a plan: drafting, and checking."""
    return float(costs.drafting(plan) @ costs.values), float(costs.checking(plan) @ costs.values)


def of_run(rate: float, run: int) -> float:
    """The chance of a looked-up token after `run` right ones: quotations come in runs."""
    return rate / 2 if run == 0 else rate if run < 4 else 1 - (1 - rate) / 3


def kept(rng: random.Random, rate: float, count: int) -> int:
    """Of so many drafted tokens, those before the first that is not kept."""
    return next((i for i in range(count) if rng.random() >= rate), count)


def one_round(rng: random.Random, plan: DraftPlan, rates: dict[str, float],
              quoted: Sequence[bool] = ()) -> tuple[int, dict[str, tuple[int, int]]]:
    """Tokens that a round emits if the levels keep with these chances, and (hits, tests) by level, as a controller is
    told: of tokens that were kept, and of the first that was not. quoted: whether looking up finds the next tokens."""
    drafted, seen = plan.gamma, {}

    def right(source: str, at: int, count: int) -> int:
        if source != "ngram":
            return kept(rng, rates[source], count)
        return [*quoted[at : at + count], False].index(False)

    if plan.retrieval and plan.source:
        origins = ""  # k: kept by the retrieval level; m: its own, where the draft missed; b: a bonus
        for _ in range(plan.rounds):
            count = right(plan.source, len(origins), plan.gamma_inner)
            origins += "k" * count + ("m" if count < plan.gamma_inner else "b")
        origins = origins[: plan.gamma]
        drafted = len(origins)
    if plan.gamma == 0:
        return 1, seen
    checked = "retrieval" if plan.retrieval else plan.source
    count = right(checked, 0, drafted)
    seen[checked] = count, count + (count < drafted)
    if plan.retrieval and plan.source:
        hits = origins[:count].count("k")
        seen[plan.source] = hits, hits + origins[:count].count("m")
    return count + 1, seen


def time_per_token(setting: tuple, rates: tuple, tokens: int, seed: int, controller: Controller | None = None,
                   plan: DraftPlan | None = None) -> float:
    """Of one text, by a controller or by a fixed plan."""
    costs, _, _, _, rows = setting
    rng, meter, spent, done, hard = random.Random(seed), NgramMeter([0]), 0.0, 0.0, 0.0
    quoted, run = [], 0
    while done < tokens:
        while len(quoted) < done + 400:
            quoted.append(rng.random() < of_run(rates[2], run))
            run = run + 1 if quoted[-1] else 0
        now = plan or controller.choose(tokens - done, meter.emitted(64))
        hard = rng.randint(5, 25) if hard <= 0 and rng.random() < 0.04 else hard
        chances = {name: rate * (0.7 if hard > 0 else 1.0)
                   for name, rate in zip(("retrieval", "model", "ngram"), rates, strict=True)}
        counts, seen = [], {}
        for _ in range(rows):
            count, told = one_round(rng, now, chances, quoted[round(done) :])
            counts.append(count)
            for name, (hits, tests) in told.items():
                before = seen.get(name, (0, 0))
                seen[name] = before[0] + hits, before[1] + tests
        took, count = milliseconds(costs, now), mean(counts)
        for found in quoted[round(done) : round(done + count)]:
            meter.judge(found)
        spent, done, hard = spent + sum(took), done + count, hard - count
        if controller is not None:
            controller.timed(now, *(one * rng.uniform(0.98, 1.02) for one in took))
            controller.update(count, **seen)
    return spent / done


def two_texts(setting: tuple, rates: tuple, tokens: int, seed: int) -> tuple[float, float]:
    """Times per token of a first text, of which what steps take is guessed, and of the next one."""
    costs, padding, gamma, inner, _ = setting
    learned = copy.deepcopy(costs)
    learned.values *= [0.6 if what in ("verify", "plain") else 0.3 for what, _ in learned.number]
    learned.seen[:] = 0
    first = Controller(learned, gamma, inner, padding)
    found = time_per_token(setting, rates, tokens, seed, first)
    for rate in first.rates.values():
        rate.begin()
    return found, time_per_token(setting, rates, tokens, seed + 1, Controller(learned, gamma, inner, padding,
                                                                              rates=first.rates))


def best_fixed(setting: tuple, rates: tuple, tokens: int, texts: int) -> float:
    """The time per token of the best plan, of those that are the best by some rates near these."""
    costs, padding, gamma, inner, _ = setting
    controller, plans = Controller(copy.deepcopy(costs), gamma, inner, padding), set()
    for share in (1.0, 0.95, 0.9, 0.8):
        chances = {name: rate * share for name, rate in zip(("retrieval", "model", "ngram"), rates, strict=True)}
        found = accumulate((of_run(chances["ngram"], run) for run in range(64)), mul, initial=1.0)
        plans.add(controller.plans[int(controller.times_per_token(chances, [*accumulate(found)]).argmin())])
    return min(mean(time_per_token(setting, rates, tokens, seed, plan=plan) for seed in range(texts)) for plan in plans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--texts", type=int, default=10)
    args = parser.parse_args()

    def texts(setting: tuple, rates: tuple, tokens: int) -> list[float]:
        return [mean(times) for times in zip(*(two_texts(setting, rates, tokens, seed) for seed in range(args.texts)),
                                             strict=True)]

    print("over the best fixed plan\n" + " " * 20 + "".join(f"{' '.join(map(str, rates)):>15}" for rates in RATES))
    every = []
    for name, setting in SETTINGS.items():
        best = [best_fixed(setting, rates, args.tokens, args.texts) for rates in RATES]
        found = [texts(setting, rates, args.tokens) for rates in RATES]
        line = [[time / least for time in times] for times, least in zip(found, best, strict=True)]
        every += [ratio for pair in line for ratio in pair]
        print(f"{name:<20}" + "".join(f"{first:>9.3f} {then:.3f}" for first, then in line), flush=True)
    print(f"mean {mean(every):.3f}, worst {max(every):.3f}\n\nwhere drafts are no good, over autoregression")
    for name, setting in SETTINGS.items():
        plain = sum(milliseconds(setting[0], DraftPlan(padded=setting[1].plain)))
        line = [[time / plain for time in texts(setting, NO_GOOD, tokens)] for tokens in TOKENS]
        print(f"{name:<20}" + "".join(f"{tokens:>7}: {first:.3f} {then:.3f}" for tokens, (first, then) in
                                      zip(TOKENS, line, strict=True)), flush=True)


if __name__ == "__main__":
    main()
