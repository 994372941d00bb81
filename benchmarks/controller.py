"""How near the controller comes to the best fixed plan: simulated texts, on any machine, in a minute.

    python benchmarks/controller.py

Steps take what they took on an H200 or a CPU; levels keep what is drafted with given chances, less in the hard
stretches that each text has. Prints, for each, the time per token by the controller over that of the best fixed plan;
and the most that it loses to autoregression. Then the same of a controller that has to learn what steps take, on a
machine that is busy in the first rounds: over autoregression, of a first text, and of the next. And of one that was
misled by a busy GPU.
"""

import argparse
import random
from collections import Counter
from dataclasses import replace
from statistics import mean

from triforce.controller import Controller, Costs
from triforce.plan import Padding, Plan

COSTS = {
    "7B, 128K, one GPU": Costs({16: 20.5}, {5: 5.5}, {"model": (0.26, 0.225)}, plain=19.9),
    "7B, 128K, one GPU, fp8": Costs({16: 20.5}, {5: 4.1}, {"model": (0.26, 0.225)}, plain=19.9),
    "7B, 128K, two GPUs": Costs({16: 11.9}, {5: 4.2}, {"model": (0.26, 0.227)}),
    "7B, 64K": Costs({16: 13.2}, {5: 4.95}, {"model": (0.26, 0.22)}, plain=12.9),
    "8B, 32K, no draft": Costs({4: 6.6}, {1: 5.2}, plain=6.35),
    "8B, 32K": Costs({16: 6.6}, {5: 4.9}, {"model": (0.3, 0.3)}, plain=6.1),
    "tiny, 16K, a CPU": Costs({1: 26, 2: 30, 3: 34, 4: 38, 6: 45, 8: 50}, {1: 6, 3: 7.5, 5: 9}, {"model": (1.9, 1.4)}),
}
RATES = [(0.93, 0.69), (0.95, 0.66), (0.93, 0.4), (0.9, 0.85), (0.96, 0.6), (0.85, 0.3), (0.3, 0.1)]
MAX_GAMMA, MAX_INNER = 15, 4
NGRAM, BUSY = 0.1, 3  # of n-grams so many are right; rounds that take twice as long
SOURCES = {"model": (1.9, 1.4), "ngram": (0.01, 0.0)}
ON_A_CPU = {"tiny, 6K, a CPU": Costs({1: 10.5, 2: 12, 4: 15, 8: 20}, {1: 5, 3: 6.5, 5: 8}, SOURCES),
            "tiny, 16K, a CPU": Costs({1: 18, 2: 22, 4: 25, 8: 32}, {1: 6, 3: 7.5, 5: 9}, SOURCES)}
ON_A_GPU = {"8B, 16K, written": Costs({16: 9.0}, {5: 7.0}, {"model": (0.5, 0.4), "ngram": (0.05, 0.0)}, plain=7.5,
                                      preparing=54.0)}
MISLED = 2.5


def kept(rng: random.Random, rate: float, count: int) -> int:
    """Of so many drafted tokens, those before the first that is not kept."""
    return next((i for i in range(count) if rng.random() >= rate), count)


def one_round(rng: random.Random, plan: Plan, rates: dict[str, float]) -> tuple[int, dict[str, tuple[int, int]]]:
    """Tokens that a round emits if the levels keep with these chances, and (hits, tests) by level, as a controller is
    told: of tokens that were kept, and of the first that was not."""
    drafted, seen = plan.gamma, {}
    if plan.retrieval and plan.source:
        origins = ""  # k: kept by the retrieval level; m: its own, where the draft missed; b: a bonus
        for _ in range(plan.rounds):
            count = kept(rng, rates[plan.source], plan.gamma_inner)
            origins += "k" * count + ("m" if count < plan.gamma_inner else "b")
        origins = origins[: plan.gamma]
        drafted = len(origins)
    if plan.gamma == 0:
        return 1, seen
    checked = "retrieval" if plan.retrieval else plan.source
    count = kept(rng, rates[checked], drafted)
    seen[checked] = count, count + (count < drafted)
    if plan.retrieval and plan.source:
        hits = origins[:count].count("k")
        seen[plan.source] = hits, hits + origins[:count].count("m")
    return count + 1, seen


