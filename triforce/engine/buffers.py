"""Which memory serves a call: that of the call before, if it fits, and what it already holds of the call's prompts.

An engine keeps one `DecodeBatch`, and what its rows share, if they do. There are three ways to compute less:

- the prompts of a call begin with the same tokens: those are computed once and shared;
- a single prompt begins with what the DecodeBatch holds: only the rest is computed, in place;
- prompts begin with what the DecodeBatch holds or shares, and another DecodeBatch is needed: the new one shares it.
"""

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..cache.offload import Offload
from ..cache.prefix import PrefixStore
from ..config import Placement, Settings
from ..cpu import packs, row_unit
from ..decode.batch import DecodeBatch
from ..model import Transformer
from ..parallel import agreed, together
from ..runtime.graphs import Compiler
from . import memory
from .memory import VIEWS, MemoryPlan, Sizes, total
from .prompt_cache import Prefix, common_length
from .prompt_cache_file import PrefixReader

log = logging.getLogger("triforce")
SHARED_FROM = 512  # tokens in common; fewer are not worth an attention of their own in every step
MOST_ROWS = 32  # over a shared prefix side by side, unless the placement says more


class Models(NamedTuple):
    """What an engine runs."""

    target: Transformer
    draft: Transformer | None
    drafting: Transformer | None  # the target's weights for the retrieval level, in fp8; None: the target itself


