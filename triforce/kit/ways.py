"""What fits a machine: the ways to run a job on it, and what each of them takes. Reads no weights.

The parts are those of `memory.py`: what `load` and a call check before they allocate, added up for a machine that need
not be this one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from .. import memory
from ..caches import MOST_ROWS, VIEWS, needed_tokens, own_tokens, usual_capacity, view_within
from ..config import Placement, Settings, parse_size
from ..errors import UserError
from ..loading import find_dtype
from ..memory import Part
from ..model import ModelConfig
from ..parallel import Group, shard_config
from ..quantize import fp8_bytes

CUDA_ITSELF = Part("CUDA itself, about", 2**29)  # of a card's memory; what a running process finds free is without it
QUESTION = 64  # tokens that are planned for a question, with what a chat template puts around it
THRIFTY = {"prefill_chunk_size": 2048, "chunk_size": 32}  # cost next to nothing where they were measured


@dataclass(frozen=True)
class Machine:
    """What a plan is for."""

    device: torch.device
    memory: int | None  # bytes of one device; None: nobody knows
    host: int | None  # bytes of the host, for an offloaded cache
    devices: int = 1
    is_here: bool = True  # `memory` is what is free now, rather than what a card has


@dataclass(frozen=True)
class Job:
    """What is to be run on it: settings and placement as the user gave them."""

    target: ModelConfig
    draft: ModelConfig | None
    settings: Settings
    placement: Placement
    prompt_len: int
    max_new_tokens: int
    rows: int = 1  # prompts side by side
    shares: bool = False  # they are questions about one document, or samples of one answer
    most_rows: int = 1  # what the settings are resolved for; see `Placement.max_batch_size`


@dataclass(frozen=True)
class Way:
    """One way to run a job, and what it takes of each device."""

    ranks: int
    rows: int  # side by side: those of the job, or as many of them as fit behind what they share
    wanted: int  # side by side, if there is room
    offload: bool | str
    changes: dict  # of the settings
    parts: list[Part]
    host: Part  # over all ranks
    resident: int | None  # layers of the KV cache on the device; None: all
    settings: Settings  # resolved
    budget: int
    room: int | None
    host_room: int | None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def left(self) -> int | None:
        return None if self.room is None else self.room - self.bytes

    @property
    def fits(self) -> bool:
        return (self.left is None or self.left >= 0) and (self.host_room is None or self.host.bytes <= self.host_room)

    @property
    def fits_all(self) -> bool:
        return self.fits and self.rows == self.wanted

    @property
    def flags(self) -> list[str]:
        """That make it, beside the user's own."""
        flags = [] if not self.offload else ["--offload"] if self.offload is True else ["--offload", "auto"]
        return flags + [word for name, value in self.changes.items() for word in (_flag(name), str(value))]


def way(job: Job, machine: Machine, ranks: int = 1, offload: bool | str = False, changes: dict | None = None) -> Way:
    """What the job takes, as `load` and `Caches` plan it.

    Raises:
        UserError: settings do not fit each other, or so many ranks cannot share the model.
    """
    changes, place, device = changes or {}, replace(job.placement, offload=offload), machine.device
    group = Group(0, ranks, "") if ranks > 1 else None
    target = shard_config(job.target, group)
    dtype = find_dtype(place.dtype, job.target.dtype, device)
    settings = replace(job.settings, **changes)
    rows = min(job.rows, max(MOST_ROWS, job.most_rows)) if job.shares else job.rows
    resolved = settings.resolve(device, has_model=job.draft is not None, offload=offload, shared=job.shares,
                                max_batch_size=max(job.most_rows, rows if job.shares else 0),
                                query_group=target.query_group)
    parts = [] if machine.is_here or device.type != "cuda" else [CUDA_ITSELF]
    parts += memory.weight_parts(target, job.draft, dtype)
    if place.draft_dtype:
        parts.append(Part("fp8 copy for drafting", fp8_bytes(target), ("no --draft-dtype",)))
    free = None if machine.memory is None else machine.memory - sum(part.bytes for part in parts)
    planner = Planner(job, target, resolved, place, dtype, device, free)
    found = planner.behind_a_document(rows) if job.shares else planner.of_prompts(rows)
    host = replace(found.host, bytes=found.host.bytes * ranks)
    parts += found.parts
    room, host_room = machine.memory, machine.host
    if device.type == "cpu":  # the same memory, wherever a layer or a rank lies
        parts, host_room = parts + [host] * bool(host.bytes), None
        room = None if room is None else room // ranks
    return Way(ranks, found.rows, rows, offload, changes, parts, host, found.resident, resolved, found.budget, room,
               host_room)


@dataclass(frozen=True)
class Found:
    """What caches take."""

    rows: int
    parts: list[Part]
    host: Part  # of one rank
    resident: int | None
    budget: int


