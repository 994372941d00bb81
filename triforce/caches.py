"""Which buffers serve a call: those of the call before, if they fit, and what they already hold of its prompts.

An engine keeps one `State`, and the `Prefix` that its rows share, if they do. There are three ways to compute less:

- the prompts of a call begin with the same tokens: those are computed once and shared;
- a single prompt begins with what the State holds: only the rest is computed, in place;
- prompts begin with what the State holds or shares, and another State is needed: the new one shares it.
"""

import contextlib
import gc
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from . import memory
from .config import Placement, Settings
from .cpu import packs, row_unit
from .errors import UserError
from .graphs import Compiler
from .kv.blocks import prefill_blocks
from .kv.offload import Offload
from .kv.prefix import PrefixStore
from .kv.target import TargetCache
from .model import Transformer
from .parallel import agreed, together
from .prefix import Keeping, Prefix, check_room, common_length, opened
from .prefix_file import PrefixReader
from .prefix_path import holds_something
from .state import State

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("triforce")
SHARED_FROM = 512  # tokens in common; fewer are not worth an attention of their own in every step
MOST_ROWS = 32  # over a shared prefix side by side, unless the placement says more
# Tokens of a view where memory decides: few sizes, since each is compiled for. With smaller ones more rows would fit,
# and hardly draft.
VIEWS = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)


def needed_tokens(length: int, settings: Settings, max_seq_len: int | None) -> int:
    """Tokens that a row has to hold for so many of prompt and output."""
    return (length if max_seq_len is None else max_seq_len) + settings.block_size


