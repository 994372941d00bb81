"""`--compare`: speculation beside the fastest autoregression of this library. That takes steps of one row: the same
distribution as the padded steps whose bits are promised, and faster on a CPU.
"""

from statistics import median

from .prefix import first_difference

CHECKED_TOKENS = 64  # are compared, and timed
TURNS = 4  # of each way


def compare(engine, ids: list[int], most: int, sampling: dict, stats, speculate: bool) -> tuple[list[str], dict]:
    """Lines of a table, and the same as JSON has it: speed, and whether tokens with and without speculation are equal:
    greedy ones, and where levels share their draws, drawn ones.

    Args:
        most: new tokens that the memory is for. sampling: with its seed.
        stats: of the run that is compared. speculate: whether that did.
    """
    count = {"max_new_tokens": min(CHECKED_TOKENS, most), "ignore_eos": True}
    ways = {"speculation" if speculate else "no speculation": {"speculate": speculate},
            "autoregression": {"speculate": False, "one_row": True}}
    # They take turns, so that a machine that becomes busy hits both. In the first turn steps are prepared.
    turns = [[engine.generate(ids, **sampling, **count, **how).stats.tbt for how in ways.values()]
             for _ in range(1 + TURNS)]
    times = list(zip(*turns[1:], strict=True))
    lines, report = ["too few tokens to compare; ask for 64"], {}
    if all(map(all, times)):
        lines, report = table(times, stats, list(ways))
    laws = {"greedy": {"temperature": 0.0}} | ({"drawn": sampling} if engine.settings.coupled else {})
    for name, law in laws.items():
        on, off = (engine.generate(ids, speculate=speculates, **law, **count).tokens for speculates in (True, False))
        differ = first_difference(on, off)
        verdict = "identical" if differ is None else f"DIFFERENT from token {differ} on"
        lines.append(f"{name} check, {len(on)} tokens, speculation on and off: {verdict}")
        report |= {f"{name}_tokens": len(on), f"{name}_first_difference": differ}
    return lines, report


def table(times: list[tuple[float, ...]], stats, names: list[str]) -> tuple[list[str], dict]:
    """The whole run, and a token: medians, and the least and the most in brackets.

    Args:
        times: seconds a token, of the turns of both ways.
        stats: of a run by the first, which began as one by the second would.
    """
    runs = [[stats.load + stats.ttft + max(stats.new_tokens - 1, 0) * one for one in of_way] for of_way in times]
    gain, of_run = (median(second) / median(first) for first, second in (times, runs))
    rows = [("", *names),
            (f"whole run, {stats.new_tokens:,} tokens", *(_spread(run, 1, "s") for run in runs)),
            ("time per token", *(_spread(of_way, 1e3, "ms") for of_way in times)),
            ("speed-up of the whole run", f"{of_run:.2f}x", ""),
            ("speed-up per token", f"{gain:.2f}x", "")]
    report = {name: {"tbt": median(of_way), "tbt_of_turns": list(of_way), "run": median(run)} for name, of_way, run in
              zip(("speculation", "autoregression"), times, runs, strict=True)}
    return ([f"{title:<26}{one:>26}{other:>27}".rstrip() for title, one, other in rows],
            {**report, "speedup": gain, "speedup_of_run": of_run})


def _spread(values, scale: float, unit: str) -> str:
    least, middle, most = (scale * one for one in (min(values), median(values), max(values)))
    return f"{middle:.1f} {unit} ({least:.1f} to {most:.1f})"