@dataclass(frozen=True)
class Planner:
    """Of a job in some way, as `caches.Caches` plans them.

    target: of one rank. settings, place: resolved. free: bytes beside the weights, None: nobody knows.
    """

    job: Job
    target: ModelConfig
    settings: Settings
    place: Placement
    dtype: torch.dtype
    device: torch.device
    free: int | None

    def of_prompts(self, rows: int) -> Found:
        """Each with a KV cache of its own."""
        job, longest = self.job, self.place.max_seq_len
        capacity = usual_capacity(needed_tokens(job.prompt_len + job.max_new_tokens, self.settings, longest), longest)
        budget = self.settings.view_tokens(job.prompt_len, self.place.offload, capacity)
        sizes = {"batch": rows, "capacity": capacity}
        resident = self._resident(lambda count: self._state(budget, num_resident_layers=count, **sizes), **sizes)
        return Found(rows, list(self._state(budget, num_resident_layers=resident, **sizes)),
                     self._on_host(resident, **sizes), resident, budget)

    def behind_a_document(self, most: int) -> Found:
        """As many of the rows as fit, behind the KV cache of what they share."""
        job, settings, longest = self.job, self.settings, self.place.max_seq_len
        base = job.prompt_len // settings.flush_interval * settings.flush_interval
        needed = needed_tokens(job.prompt_len + QUESTION + job.max_new_tokens, settings, longest)
        capacity = base + own_tokens(needed, base, settings.flush_interval) if longest is None else needed
        view = (job.prompt_len, self.place.offload, capacity)
        least = settings.view_tokens(*view)
        if settings.budget is None:
            least = min(least, VIEWS[0])
        free = memory.less_spare(self.free, self.device)

        def of_rows(rows: int, view: int) -> tuple[Part, ...]:
            return self._state(view, batch=rows, capacity=capacity, base=base)

        document = {"batch": 1, "capacity": base}
        resident = self._resident(lambda count: of_rows(1, least), **document)
        prefix = memory.prefix_parts(self.target, settings, capacity=base, dtype=self.dtype, device=self.device,
                                     num_resident_layers=resident)

        def fits(rows: int) -> bool:
            return free is None or sum(part.bytes for part in _at_most(prefix, of_rows(rows, least))) <= free

        rows = _largest(1, most, fits)
        budget = settings.view_tokens(*view, rows)
        if settings.budget is None and free is not None:
            budget = view_within(lambda view: _at_most(prefix, of_rows(rows, view)), budget, free)
        parts = _at_most(prefix, of_rows(rows, budget))
        return Found(rows, parts, self._on_host(resident, **document), resident, budget)

    def _state(self, budget: int, **sizes) -> tuple[Part, ...]:
        draft = self.job.draft
        vocab_size = min(config.vocab_size for config in (self.job.target, draft) if config is not None)
        return memory.state_parts(self.target, draft, self.settings, budget=budget, vocab_size=vocab_size,
                                  dtype=self.dtype, device=self.device, **sizes)

    def _resident(self, parts_with: Callable[[int], tuple[Part, ...]], **sizes) -> int | None:
        """How many layers of the KV cache stay on the device, beside these parts. None: all."""
        place = self.place
        if not place.offload or place.num_resident_layers is not None:
            return place.num_resident_layers if place.offload else None
        wanted = None if place.resident_memory is None else parse_size(place.resident_memory, "resident_memory")
        if place.offload is True and wanted is None:
            return 0
        return memory.layers_within(self.target, parts_with(0), self.free, self.device, wanted, **sizes,
                                    dtype=self.dtype)

    def _on_host(self, resident: int | None, **sizes) -> Part:
        offloaded = 0 if resident is None else self.target.n_layer - resident
        return memory.host_part(self.target, offloaded, **sizes, dtype=self.dtype)


def _at_most(document: Iterable[Part], rows: Iterable[Part]) -> list[Part]:
    """Of the parts that both name, the larger: they are not needed at the same time."""
    parts: dict[str, Part] = {}
    for part in (*document, *rows):
        parts[part.name] = max(part, parts.get(part.name, part), key=lambda one: one.bytes)
    return list(parts.values())


def ways(job: Job, machine: Machine) -> list[Way]:
    """The ways to try, the fastest first: all on one device, on several, then part of the cache in host memory."""
    offloads = [job.placement.offload] if job.placement.offload else [False]
    if not job.placement.offload and machine.device.type == "cuda":
        offloads.append("auto")
    found = []
    for offload in offloads:
        for ranks in (1, 2, 4, 8):
            if ranks > machine.devices:
                break
            try:
                found.append(_thrifty(job, machine, ranks, offload))
            except UserError:  # they cannot share the model's heads evenly
                if ranks == 1:
                    raise
    return found


def _thrifty(job: Job, machine: Machine, ranks: int, offload: bool | str) -> Way:
    """With the usual settings if they fit, else with those that save memory for next to nothing."""
    usual, defaults = way(job, machine, ranks, offload), Settings()
    changes = {name: value for name, value in THRIFTY.items() if getattr(job.settings, name) == getattr(defaults, name)
               and value != getattr(usual.settings, name)}
    if not usual.settings.scores_chunks:
        changes.pop("chunk_size", None)
    return usual if usual.fits_all or not changes else way(job, machine, ranks, offload, changes)


def best(found: list[Way]) -> Way | None:
    """The first that fits with all rows side by side, or else the first with some of them."""
    return next((one for one in found if one.fits_all), next((one for one in found if one.fits), None))


def longest_prompt(job: Job, machine: Machine) -> int:
    """The most tokens of a prompt that fit in some way, in steps of 1,024; 0: none."""
    def fits(count: int) -> bool:
        return best(ways(replace(job, prompt_len=count * 1024), machine)) is not None

    return _largest(0, (job.prompt_len - 1) // 1024, fits) * 1024


def rows_that_fit(job: Job, machine: Machine, chosen: Way) -> int:
    """Side by side behind the document, in the chosen way; at most as many as ever run side by side."""
    if chosen.rows < chosen.wanted:
        return chosen.rows
    most = replace(job, rows=max(MOST_ROWS, job.most_rows))
    return way(most, machine, chosen.ranks, chosen.offload, chosen.changes).rows


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `high` that fits, where all below one that fits do, too; `low` if none above it does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