class Buffers:
    """See the module.

    Args:
        settings: as given, not resolved: how a DecodeBatch for many rows differs is decided here.
        placement: resolved.
        recorder: the stream on which steps are recorded; None on a CPU.
        new_prefix: makes a `Prefix` of tokens and a store of their keys and values.
    """

    def __init__(self, models: Models, settings: Settings, placement: Placement, vocab_size: int,
                 recorder: "torch.cuda.Stream | None",
                 new_prefix: Callable[[list[int], PrefixStore | None], Prefix]):
        self.models, self.given, self.placement, self.vocab_size = models, settings, placement, vocab_size
        self.target, self.device = models.target, models.target.device
        self.recorder, self.new_prefix = recorder, new_prefix
        self.settings = self._resolve(settings, placement.max_batch_size)
        self.state: DecodeBatch | None = None
        # What the rows of `state` share. A batch over a document never stands without it; it may outlast its batch.
        self.prefix: Prefix | None = None
        self._held_before: list[list[int]] = []  # token sequences that were held when the present call began
        self._is_collected = False  # Python has looked for garbage, and no DecodeBatch was made since
        self._shelf: dict = {}  # see `Pilot`
        self._row_units: dict[tuple[int, int], int] = {}  # by sequences of a batch, and rows of each

    def settings_for(self, rows: int, shared: bool) -> Settings:
        """Those of a batch, which has so many rows over a prefix that they share, or any number of rows that do not."""
        if not shared:
            return self.settings
        given = replace(self.given, budget=self.settings.budget)
        return self._resolve(given, max(rows, self.placement.max_batch_size), shared=True)

    def _resolve(self, settings: Settings, rows: int, shared: bool = False) -> Settings:
        has_model = self.models.draft is not None or self.placement.draft_ranks is not None
        return settings.resolve(self.device, has_model=has_model, offload=self.placement.offload, max_batch_size=rows,
                                query_group=self.target.config.query_group, shared=shared)

    def release(self, collect: bool = True) -> None:
        """Frees the buffers of the last call. collect: look for garbage, which takes 0.1 s: compiled steps make
        reference cycles."""
        self.state = self.prefix = None
        if collect:
            gc.collect()
            self._is_collected = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self, prefix: Prefix | None) -> None:
        """A call begins: what is held now, by the prefix that it brings or by what the last call left, is not its own
        work."""
        prefix, state = self.prefix if prefix is None else prefix, self.state
        self._held_before = [] if prefix is None else [prefix.tokens[: prefix.num_shared]]
        if state is not None and state.is_whole:
            self._held_before += [text[:length] for text, length in zip(state.texts(), state.lens, strict=True)]

    def find(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None, on_prefill=None) -> DecodeBatch:
        """A DecodeBatch for these prompts, the last one if it fits. What they share is computed."""
        needed, state = self._needed(ids, max_new_tokens), self.state
        if state is not None and state.prompts == ids and self._fits(ids, needed, self.prefix):
            if prefix is None or prefix.is_same(self.prefix):
                return state
        del state  # it is freed before another one is planned
        shared = self._shared(ids, needed, prefix, on_prefill)
        return self.state if self._fits(ids, needed, shared) else self._new(ids, needed, shared)

    def fill(self, state: DecodeBatch, ids: list[list[int]], on_prefill=None) -> None:
        """Prefills what the DecodeBatch does not hold of the prompts yet."""
        start = self._held(ids)
        in_place = self._goes_on(start)
        self.note_reused(state, ids, start if in_place else state.base)
        if in_place:
            # New drafters, after `adopt`; or a part of the text was taken back.
            fresh = state.prompt_end[0] == 0 or common_length(ids[0], state.texts()[0]) < state.lens[0]
            state.truncate(0, start)
            state.prefill(0, ids[0][start:], on_prefill, fresh=fresh)
        else:
            state.reset()
            state.prefill_all(ids, on_prefill)

    def note_reused(self, state: DecodeBatch, ids: list[list[int]], held: int) -> None:
        """For the statistics: of the first `held` tokens of each prompt, how many were there before the call."""
        state.reused = [max((common_length(one[: min(held, len(one) - 1)], tokens) for tokens in self._held_before),
                            default=0) for one in ids]

    def rows(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None) -> int:
        """How many of these prompts run side by side: more than the placement says over what they share, as many as
        fit with the smallest view, or with the user's."""
        size = self.placement.max_batch_size
        base = self._of_prefix(prefix, ids) if prefix is not None else self._usable(ids) if self.settings.reuse else 0
        if base < (SHARED_FROM if prefix is None else 1) or len(ids) <= size:
            return size
        most, needed = min(len(ids), max(MOST_ROWS, size)), self._needed(ids, max_new_tokens)
        is_held = prefix is not None or self.prefix is not None and self.prefix.num_shared >= base
        free, longest = self._comfortable(), max(map(len, ids))

        def fits(count: int) -> bool:
            settings = self.settings_for(count, shared=True)
            sizes = self._sizes(settings, count, base, needed, VIEWS[0])
            if self.given.budget is not None:
                sizes = replace(sizes, budget=self._budget(longest, sizes.capacity, count))
            document = () if is_held else self._plan_document(sizes).parts
            return total((*document, *self._plan(settings, sizes).parts)) <= free + self._releasable()

        rows = most if free is None else next((count for count in range(most, size, -1) if fits(count)), size)
        rows = agreed(self.target.group, rows)
        if rows < len(ids):
            remedies = "--offload or a larger --chunk-size" if not self.placement.offload else "a larger --chunk-size"
            log.info("%d of %d prompts run side by side behind their %s common tokens%s", rows, len(ids), f"{base:,}",
                     "" if rows == most else f"; more fit with {remedies}")
        return rows

    def _budget(self, prompt_len: int, capacity: int, sharing: int = 1) -> int:
        return self.settings.view_tokens(prompt_len, self.placement.offload, capacity, sharing)

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

    @property
    def _alone(self) -> DecodeBatch | None:
        """The DecodeBatch, if it has one row, and all that it promises of that."""
        state = self.state
        return state if state is not None and state.batch == 1 and state.is_whole else None

    def _held(self, ids: list[list[int]]) -> int:
        """Tokens of a single prompt that the batch holds keys and values of, and that need not be computed: the last
        ones are, since their queries choose its view, as those of a prompt that nothing is held of."""
        state = self._alone
        if not self.settings.reuse or len(ids) > 1 or state is None:
            return 0
        most = len(ids[0]) - 1 - state.cache.newest
        return max(min(common_length(ids[0], state.texts()[0]), state.lens[0], most), 0)

    def _goes_on(self, held: int) -> bool:
        """Whether a prompt of which the DecodeBatch holds so many tokens is worth to go on with."""
        return held > self.state.base if self.state.base else held >= self.settings.flush_interval

    def _shared(self, ids: list[list[int]], needed: int, prefix: Prefix | None, on_prefill) -> Prefix | None:
        """What the rows of the DecodeBatch for these prompts are to share."""
        if prefix is not None:
            common = self._of_prefix(prefix, ids)
            return prefix.part(common) if common else None
        if not self.settings.reuse:
            return None
        usable, state, found = self._usable(ids), self._alone, []
        if state is not None:
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
            return self.new_prefix(ids[0][:length], state.cache.prefix.part(length))
        if len(ids) == 1 or usable < SHARED_FROM:
            return None
        del state, found, owner  # they are freed before this is planned
        self._held_before = []  # it is computed from its first token on, whatever was held
        return self.compute(ids[0][:usable], on_prefill)

    def held(self, tokens: list[int], document: Prefix | None) -> Prefix:
        """A conversation's tokens, with the keys and values that the batch or else the document's prefix holds."""
        found, state = [(0, None)], self._alone
        if document is not None and document.store is not None:
            found.append((document.shared_with(tokens), document.store))
        if state is not None:
            length = min(common_length(tokens, state.texts()[0]), state.cache.prefix.lens[0])
            found.append((length if length > state.base else 0, state.cache.prefix))
        length, store = max(((self._whole(length), store) for length, store in found), key=lambda one: one[0])
        return self.new_prefix(tokens, store.part(length) if length else None)

    @torch.inference_mode()
    def compute(self, tokens: list[int], on_progress=None, reader: PrefixReader | None = None,
                every: int | None = None, on_part: Callable[[Prefix], None] | None = None,
                length: int | None = None) -> Prefix:
        """Keys and values of a text.

        Args:
            reader: of a file that has the text's beginning.
            every: tokens after which `on_part` is called with what there is of the text; None: never.
            length: so many tokens, or a little fewer: whole intervals. None: all of them.
        """
        length, start, num_read = self._whole(len(tokens) if length is None else length), 0, 0
        if length == 0:
            return self.new_prefix(tokens, None)
        # What a file holds may be more: whole intervals of another engine.
        cache = self.allocate(length if reader is None else max(length, reader.layout.length))
        store = cache.prefix
        # Whole chunks of a prefill: so the numbers are those of one that was done in one go.
        unit = math.lcm(self.settings.prefill_chunk_size, self.settings.flush_interval)
        if reader is not None and self._whole(reader.layout.length):
            self._fill(store, reader)
            start = num_read = store.lens[0] if store.lens[0] == length else store.lens[0] // unit * unit
            store.truncate(0, start)
        stretch = length if every is None else -(-every // unit) * unit
        while start < length:
            stop = min(start + stretch, length)
            self._compute(cache, tokens, start, stop, on_progress)
            store.truncate(0, stop)
            if stop < length:
                on_part(self.new_prefix(tokens[:stop], store))
            start = stop
        prefix = self.new_prefix(tokens, store)
        prefix.num_read = num_read
        if self.settings.ngram and self.settings.auto:
            prefix.meter()  # which questions will need: on the host, while a GPU still computes
        return prefix

    def _compute(self, cache: KVCache, tokens: list[int], start: int, stop: int, on_progress) -> None:
        """Those of tokens [start, stop), after all before them."""
        store, offload = cache.prefix, cache.prefix.offload
        on_layer = partial(store.score_layer, rows=range(1), start=start, stops=[stop])

        def report(share: float) -> None:
            on_progress((start**2 + share * (stop**2 - start**2)) / self._whole(len(tokens)) ** 2)

        blocks = prefill_blocks(cache, range(1), start, stop, self.settings.prefill_chunk_size, on_layer=on_layer)
        try:
            self.target.prefill(torch.tensor([tokens[start:stop]], device=self.device), blocks,
                                on_progress and report, cache_only=True)
        finally:
            if offload is not None:
                offload.close_work()

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

    def allocate(self, length: int) -> KVCache:
        """Room for a prefix of so many tokens."""
        settings, config, dtype = self.settings, self.target.config, self.target.dtype
        self.release()
        sizes = Sizes(1, length + 1024, 1024, self.vocab_size, length)  # of questions, which are to fit beside it
        resident = offload = None
        if self.placement.offload:
            resident = self._resident(1, length, self._plan(settings, sizes))
        self._check(self._plan_document(sizes, resident), sizes, resident)
        with torch.inference_mode(False):
            if resident is not None and resident < config.n_layer:
                offload = Offload(config, resident, batch=1, capacity=length, interval=settings.flush_interval,
                                  device=self.device, dtype=dtype, piece=settings.piece_tokens)
            return KVCache(config, self.target.rope, batch=1, capacity=length, block_size=1, offload=offload,
                               flush_interval=settings.flush_interval, device=self.device, dtype=dtype,
                               chunk_size=settings.scored_chunk_size)

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _needed(self, ids: list[list[int]], max_new_tokens: int) -> int:
        """Tokens that a row has to hold."""
        return memory.needed_tokens(max(map(len, ids)) + max_new_tokens, self.settings, self.placement.max_seq_len)

    def _fits(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> bool:
        state = self.state
        if state is None or state.batch != len(ids) or state.capacity < needed:
            return False
        same = self.prefix is None if shared is None else shared.is_same(self.prefix)
        if not same or state.budget == self._budget(max(map(len, ids)), state.capacity):
            return same
        # A view that is not the user's choice need not grow with every turn of a conversation.
        return self.settings.budget is None and (state.base > 0 or self._held(ids) > 0)

    def _new(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> DecodeBatch:
        batch, base = len(ids), 0 if shared is None else shared.num_shared
        settings, held = self.settings_for(batch, shared=base > 0), self._held(ids)
        old = self.state if base and held > base and shared.is_same(self.prefix) else None
        self.state = None
        if old is None:  # before the new ones are planned
            self.release(collect=not self._is_collected)
        sizes = self._sizes(settings, batch, base, needed)
        budget = self._budget(max(map(len, ids)), sizes.capacity, batch if base else 1)
        sizes = self._fitting(settings, replace(sizes, budget=budget))
        self._is_collected = False
        if base:
            self.pack(shared.store)
        self.prefix = shared if base else None  # first: whoever finds a DecodeBatch over a document has to know of that
        compiles = self.placement.compile
        compiler = Compiler(self.device, recorder=None if compiles is False else self.recorder,
                            compiles=compiles is True)
        with torch.inference_mode(False):  # buffers that may be written inside and outside of that mode
            self.state = DecodeBatch(self.target, self.models.draft, settings, batch=batch, capacity=sizes.capacity,
                               budget=sizes.budget, vocab_size=self.vocab_size, compiler=compiler,
                               drafting=self.models.drafting, num_resident_layers=sizes.resident_layers,
                               pack=self._may_pack(batch, sizes.capacity), shared=shared.store if base else None,
                               meter=shared.meter if base else None, draft_ranks=self.placement.draft_ranks,
                               shelf=self._shelf, row_unit=self._row_unit(batch, settings.block_size))
        if old is not None:
            self.state.adopt(old, held)
        return self.state

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
        layer = memory.layer_bytes(self.target.config, batch, capacity, self.target.dtype)
        return 8 * self.target.config.n_layer * layer < (memory.available(self.device) or 0)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _plan(self, settings: Settings, sizes: Sizes) -> MemoryPlan:
        draft = None if self.models.draft is None else self.models.draft.config
        return memory.plan_memory(self.target.config, draft, settings, sizes, self.target.dtype, self.device)

    def _plan_document(self, sizes: Sizes, resident: int | None = None) -> MemoryPlan:
        """resident: layers on the device; None: as many as have to be."""
        if resident is None and self.placement.offload:
            resident = self.placement.num_resident_layers or 0
        return memory.plan_document(self.target.config, self.settings, replace(sizes, resident_layers=resident),
                                    self.target.dtype, self.device)

    def _sizes(self, settings: Settings, batch: int, base: int, needed: int, budget: int = 0) -> Sizes:
        capacity = memory.row_capacity(needed, settings, self.placement.max_seq_len, batch, base,
                                       self.target.config.max_len)
        return Sizes(batch, capacity, budget, self.vocab_size, base)

    def _resident(self, batch: int, capacity: int, beside: MemoryPlan) -> int:
        """How many layers of an offloaded prefix stay on the device."""
        layer = memory.layer_bytes(self.target.config, batch, capacity, self.target.dtype)
        return agreed(self.target.group, memory.resident_layers(
            self.placement, self.target.config.n_layer, layer, beside.parts, memory.available(self.device),
            self.device))

    def _fitting(self, settings: Settings, sizes: Sizes) -> Sizes:
        """With the layers that stay on the device, and with a smaller view where the user left that open and these do
        not fit. Raises UserError if nothing does."""
        free, budget = self._comfortable(), sizes.budget
        if not sizes.shared and self.placement.offload:
            least = self._plan(settings, replace(sizes, resident_layers=0))
            sizes = replace(sizes, resident_layers=self._resident(sizes.batch, sizes.capacity, least))
        elif sizes.shared and settings.budget is None and free is not None:
            budget = memory.view_within(lambda view: self._plan(settings, replace(sizes, budget=view)).parts, budget,
                                        free)
        sizes = replace(sizes, budget=agreed(self.target.group, budget))
        self._check(self._plan(settings, sizes), sizes, sizes.resident_layers)
        return sizes

    def _check(self, plan: MemoryPlan, sizes: Sizes, resident: int | None) -> None:
        """Raises UserError if it does not fit."""
        of_no_use = ("--batch-size",) if sizes.batch == 1 else ()

        def check() -> None:
            if self.device.type == "cpu":  # the same memory, wherever a layer lies
                memory.check([plan.host, *plan.parts], self.device,
                             (*of_no_use, "--offload", "--num-resident-layers"))
            else:
                memory.check(plan.parts, self.device, of_no_use)
                memory.check([plan.host], torch.device("cpu"), of_no_use)

        with together(self.target.group) as do:  # one GPU may have less memory free than another
            do(check)
        if resident is not None:
            log.info("KV cache: %d of %d layers on %s, %.2f GiB in host memory", resident, self.target.config.n_layer,
                     self.device, plan.host.bytes / 2**30)

    def _comfortable(self) -> int | None:
        """Bytes of the device to plan with where there is a choice."""
        return memory.less_spare(memory.available(self.device), self.device)

    def _releasable(self) -> int:
        """Bytes of the device that the present DecodeBatch would give back."""
        if self.state is None:
            return 0
        offload = self.state.cache.prefix.offload
        return self.state.nbytes - (0 if offload is None or self.device.type == "cpu" else offload.nbytes)
