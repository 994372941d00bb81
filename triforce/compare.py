"""`--compare`: speculation beside the fastest autoregression of this library.

Both take turns in one text, block by block, so that a machine that becomes busy hits both. Autoregression takes steps
of one row: the same distribution as the padded steps whose bits are promised, and faster on a CPU.
"""

import time
from statistics import fmean

from .plan import ONE_ROW
from .prefix import first_difference

CHECKED_TOKENS = 64  # of the greedy comparison, and timed at least, where so many new ones are allowed
BLOCKS = 12  # are aimed at, in both halves together
LONGEST = 32  # tokens of a block


def take_turns(engine, ids: list[int], count: int, **options) -> tuple[list[float], list[float]]:
    """Seconds a token of each block, of speculation and of autoregression, which take turns in one text of `count`
    tokens. A round of speculation that comes after autoregression catches up with it, and that counts.

    Args:
        options: of `Engine.stream`.
    """
    size = min(max(count // BLOCKS, 1), LONGEST)
    blocks, half, begun = ([], []), 0, None

    def take_turn(tokens: int) -> None:
        nonlocal half, begun
        now = time.perf_counter()
        if begun is not None:  # the first round drafts nothing, and is neither's
            if tokens - begun[0] < size:
                return
            blocks[half].append((now - begun[1]) / (tokens - begun[0]))
        half, begun = 1 - half, (tokens, now)
        stream.follow(ONE_ROW if half else None)

    stream = engine.stream(ids, count, ignore_eos=True, on_decode=take_turn, **options)
    for _ in stream:
        pass
    return tuple(one[1:] or one for one in blocks)  # in the first ones steps were prepared


def compare(engine, ids: list[int], most: int, sampling: dict, stats, speculate: bool) -> tuple[list[str], dict]:
    """Lines of a table, and the same as JSON has it: speed, and whether tokens with and without speculation are equal:
    greedy ones, and where levels share their draws, drawn ones.

    Args:
        most: new tokens that the memory is for. sampling: with its seed.
        stats: of the run that is compared. speculate: whether that did.
    """
    blocks = take_turns(engine, ids, max(stats.new_tokens, min(most, CHECKED_TOKENS)), speculate=speculate, **sampling)
    if all(blocks):
        lines, report = table(*blocks, stats, "speculation" if speculate else "no speculation")
    else:
        lines, report = [f"{most} new tokens are too few to compare the speed of; ask for 64"], {}
    laws = {"greedy": {"temperature": 0.0}} | ({"drawn": sampling} if engine.settings.coupled else {})
    for name, law in laws.items():
        law = {**law, "max_new_tokens": min(CHECKED_TOKENS, most), "ignore_eos": True}
        on, off = (engine.generate(ids, speculate=speculates, **law).tokens for speculates in (True, False))
        differ = first_difference(on, off)
        verdict = "identical" if differ is None else f"DIFFERENT from token {differ} on"
        lines.append(f"{name} check, {len(on)} tokens, speculation on and off: {verdict}")
        report |= {f"{name}_tokens": len(on), f"{name}_first_difference": differ}
    return lines, report


def table(ours: list[float], plain: list[float], stats, name: str) -> tuple[list[str], dict]:
    """The whole run, then a token, each number with its spread over the blocks.

    Args:
        ours, plain: seconds a token of each block.
        stats: of a run by the first, which began as one by the second would.
    """
    tokens = [(fmean(blocks), min(blocks), max(blocks)) for blocks in (ours, plain)]
    begun, later = stats.load + stats.ttft, max(stats.new_tokens - 1, 0)
    runs = [[begun + later * one for one in token] for token in tokens]
    ratios = [other / one for one, other in zip(ours, plain, strict=False)]  # neighbours met the same machine
    gain, of_run = tokens[1][0] / tokens[0][0], runs[1][0] / runs[0][0]
    lines = [
        _row("", name, "autoregression"),
        _row(f"whole run, {stats.new_tokens:,} tokens", *(_spread(run, 1, " s") for run in runs)),
        _row("time per token", *(_spread(token, 1e3, " ms") for token in tokens)),
        _row("speed-up of the whole run", f"{of_run:.2f}x"),
        _row("speed-up per token", _spread((gain, min(ratios), max(ratios)), 1, "x")),
        f"(in brackets: the least and the most of {len(ours)} and {len(plain)} blocks, which took turns)"]
    report = {key: {"tbt": token[0], "blocks": blocks, "run": run[0]} for key, token, blocks, run in zip(
        ("speculation", "autoregression"), tokens, (ours, plain), runs, strict=True)}
    return lines, {**report, "speedup": gain, "speedup_of_run": of_run}


def _row(title: str, *cells: str) -> str:
    return f"{title:<26}" + "".join(f"{cell:>26}" for cell in cells)


def _spread(values, scale: float, unit: str) -> str:
    middle, least, most = (f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
                           for value in (scale * value for value in values))
    return f"{middle}{unit} ({least} to {most})"
