"""What a loaded engine shows over one prompt: acceptance by level and by position, greedy bits, times of steps.

A trial follows one plan from the prompt's end on. All trials of one way to choose a view share its prefill.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..config import Sampling
from ..controller import emitted
from ..engine import Engine
from ..plan import Plan
from ..prefix import first_difference

MOST_GAMMA = 7  # positions in a round that are told apart
GREEDY = 64  # tokens that are compared
GREEDILY = Sampling(temperature=0.0)
COPIED = 2**28  # bytes, to see what the memory gives


@dataclass
class Trial:
    """A number of rounds of one plan."""

    way: str
    plan: Plan
    temperature: float
    tokens: list[int]
    seconds: float
    drafted: list[int]  # by position in a round: how often a token was drafted there
    kept: list[int]  # and how often it was kept
    acceptance: dict[str, float]  # by level
    checking: float | None  # milliseconds of a verify, the median
    drafting: float | None  # of all that is drafted for it

    def record(self) -> dict:
        mine = {name: value for name, value in vars(self).items() if name not in ("plan", "tokens")}
        return mine | {"gamma": self.plan.gamma, "tokens": len(self.tokens), "rate": self.rate,
                       "repeats": repeated(self.tokens),
                       "milliseconds_a_token": 1e3 * self.seconds / max(len(self.tokens), 1)}

    @property
    def rate(self) -> float | None:
        """Of the tokens that were looked at, the share that was kept: what comes after a rejection is not."""
        looked_at = sum(self.drafted[:1]) + sum(min(drafted, kept) for drafted, kept in
                                                zip(self.drafted[1:], self.kept, strict=False))
        return sum(self.kept) / looked_at if looked_at else None


def repeated(tokens: list[int]) -> float:
    """Of the runs of four tokens, the share that stood before in the same text. A loop is easily drafted."""
    runs = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def ways(engine: Engine) -> dict[str, Plan]:
    """The plans that this engine's levels allow, by the name of the way to draft."""
    hierarchy, settings = engine.caches.state.hierarchy, engine.settings
    gamma = min(settings.block_size - 1, MOST_GAMMA)
    found: dict[str, Plan] = {}
    if "model" in hierarchy.sources and "retrieval" in hierarchy.drafters:
        inner = min(settings.gamma_inner, 2)
        found["draft + view"] = Plan(gamma, "model", True, inner, -(-gamma // 2))
    if "model" in hierarchy.sources:
        found["draft model"] = Plan(gamma, "model")
    if "retrieval" in hierarchy.drafters:
        found[f"{settings.draft_cache} view"] = Plan(gamma, None, True, 0, gamma)
    if "ngram" in hierarchy.sources:
        found["n-grams"] = Plan(gamma, "ngram")
    return found if gamma else {}


def run(engine: Engine, ids: list[int], room: int, way: str, plan: Plan, law: Sampling, count: int) -> Trial:
    """`count` tokens or some more, drawn with the law's seed or 0. room: new tokens that the caches are made for, the
    same for all trials."""
    with engine.working():
        state = engine.prepare([ids], room, plan=plan, **vars(replace(law, seed=[law.seed or 0])))
    drafted, kept = [0] * plan.gamma, [0] * plan.gamma
    tokens, checking, drafting, begun = [], [], [], time.perf_counter()
    while len(tokens) < count:
        with engine.working():
            tokens += state.round()[0]
        row, timing = state.last_round.rows[0], state.last_round.timing
        for i in range(row.num_drafted):
            drafted[i] += 1
            kept[i] += i < row.num_accepted
        if timing is not None:
            checking.append(timing.checking)
            drafting.append(timing.drafting)
    seconds = time.perf_counter() - begun
    rates = state.hierarchy.acceptance_rates()[0]
    return Trial(way, plan, law.temperature, tokens, seconds, drafted, kept, rates,
                 statistics.median(checking) if checking else None,
                 statistics.median(drafting) if drafting and plan.gamma else None)


def greedy_bits(plain: Trial, trial: Trial) -> dict:
    """A record: does speculation say what autoregression says?"""
    texts = plain.tokens[:GREEDY], trial.tokens[:GREEDY]  # a round may bring more than asked
    differ = first_difference(*texts)
    told = {"name": f"greedy, {trial.way}", "tokens": min(map(len, texts)), "drafted": sum(trial.drafted),
            "kept": sum(trial.kept), "first_difference": differ, "passed": differ is None}
    if differ is not None:
        told["advice"] = (f"Token {differ} differs with this way to draft. Output is not exact here: please report "
                          "this file, and use --no-speculation until then.")
    return told


def sibling(engine: Engine, **changes) -> Engine:
    """An engine of the same weights with other settings. Nothing is compiled for it: it is looked at once."""
    settings = replace(engine.caches.given, draft=False, **changes)
    return Engine(engine.target, engine.tokenizer, None, drafting=engine.drafting, settings=settings,
                  placement=replace(engine.placement, compile=False), eos_ids=engine.eos_ids,
                  compute_stream=engine.compute_stream)


def other_views(engine: Engine, length: int) -> dict[str, dict]:
    """Other ways to choose a view, as settings, by name. Each needs a prefill of its own."""
    given, budget = engine.caches.given, engine.resolve_budget(length)
    found = {f"{kind} view": {"draft_cache": kind, "budget": budget} for kind in ("streaming", "snapkv")
             if kind != engine.settings.draft_cache}
    if 2 * budget <= length and given.draft_cache in (None, "retrieval"):
        found[f"view of {2 * budget:,}"] = {"budget": 2 * budget}
    return found


def of_view(engine: Engine, changes: dict, ids: list[int], room: int, way: str, count: int,
            laws: Sequence[Sampling]) -> list[Trial]:
    """Trials of such a view.

    Raises:
        UserError: it does not go with the other settings.
    """
    other = sibling(engine, **changes)
    with other.working():
        other.prepare([ids], room, **vars(replace(GREEDILY, seed=[0])))
    plan = ways(other)[f"{other.settings.draft_cache} view"]
    found = [run(other, ids, room, way, plan, law, count) for law in laws]
    other.release()
    return found


def step_bytes(engine: Engine, length: int) -> dict[str, int]:
    """What each kind of step reads: weights but for the embedding's table, and K/V."""
    state = engine.caches.state
    hierarchy, target = state.hierarchy, engine.target

    def weights(model) -> int:
        table = 0 if model.config.tie_word_embeddings else model.config.vocab_rows * model.config.dim
        return model.weight_bytes - table * model.dtype.itemsize

    cache = length * target.config.kv_elements_per_token * target.dtype.itemsize
    read = {"verify": weights(target) + cache}
    if hierarchy.view is not None:
        read["view"] = weights(hierarchy.inner.model) + min(hierarchy.view.nbytes, cache)
    if "model" in hierarchy.sources and engine.draft is not None:
        read["draft"] = weights(engine.draft) + hierarchy.sources["model"].nbytes
    return read


def steps(trials: list[Trial], read: dict[str, int], bandwidth: float) -> list[dict]:
    """Records of step times. Times are medians of rounds, where they ran; nothing runs only to be timed."""
    found: dict[str, float] = {}
    for trial in trials:
        if trial.plan.gamma == 0 and trial.checking is not None:
            found["autoregression" if not trial.plan.padded else "verify"] = trial.checking
        elif trial.drafting is not None:
            if trial.plan.retrieval and trial.plan.source is None:
                found["view"] = trial.drafting / trial.plan.rounds
            elif trial.plan.source == "model" and not trial.plan.retrieval:
                found["draft"] = trial.drafting / trial.plan.gamma
    told = []
    for name, took in found.items():
        size = read.get("verify" if name == "autoregression" else name, 0)
        told.append({"name": f"step, {name}", "milliseconds": took, "bytes": size, "passed": None,
                     "bytes_a_second": size / took * 1e3, "of_copy_bandwidth": size / took * 1e3 / bandwidth})
    return told


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a plain copy on the device: the best of several."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target, best = torch.ones_like(source), 0.0
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * COPIED / (time.perf_counter() - begun))
    return best


def times(engine: Engine, ids: list[int], room: int, speculate: bool, law: Sampling) -> dict:
    """A record of one call as a user makes it. Without speculation: the fastest autoregression."""
    options = {} if speculate else {"speculate": False, "one_row": True}
    stats = engine.generate(ids, room, ignore_eos=True, **vars(replace(law, seed=0)), **options).stats
    return {"name": "call", "speculation": speculate, "prompt_len": len(ids), "new_tokens": stats.new_tokens,
            "prefill": stats.prefill, "ttft": stats.ttft, "preparing": stats.recording,
            "milliseconds_a_token": 1e3 * stats.tbt, "acceptance": stats.acceptance_rate,
            "tokens_a_verify": stats.block_efficiency, "peak_memory": stats.peak_memory, "passed": None}


def best_gamma(trial: Trial, verify: float, most: int) -> tuple[int, float]:
    """(gamma, expected milliseconds a token) of the way of a trial, by what it showed."""
    rate, each = min(trial.rate or 0.0, 0.98), (trial.drafting or 0.0) / trial.plan.gamma
    costs = {gamma: (verify + gamma * each) / emitted(rate, gamma) for gamma in range(1, most + 1)}
    gamma = min(costs, key=costs.get)
    return gamma, costs[gamma]