def time_per_token(costs: Costs, rates: tuple[float, float], tokens: int, seed: int, plan: Plan | None = None,
                   controller: Controller | None = None, busy: int = 0) -> float:
    """Of one text.

    Args:
        plan: a fixed one. None: the controller's.
        controller: which learns what rounds take. None: one that knows it.
        busy: so many rounds take twice as long.
    """
    rng, spent, emitted, hard, rounds = random.Random(seed), 0.0, 0, 0, 0
    controller = controller or (None if plan else Controller(costs, MAX_GAMMA, MAX_INNER))
    while emitted < tokens:
        now = plan or controller.choose(ngram=NGRAM)
        if hard <= 0 and rng.random() < 0.05:
            hard = rng.randint(5, 20)
        less = 0.25 if hard > 0 else -0.03
        count, seen = one_round(rng, now, {"retrieval": min(max(rates[0] - 0.6 * less, 0.02), 0.985), "ngram": NGRAM,
                                           "model": min(max(rates[1] - less, 0.02), 0.97)})
        took = [one * (1 + (rounds < busy)) for one in costs.milliseconds(now)]
        spent, emitted, hard, rounds = spent + sum(took), emitted + count, hard - count, rounds + 1
        if controller is not None:
            controller.timed(now, *took)
            controller.update(count, **seen)
    return spent / emitted


def learning(costs: Costs, rates: tuple[float, float], tokens: int, seed: int) -> tuple[float, float]:
    """Times per token of a first text and of the next one, over those of autoregression."""
    guess = Costs({n: 6 + 0.5 * n for n in costs.verify}, {n: 2 + 0.2 * n for n in costs.retrieval},
                  {"model": (0.2, 0.2), "ngram": (0.01, 0.0)})
    first = Controller(guess, 7, MAX_INNER, Padding(False, False, False), [0] * len(guess.parts()))
    found = time_per_token(costs, rates, tokens, seed, controller=first, busy=BUSY)
    then = Controller(first.learned.now(), 7, MAX_INNER, first.padding, first.learned.seen.tolist(),
                      priors=first.lasting_rates())
    plain = time_per_token(costs, rates, tokens, seed, Plan(), busy=BUSY)
    again = time_per_token(costs, rates, tokens, seed + 1, controller=then)
    return found / plain, again / sum(costs.milliseconds(Plan()))


def misled(costs: Costs, rates: tuple[float, float], tokens: int, seed: int) -> float:
    """Time per token over that of autoregression, of a text before which another job used the GPU: a step without
    speculation is believed to take MISLED times what it takes."""
    believed = replace(costs, plain=MISLED * costs.plain)
    controller = Controller(believed, MAX_GAMMA, MAX_INNER, rounds_with=Counter(drafts=9, retrieval=9))
    found = time_per_token(costs, rates, tokens, seed, controller=controller)
    return found / sum(costs.milliseconds(Plan()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=192, help="of each text")
    parser.add_argument("--texts", type=int, default=40)
    args = parser.parse_args()
    print(f"{'acceptance: retrieval, draft':<32}" + "".join(f"{f'{a}, {b}':>12}" for a, b in RATES))
    ratios, over_plain = [], []
    for name, costs in COSTS.items():
        line, controller = [], Controller(costs, MAX_GAMMA, MAX_INNER)
        for a, b in RATES:
            # The best for these rates as they are said to be, and for some near them: stretches change the mean.
            times = [controller.times_per_token({"retrieval": min(a - 0.6 * d, 0.97), "model": min(b - d, 0.95)})
                     for d in (0, 0.03, -0.03, 0.06)]
            plans = {controller.plans[int(time.argmin())] for time in times}

            def over_texts(plan, costs=costs, rates=(a, b)):
                return mean(time_per_token(costs, rates, args.tokens, seed, plan) for seed in range(args.texts))

            found = over_texts(None)
            line.append(found / min(over_texts(plan) for plan in plans))
            over_plain.append(found / sum(costs.milliseconds(Plan())))
        print(f"{name:<32}" + "".join(f"{ratio:>12.3f}" for ratio in line), flush=True)
        ratios += line
    print(f"mean {mean(ratios):.3f}, worst {max(ratios):.3f}; over autoregression at most {max(over_plain):.3f}")
    print("\nwhat steps take is learned, on a machine that is busy at first: over autoregression")
    for name, costs in ON_A_CPU.items():
        for i, which in enumerate(("first", "next")):
            line = [mean(learning(costs, rates, args.tokens, seed)[i] for seed in range(args.texts)) for rates in RATES]
            print(f"{f'{name}: {which}':<32}" + "".join(f"{ratio:>12.3f}" for ratio in line))
    print("\nthe time without speculation is believed to be too long: over autoregression")
    for name, costs in ON_A_GPU.items():
        line = [mean(misled(costs, rates, args.tokens, seed) for seed in range(args.texts)) for rates in RATES]
        print(f"{name:<32}" + "".join(f"{ratio:>12.3f}" for ratio in line))


if __name__ == "__main__":
    main()