def usual_capacity(needed: int, max_seq_len: int | None) -> int:
    """Tokens that a row is given, if it shares no prefix."""
    return -(-needed // 1024) * 1024 if max_seq_len is None else needed


def own_tokens(needed: int, base: int, flush_interval: int) -> int:
    """Tokens that each of many rows is given behind a shared prefix of `base`: whole intervals, and no more."""
    return -(-(needed - base) // flush_interval) * flush_interval


def view_within(parts_of: Callable[[int], Iterable[memory.Part]], budget: int, free: int) -> int:
    """Tokens of a view: the budget, or fewer where memory decides. parts_of: of a State with such a view."""
    def fits(view: int) -> bool:
        return sum(part.bytes for part in parts_of(view)) <= free

    if budget <= VIEWS[0] or fits(budget):
        return budget
    smaller = [view for view in VIEWS if view < budget]
    return smaller[max(bisect_left(smaller, True, key=lambda view: not fits(view)) - 1, 0)]


class Models(NamedTuple):
    """What an engine runs."""

    target: Transformer
    draft: Transformer | None
    drafting: Transformer | None  # the target's weights for the retrieval level, in fp8; None: the target itself


class Caches:
    """See the module.

    Args:
        engine: has the placement, resolved, and the vocabulary.
        settings: as given, not resolved: how a State for many rows differs is decided here.
    """

    def __init__(self, engine: "Engine", models: Models, settings: Settings):
        self.engine, self.models = engine, models
        self.target, self.device = models.target, models.target.device
        self.given = settings
        self.settings = self._resolve(settings, self.placement.max_batch_size)
        self.state: State | None = None
        # What the rows of `state` share. A State over a document never stands without it; it may outlast its State.
        self.prefix: Prefix | None = None
        self._held_before: list[list[int]] = []  # token sequences that were held when the present call began
        self._is_released = False  # by `release`, and no State was made since
        self.warming: threading.Thread | None = None  # what warms up kernels, see warm_up.py
        self._shelf: dict = {}  # see `Pilot`
        self._row_units: dict[tuple[int, int], int] = {}  # by sequences of a batch, and rows of each
        self._planned: dict[tuple, tuple[memory.Part, ...]] = {}  # by what `_parts` was asked

    @property
    def placement(self) -> Placement:
        return self.engine.placement

    def settings_for(self, rows: int, shared: bool) -> Settings:
        """Those of a State, which has so many rows over a prefix that they share, or any number of rows that do not."""
        if not shared:
            return self.settings
        rows = max(rows, self.placement.max_batch_size)
        return self._resolve(replace(self.given, budget=self.settings.budget), rows, shared=True)

    def _resolve(self, settings: Settings, rows: int, shared: bool = False) -> Settings:
        has_model = self.models.draft is not None or self.placement.draft_ranks is not None
        return settings.resolve(self.device, has_model=has_model, offload=self.placement.offload, max_batch_size=rows,
                                query_group=self.target.config.query_group, shared=shared)

    def release(self) -> None:
        """Frees the buffers of the last call."""
        self.state = self.prefix = None
        gc.collect()  # compiled steps make reference cycles
        self._is_released = True
        self._give_back()

    def _give_back(self) -> None:
        """Nothing of the device's memory is kept that is not in use."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def find(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None, on_prefill=None,
             goes_on: bool = False) -> State:
        """A State for these prompts, the last one if it fits. What they share is computed. goes_on: see
        `Engine.prepare`."""
        needed = self._needed(ids, max_new_tokens)
        if not goes_on:
            self._held_before = self._sequences(prefix)
        if self.state is not None and self.state.prompts == ids and self._fits(ids, needed, self.prefix):
            if prefix is None or prefix.is_same(self.prefix):
                return self.state
        shared = self._shared(ids, needed, prefix, on_prefill)
        if self._fits(ids, needed, shared):
            return self.state
        return self._new(ids, needed, shared)

    def fill(self, state: State, ids: list[list[int]], max_new_tokens: int, on_prefill=None) -> None:
        """Prefills what the State does not hold of the prompts yet."""
        start = self._held(ids)
        in_place = self._goes_on(start)
        held = start if in_place else state.base  # by all rows
        before = max((common_length(ids[0][:held], tokens) for tokens in self._held_before), default=0)
        state.reused = [before] * len(ids)
        if in_place:
            # New drafters, after `adopt`; or a part of the text was taken back.
            fresh = state.prompt_end[0] == 0 or common_length(ids[0], state.texts()[0]) < state.lens[0]
            state.truncate(0, start)
            state.prefill(0, ids[0][start:], on_prefill, fresh=fresh)
        else:
            state.reset()
            state.prefill_all(ids, on_prefill)

    def begin(self) -> None:
        """A prefill begins. On a GPU it takes several times as long beside another thread that needs Python's lock."""
        if self.warming is not None:
            self.warming.join()
            self.warming = None

    def rows(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None) -> int:
        """How many of these prompts run side by side."""
        size = self.placement.max_batch_size
        base = self._of_prefix(prefix, ids) if prefix is not None else self._usable(ids) if self.settings.reuse else 0
        if base < (SHARED_FROM if prefix is None else 1) or len(ids) <= size:
            return size
        rows, most = size, min(len(ids), max(MOST_ROWS, size))
        needed = self._needed(ids, max_new_tokens)
        is_held = prefix is not None or self.prefix is not None and self.prefix.num_shared >= base
        free, view = memory.comfortable(self.device), VIEWS[0]
        for count in range(most, size, -1):  # the most that fit with the smallest view, or with the user's
            settings = self.settings_for(count, shared=True)
            capacity = self._capacity(settings, count, base, needed)
            if self.given.budget is not None:
                view = self.engine.resolve_budget(max(map(len, ids)), capacity, count)
            parts = self._parts(settings, count, base, capacity, view)
            if not is_held:
                parts = parts + self._prefix_parts(base, self._resident(base, parts))
            if free is None or sum(part.bytes for part in parts) <= free + self._releasable():
                rows = count
                break
        rows = agreed(self.target.group, rows)
        if rows < len(ids):
            remedies = "--offload or a larger --chunk-size" if not self.placement.offload else "a larger --chunk-size"
            log.info("%d of %d prompts run side by side behind their %s common tokens%s", rows, len(ids), f"{base:,}",
                     "" if rows == most else f"; more fit with {remedies}")
        return rows

    # -- what is shared ------------------------------------------------------------------------------------------------

    def _whole(self, length: int) -> int:
        return max(length, 0) // self.settings.flush_interval * self.settings.flush_interval

    def _usable(self, ids: list[list[int]]) -> int:
        """Of the tokens that the prompts have in common, those to share: whole intervals. Each row computes the last
        ones of its prompt, whose queries choose its view."""
        return self._whole(min(common_length(*ids), min(map(len, ids)) - 1 - self.settings.block_size))

    def _of_prefix(self, prefix: Prefix, ids: list[list[int]]) -> int:
        """Of a prefix's tokens, those that prompts share: not the last one of a prompt, which is pending."""
        return self._whole(min(common_length(prefix.tokens[: prefix.num_shared], *ids), min(map(len, ids)) - 1))

    def _sequences(self, prefix: Prefix | None) -> list[list[int]]:
        """Tokens whose keys and values are held: by a prefix that is given, or else by what the last call left."""
        if prefix is not None:
            found = [prefix.tokens[: prefix.num_shared]]
        else:
            found = [] if self.prefix is None else [self.prefix.tokens[: self.prefix.num_shared]]
        if self.state is not None and self.state.batch == 1 and self.state.is_whole:
            found.append(self.state.texts()[0][: self.state.lens[0]])
        return found

    def _held(self, ids: list[list[int]]) -> int:
        """Tokens of a single prompt that the State holds keys and values of, and that need not be computed: the last
        ones are, since their queries choose its view, as those of a prompt that nothing is held of."""
        state = self.state
        if not self.settings.reuse or len(ids) > 1 or state is None or state.batch > 1 or not state.is_whole:
            return 0
        most = len(ids[0]) - 1 - state.cache.newest
        return max(min(common_length(ids[0], state.texts()[0]), state.lens[0], most), 0)

    def _goes_on(self, held: int) -> bool:
        """Whether a prompt of which the State holds so many tokens is worth to go on with."""
        return held > self.state.base if self.state.base else held >= self.settings.flush_interval

    def _shared(self, ids: list[list[int]], needed: int, prefix: Prefix | None, on_prefill) -> Prefix | None:
        """What the rows of the State for these prompts are to share."""
        if prefix is not None:
            common = self._of_prefix(prefix, ids)
            return prefix.part(common) if common else None
        if not self.settings.reuse:
            return None
        usable, state, found = self._usable(ids), self.state, []
        if state is not None and state.batch == 1 and state.is_whole:
            held = self._held(ids[:1])
            if len(ids) == 1 and self._goes_on(held) and (state.base or self._fits(ids, needed, None)):
                return self.prefix  # it goes on in place, or its tokens move
            if state.base == 0:
                found.append((self._whole(min(held, usable)), None))
        if self.prefix is not None:
            found.append((self._whole(min(common_length(ids[0], self.prefix.tokens), usable, self.prefix.num_shared)),
                          self.prefix))
        length, owner = max(found, key=lambda one: one[0], default=(0, None))
        if length >= max(SHARED_FROM, usable // 2):
            if owner is not None:
                return owner.part(length)
            return Prefix(self.engine, ids[0][:length], state.cache.prefix.part(length))
        if len(ids) == 1 or usable < SHARED_FROM:
            return None
        del state, found, owner  # they are freed before this is planned
        self._held_before = []  # it is computed from its first token on, whatever was held
        return self.compute(ids[0][:usable], on_prefill)

    def held(self, tokens: list[int], document: Prefix | None) -> Prefix:
        """A conversation's tokens, with the keys and values that the State or else the document's prefix holds."""
        found, state = [(0, None)], self.state
        if document is not None and document.store is not None:
            found.append((min(common_length(tokens, document.tokens), document.num_shared), document.store))
        if state is not None and state.batch == 1 and state.is_whole:
            length = min(common_length(tokens, state.texts()[0]), state.cache.prefix.lens[0])
            found.append((length if length > state.base else 0, state.cache.prefix))
        length, store = max(((self._whole(length), store) for length, store in found), key=lambda one: one[0])
        return Prefix(self.engine, tokens, store.part(length) if length else None)

    @torch.inference_mode()
    def compute(self, tokens: list[int], on_progress=None, keeping: Keeping | None = None) -> Prefix:
        """Keys and values of a text, whole intervals of it. keeping: in a file, stretch by stretch."""
        length, start, num_read = self._whole(len(tokens)), 0, 0
        kept = contextlib.nullcontext()
        if keeping is not None and agreed(self.target.group, holds_something(keeping.path)):
            kept = opened(keeping.path, self.engine, begins=tokens)
        with kept as reader:
            if length == 0:
                return Prefix(self.engine, tokens, None)
            # What a file holds may be more: whole intervals of another engine.
            cache = self.allocate(length if reader is None else max(length, reader.layout.length))
            store = cache.prefix
            # Whole chunks of a prefill: so the numbers are those of one that was done in one go.
            unit = math.lcm(self.settings.prefill_chunk_size, self.settings.flush_interval)
            if reader is not None and self._whole(reader.layout.length):
                self._fill(store, reader)
                start = num_read = store.lens[0] if store.lens[0] == length else store.lens[0] // unit * unit
                store.truncate(0, start)
        stretch = length if keeping is None else -(-keeping.every // unit) * unit
        if keeping is not None and start < length:
            check_room(keeping.path, self.engine, len(tokens))  # before hours of work
        while start < length:
            stop = min(start + stretch, length)
            self._compute(cache, tokens, start, stop, on_progress)
            store.truncate(0, stop)
            if stop < length:
                part = Prefix(self.engine, tokens[:stop], store)
                part.part_of, part.rendered_at = len(tokens), keeping.rendered_at
                part.save(keeping.path)
            start = stop
        prefix = Prefix(self.engine, tokens, store)
        prefix.num_read = num_read
        if self.settings.ngram and self.settings.auto:
            prefix.meter()  # which questions will need: on the host, while a GPU still computes
        return prefix

    def _compute(self, cache: TargetCache, tokens: list[int], start: int, stop: int, on_progress) -> None:
        """Those of tokens [start, stop), after all before them."""
        store, offload = cache.prefix, cache.prefix.offload

        def on_layer(i: int) -> None:
            store.score(i, 0, start, store.working_layer(i, range(1))[0][0][:, start:stop])

        def report(share: float) -> None:
            on_progress((start**2 + share * (stop**2 - start**2)) / self._whole(len(tokens)) ** 2)

        blocks = prefill_blocks(cache, range(1), start, stop, self.settings.prefill_chunk_size, on_layer=on_layer)
        try:
            self.target.prefill(torch.tensor([tokens[start:stop]], device=self.device), blocks,
                                on_progress and report, cache_only=True)
        finally:
            if offload is not None:
                offload.close_work()

    @torch.inference_mode()
    def read(self, reader: PrefixReader) -> Prefix:
        """Keys and values of a file, and what is computed from them."""
        if self._whole(reader.layout.length) == 0:
            return Prefix(self.engine, reader.tokens, None)
        store = self.allocate(reader.layout.length).prefix
        self._fill(store, reader)
        return Prefix(self.engine, reader.tokens, store)

    def _fill(self, store: PrefixStore, reader: PrefixReader) -> None:
        length = self._whole(reader.layout.length)
        reader.fill(lambda i: store.layer(i, 0), self.heads, self.device, self.target.group)
        for i in range(self.target.config.n_layer):
            store.score(i, 0, 0, store.load(i, 0, 0, length)[0])
        store.truncate(0, length)

    @property
    def heads(self) -> range:
        """Of the whole model's KV heads, those of this rank."""
        count, group = self.target.config.n_kv_head, self.target.group
        first = 0 if group is None else group.rank * count
        return range(first, first + count)

    def allocate(self, length: int) -> TargetCache:
        """Room for a prefix of so many tokens."""
        settings, target = self.settings, self.target
        self.release()
        resident = None
        if self.placement.offload:  # beside a State for questions
            parts = self._parts(settings, 1, length, length + 1024, 1024)
            resident = agreed(target.group, self._resident(length, parts))
        config, offload = target.config, None
        self._check(self._prefix_parts(length, resident), length, resident)
        with torch.inference_mode(False):
            if resident is not None and resident < config.n_layer:
                offload = Offload(config, resident, batch=1, capacity=length, interval=settings.flush_interval,
                                  device=self.device, dtype=target.dtype, piece=settings.piece_tokens)
            return TargetCache(config, target.rope, batch=1, capacity=length, block_size=1, offload=offload,
                               flush_interval=settings.flush_interval, device=self.device, dtype=target.dtype,
                               chunk_size=settings.scored_chunk_size)

    # -- a State -------------------------------------------------------------------------------------------------------

    def _needed(self, ids: list[list[int]], max_new_tokens: int) -> int:
        """Tokens that a row has to hold."""
        return needed_tokens(max(map(len, ids)) + max_new_tokens, self.settings, self.placement.max_seq_len)

    def _fits(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> bool:
        state = self.state
        if state is None or state.batch != len(ids) or state.capacity < needed:
            return False
        same = self.prefix is None if shared is None else shared.is_same(self.prefix)
        if not same or state.budget == self.engine.resolve_budget(max(map(len, ids)), state.capacity):
            return same
        # A view that is not the user's choice need not grow with every turn of a conversation.
        return self.settings.budget is None and (state.base > 0 or self._held(ids) > 0)

    def _new(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> State:
        batch = len(ids)
        base = 0 if shared is None else shared.num_shared
        settings = self.settings_for(batch, shared=base > 0)
        capacity = self._capacity(settings, batch, base, needed)
        held = self._held(ids)
        old = self.state if base and held > base and shared.is_same(self.prefix) else None
        self.state = None
        # To look for garbage takes 0.1 s. For the first question about a document that was just done.
        leaves_garbage = old is None and self._is_released
        if old is None:  # before the new ones are planned
            (self._give_back if leaves_garbage else self.release)()
        budget = self.engine.resolve_budget(max(map(len, ids)), capacity, batch if base else 1)
        plan = partial(self._plan, settings, batch, base, capacity, budget)
        try:
            budget, resident = plan()
        except UserError:
            if not leaves_garbage:
                raise
            self.release()  # there may be some of another engine's
            budget, resident = plan()
        self._is_released = False
        sizes = {"batch": batch, "capacity": capacity, "budget": budget, "vocab_size": self.engine.vocab_size}
        if base:
            self.pack(shared.store)
        self.prefix = shared if base else None  # first: whoever finds a State over a document has to know of that
        with torch.inference_mode(False):  # buffers that may be written inside and outside of that mode
            self.state = State(self.target, self.models.draft, settings, **sizes, drafting=self.models.drafting,
                               compiler=self._compiler(), shelf=self._shelf, num_resident_layers=resident,
                               pack=self._may_pack(batch, capacity),
                               shared=shared.store if base else None, meter=shared.meter if base else None,
                               draft_ranks=self.placement.draft_ranks,
                               row_unit=self._row_unit(batch, settings.block_size))
        if old is not None:
            self.state.adopt(old, held)
        return self.state

    def _capacity(self, settings: Settings, batch: int, base: int, needed: int) -> int:
        """Tokens that each row of a State is given."""
        longest = self.placement.max_seq_len
        if base == 0 or longest is not None:
            return usual_capacity(needed, longest)
        # A conversation grows; of many rows each has just what it needs.
        own = own_tokens(needed, base, settings.flush_interval)
        capacity = base + (max(1 << (own - 1).bit_length(), 1024) if batch == 1 else own)
        return max(min(capacity, self._whole(self.target.config.max_len + settings.block_size)), needed)

    def _compiler(self) -> Compiler:
        """What runs the steps of a State: on a GPU as graphs, compiled if that was asked for."""
        compiles = self.placement.compile
        recorder = None if compiles is False else self.engine.compute_stream.cuda
        return Compiler(self.device, recorder=recorder, compiles=compiles is True)

    def _row_unit(self, *size: int) -> int:
        """See `cpu.row_unit`. size: sequences of a batch, and rows of each."""
        if size not in self._row_units:
            self._row_units[size] = row_unit(self.target, *size, self.placement.compile is not False)
        return self._row_units[size]

    def pack(self, store: PrefixStore) -> None:
        """What rows are to share, a second time in the CPU's own layout. Plans of memory do not count it: so it is made
        after them, and before those that see how much is free."""
        if store.packed is None and packs(self.device, self.target.dtype) and self._may_pack(1, store.lens[0]):
            with torch.inference_mode(False):
                store.pack()

    def _may_pack(self, batch: int, capacity: int) -> bool:
        """Whether the same bytes once more are a small part of what is free."""
        config = self.target.config
        kv_bytes = config.n_layer * memory.layer_bytes(config, batch=batch, capacity=capacity, dtype=self.target.dtype)
        return 8 * kv_bytes < (memory.available(self.device) or 0)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _plan(self, settings: Settings, batch: int, base: int, capacity: int, budget: int) -> tuple[int, int | None]:
        """Checks that everything fits. Returns tokens of a view, fewer where the user left that open and they do not
        fit; and how many layers of the KV cache stay on the device, None: all."""
        resident = None
        if base == 0 and self.placement.offload:
            parts = self._parts(settings, batch, 0, capacity, budget, 0)
            resident = agreed(self.target.group, self._resident(capacity, parts, batch) or 0)
        free = memory.comfortable(self.device)
        if base and settings.budget is None and free is not None:
            budget = view_within(lambda view: self._parts(settings, batch, base, capacity, view, resident), budget,
                                 free)
        budget = agreed(self.target.group, budget)
        parts = self._parts(settings, batch, base, capacity, budget, resident)
        self._check(parts, capacity, resident, batch, is_shared=base > 0)
        return budget, resident

    def _check(self, parts: tuple[memory.Part, ...], capacity: int, resident: int | None, batch: int = 1,
               is_shared: bool = False) -> None:
        """Raises UserError if the parts, and what is kept on the host, do not fit."""
        config = self.target.config
        count = 0 if resident is None or is_shared else config.n_layer - resident
        host = memory.host_part(config, count, batch=batch, capacity=capacity, dtype=self.target.dtype)
        of_no_use = ("--batch-size",) if batch == 1 else ()

        def check() -> None:
            if self.device.type == "cpu":  # the same memory, wherever a layer lies
                memory.check([host, *parts], self.device, (*of_no_use, "--offload", "--num-resident-layers"))
            else:
                memory.check(parts, self.device, of_no_use)
                memory.check([host], torch.device("cpu"), of_no_use)

        with together(self.target.group) as do:  # one GPU may have less memory free than another
            do(check)
        if resident is not None and not is_shared:
            log.info("KV cache: %d of %d layers on %s, %.2f GiB in host memory", resident, config.n_layer, self.device,
                     host.bytes / 2**30)

    def _parts(self, settings: Settings, batch: int, base: int, capacity: int, budget: int,
               resident: int | None = None) -> tuple[memory.Part, ...]:
        """Of a State."""
        key = repr(settings), batch, base, capacity, budget, resident
        if key not in self._planned:  # a call asks several times, and the next call for the same
            draft = None if self.models.draft is None else self.models.draft.config
            self._planned[key] = memory.state_parts(
                self.target.config, draft, settings, batch=batch, capacity=capacity, budget=budget, base=base,
                vocab_size=self.engine.vocab_size, dtype=self.target.dtype, device=self.device,
                num_resident_layers=resident)
        return self._planned[key]

    def _prefix_parts(self, length: int, resident: int | None) -> tuple[memory.Part, ...]:
        """Of a prefix that is to be computed."""
        return memory.prefix_parts(self.target.config, self.settings, capacity=length, dtype=self.target.dtype,
                                   device=self.device, num_resident_layers=resident)

    def _resident(self, capacity: int, parts: tuple[memory.Part, ...], batch: int = 1) -> int | None:
        """How many layers of a prefix stay on the device, beside these parts. None: all."""
        return memory.resident_layers(self.target.config, self.placement, parts, memory.available(self.device),
                                      self.device, batch=batch, capacity=capacity, dtype=self.target.dtype)

    def _releasable(self) -> int:
        """Bytes of the device that the present State would give back."""
        if self.state is None:
            return 0
        offload = self.state.cache.prefix.offload
        on_host = 0 if offload is None or self.device.type == "cpu" else offload.nbytes
        return self.state.nbytes - on_host
