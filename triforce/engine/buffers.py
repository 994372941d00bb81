"""Chooses the memory of a call: that of the call before, if it fits, with what it already holds of the prompts.

An engine keeps one `DecodeBatch`, and what its rows share, if they do. The ways to compute less:

- the prompts are those of the call before: the batch is rewound;
- a single prompt begins with what the DecodeBatch holds: only the rest is computed, in place;
- the prompts of a call begin with the same tokens: those are computed once and shared. If the DecodeBatch holds or
  shares them, the next one shares them, too;
- a file of `cache_dir` has the beginning of the prompts.
"""

import functools
import gc
import logging
import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from ..cache.blocks import prefill_blocks
from ..cache.kv_cache import KVCache
from ..cache.prefix import PrefixStore
from ..config import Placement, Settings
from ..cpu import packs, row_unit
from ..decode.batch import DecodeBatch, Models, Sizes
from ..errors import UserError
from ..parallel import agreed, together
from ..runtime.graphs import Compiler
from . import memory
from .memory import VIEW_SIZES, MemoryPlan, for_views, total
from .prompt_cache import SHARED_FROM, Prefix, common_length
from .prompt_cache_file import Altered, PrefixReader
from .prompt_cache_folder import PromptCacheFolder

log = logging.getLogger("triforce")
MOST_ROWS = 32  # over a shared prefix side by side, unless the placement says more


class Buffers:
    """See the module.

    Args:
        settings: as given: this class decides how a DecodeBatch for many rows differs. placement: resolved.
        recorder: the stream on which steps are recorded; None on a CPU.
        new_prefix: makes a `Prefix` of tokens and a store of their keys and values.
        kept: files of prompts, which are read where they help. None: there are none.
    """

    def __init__(self, models: Models, settings: Settings, placement: Placement, vocab_size: int,
                 recorder: "torch.cuda.Stream | None", new_prefix: Callable[[list[int], PrefixStore | None], Prefix],
                 kept: PromptCacheFolder | None = None):
        self.models, self.target, self.device = models, models.target, models.target.device
        self.given, self.placement, self.vocab_size = settings, placement, vocab_size
        self.recorder, self.new_prefix, self.kept = recorder, new_prefix, kept
        self._unkept: Callable[[], Prefix | None] = lambda: None  # what was computed, and has no file yet
        self.settings = self._resolve(settings, placement.max_batch_size)
        self.state: DecodeBatch | None = None
        # What the rows of `state` share. A batch over a document never stands without it; it may outlast its batch.
        self.prefix: Prefix | None = None
        self._wanted = 0  # the budget that `state` would have if memory allowed
        self._is_new = False  # what the rows share was computed for the present call
        self._shelf: dict = {}  # see `Pilot`
        compiled = placement.compile is not False
        self._row_unit = functools.cache(functools.partial(row_unit, self.target, compiled=compiled))

    def settings_for(self, rows: int, shared: bool) -> Settings:
        """The settings of a batch: of `rows` rows over a prefix that they share, or of any number of rows without
        one."""
        if not shared:
            return self.settings
        given = replace(self.given, budget=self.settings.budget)
        return self._resolve(given, rows, shared=True)

    def _resolve(self, settings: Settings, rows: int, shared: bool = False) -> Settings:
        has_model = self.models.draft is not None or self.models.draft_ranks is not None
        return settings.resolve(self.device, has_model=has_model, offload=self.placement.offload, max_batch_size=rows,
                                query_group=self.target.config.query_group, shared=shared)

    def release(self) -> None:
        """Frees the buffers of the last call."""
        was_used, self.state, self.prefix = self.state is not None, None, None
        if was_used:  # it takes 0.1 s
            gc.collect()  # compiled steps make reference cycles
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def find(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None, on_prefill=None) -> DecodeBatch:
        """A DecodeBatch for these prompts, the last one if it fits. Computes what they share."""
        needed, state = self._needed(ids, max_new_tokens), self.state
        if state is not None and state.prompts == ids and self._fits(ids, needed, self.prefix):
            if prefix is None or prefix.is_same(self.prefix):
                return state
        del state  # it is freed before another one is planned
        shared = self._to_share(ids, needed, prefix, on_prefill)
        return self.state if self._fits(ids, needed, shared) else self._new(ids, needed, shared)

    def fill(self, state: DecodeBatch, ids: list[list[int]], on_prefill=None) -> None:
        """Prefills what the DecodeBatch does not hold of the prompts yet."""
        if state.prompts == ids:
            held = max(map(len, ids))
        elif self._goes_on(held := self._num_held(ids)):
            fresh = common_length(ids[0], state.texts()[0]) < state.lens[0]  # a part of it was taken back
            state.truncate(0, held)
            state.prefill(0, ids[0][held:], on_prefill, fresh=fresh)
        else:
            held = state.base
            state.reset()
            try:
                state.prefill_all(ids, on_prefill)
            except UserError:  # the system refuses to pin its memory
                self.release()
                raise
        state.reused = [0 if self._is_new else min(held, len(one) - 1) for one in ids]  # for the statistics

    def rows(self, ids: list[list[int]], max_new_tokens: int, prefix: Prefix | None) -> int:
        """A call begins: how many of its prompts run side by side. Over a shared prefix as many as fit do, even more
        than the placement's number."""
        self._is_new, size = False, self.placement.max_batch_size  # what is held so far is not its own work
        base = self._of_prefix(prefix, ids) if prefix is not None else self._usable(ids) if self.settings.reuse else 0
        if base < (SHARED_FROM if prefix is None else 1) or len(ids) <= size:
            return size
        most, needed = min(len(ids), max(MOST_ROWS, size)), self._needed(ids, max_new_tokens)
        is_held = prefix is not None or self.prefix is not None and self.prefix.num_shared >= base
        free = self._free()
        if free is not None and self.state is not None:  # which is given back
            offload = None if self.device.type == "cpu" else self.state.cache.prefix.offload
            free += self.state.nbytes - (0 if offload is None else offload.nbytes)

        def fits(count: int) -> bool:
            settings = self.settings_for(count, shared=True)
            sizes = self._sizes(settings, count, base, needed, max(map(len, ids)))
            if self.given.budget is None:  # with the smallest view
                sizes = replace(sizes, budget=min(sizes.budget, VIEW_SIZES[0]))
            document = () if is_held else self._plan_document(sizes).parts
            return free is None or total((*document, *self._plan(settings, sizes).parts)) <= free

        rows = next((count for count in range(most, size, -1) if fits(count)), size)
        rows = agreed(self.target.group, rows)
        if rows < most:
            log.info("%d of %d prompts run side by side behind their %s common tokens; more may fit with --offload or "
                     "a larger --chunk-size", rows, len(ids), f"{base:,}")
        return rows

    def budget(self, prompt_len: int, capacity: int | None = None, sharing: int = 1) -> int:
        return self.settings.view_tokens(prompt_len, for_views(self.placement, self.target.config), capacity, sharing)

    # -- what is shared ------------------------------------------------------------------------------------------------

    def _whole(self, length: int) -> int:
        return max(length, 0) // self.settings.flush_interval * self.settings.flush_interval

    def _usable(self, ids: list[list[int]]) -> int:
        """How many of the prompts' common tokens to share: whole intervals. Each row computes the last tokens of its
        prompt, whose queries choose its view."""
        return self._whole(min(common_length(*ids), min(map(len, ids)) - 1 - self.settings.block_size))

    def _of_prefix(self, prefix: Prefix, ids: list[list[int]]) -> int:
        """How many tokens of a prefix the prompts share: not the last one of a prompt, which is pending."""
        common = common_length(prefix.tokens[: prefix.num_shared], *ids)
        return prefix.held(self._whole(min(common, min(map(len, ids)) - 1)))

    @property
    def _alone(self) -> DecodeBatch | None:
        """The DecodeBatch, if it has one row and no call was broken off in the middle."""
        state = self.state
        return state if state is not None and state.batch == 1 and state.is_whole else None

    def _num_held(self, ids: list[list[int]]) -> int:
        """How many tokens of a single prompt need not be computed, since the batch holds their keys and values. The
        last tokens are computed in any case: their queries choose the view."""
        state = self._alone
        if not self.settings.reuse or len(ids) > 1 or state is None:
            return 0
        most = len(ids[0]) - 1 - state.cache.newest
        held = max(min(common_length(ids[0], state.texts()[0]), state.lens[0], state.told - 1, most), 0)
        return held if state.cache.prefix.holds(0, held, kept=True) else 0

    def _goes_on(self, held: int) -> bool:
        """Whether `held` tokens of a prompt, which the DecodeBatch holds, are enough to go on from."""
        return held > self.state.base if self.state.base else held >= self.settings.flush_interval

    def _to_share(self, ids: list[list[int]], needed: int, prefix: Prefix | None, on_prefill) -> Prefix | None:
        """What the rows of the DecodeBatch for these prompts are to share."""
        if prefix is not None:
            common = self._of_prefix(prefix, ids)
            return prefix.part(common) if common else None
        if not self.settings.reuse:
            return None
        usable, state = self._usable(ids), self._alone
        if state is not None and len(ids) == 1 and self._goes_on(self._num_held(ids)):
            if state.base or self._fits(ids, needed, None):
                return self.prefix  # it goes on in place, or behind the same document
        found = self.held(ids[0][:usable], self.prefix, own=state is not None and state.base == 0)
        if found.num_shared >= max(SHARED_FROM, usable // 2):
            return self.prefix if found.is_same(self.prefix) else found
        if len(ids) == 1 and self.kept is None or usable < SHARED_FROM:
            return None
        del state, found  # they are freed before this is planned
        of_file = 0 if self.kept is None else self.kept.find(ids[0][:usable])[0]
        computed = self.compute(ids[0][: of_file or usable], on_prefill)
        self._is_new = computed.num_read == 0
        return computed

    def keep(self) -> None:
        """Writes the newest document to the folder of prompts, if it still lives and was not read from there."""
        prefix, self._unkept = self._unkept(), lambda: None
        if prefix is not None:
            self.kept.save(prefix)

    def held(self, tokens: list[int], document: Prefix | None, own: bool = True) -> Prefix:
        """A text, with the keys and values that the batch (if `own`) or else the document's prefix holds of it."""
        found, state = [(0, None)], self._alone
        if document is not None and document.store is not None:
            found.append((min(common_length(tokens, document.tokens), document.num_shared), document.store))
        if state is not None and own:
            length = min(common_length(tokens, state.texts()[0]), state.cache.prefix.lens[0], state.told - 1)
            found.append((length if length > state.base else 0, state.cache.prefix))
        wholes = ((self._whole(length), store) for length, store in found)
        length, store = max((one for one in wholes if one[0] == 0 or one[1].holds(0, one[0])), key=lambda one: one[0])
        return self.new_prefix(tokens, store.part(length) if length else None)

    @torch.inference_mode()
    def compute(self, tokens: list[int], on_progress=None, reader: PrefixReader | None = None,
                every: int | None = None, on_part: Callable[[Prefix], None] | None = None,
                length: int | None = None) -> Prefix:
        """Keys and values of a text, or of `length` tokens of it: whole intervals.

        Args:
            reader: of a file that has the text's beginning.
            every: tokens after which `on_part` is called with what there is of the text; None: never.
        """
        length, num_read = self._whole(len(tokens) if length is None else length), 0
        if length == 0:
            return self.new_prefix(tokens, None)
        if reader is None and self.kept is not None:
            try:
                with self.kept.reader(tokens[:length]) as found:
                    if found is not None:
                        return self.compute(tokens, on_progress, found, every, on_part, length)
            except Altered as error:
                log.warning("a kept prompt is not used, and is removed: %s", error)
        # A file may hold more: whole intervals of another engine.
        cache = self.allocate(length if reader is None else max(length, reader.layout.length))
        store = cache.prefix
        # Whole chunks of a prefill, so that the numbers are those of a prefill in one go.
        unit = math.lcm(self.settings.prefill_chunk_size, self.settings.flush_interval)
        held = 0 if reader is None else self._whole(common_length(reader.tokens[: reader.layout.length],
                                                                  tokens[:length]))
        if held:
            self._read(reader, store)
            counts = [held] * (held == length or bool(store.windowed)) + [held // unit * unit, 0]
            num_read = next(count for count in counts if store.holds(0, count))
            store.truncate(0, num_read)
        stretch = length if every is None else -(-every // unit) * unit
        for start in range(num_read, length, stretch):
            stop = min(start + stretch, length)
            self._compute(cache, tokens, start, stop, on_progress)
            store.truncate(0, stop)
            if stop < length:
                on_part(self.new_prefix(tokens[:stop], store))
        prefix = self.new_prefix(tokens, store)
        prefix.num_read = num_read
        if self.kept is not None and length >= max(SHARED_FROM, 2 * num_read):
            self._unkept = weakref.ref(prefix)
        if self.settings.ngram and self.settings.auto:
            prefix.meter()  # which questions will need: on the host, while a GPU still computes
        return prefix

    def _read(self, reader: PrefixReader, store: PrefixStore) -> None:
        """Fills an empty store from a file."""
        layout, config = reader.layout, self.target.config
        newest = {i: torch.empty(2, config.n_kv_head, layout.held(i), config.head_dim, dtype=self.target.dtype,
                                 device=self.device) for i in store.windowed}
        reader.fill(lambda i: newest[i] if i in newest else store.layer(i, 0), self.heads, self.device,
                    self.target.group)
        store.oldest[0] = max((layout.length - layout.held(i) for i in newest), default=0)
        for i in range(config.n_layer):
            if i in newest:
                store.store(i, 0, layout.length - layout.held(i), newest[i])
            else:
                store.score(i, 0, 0, store.load(i, 0, 0, self._whole(layout.length))[0])

    def _compute(self, cache: KVCache, tokens: list[int], start: int, stop: int, on_progress) -> None:
        """Computes those of tokens [start, stop), after all earlier ones."""
        store, offload = cache.prefix, cache.prefix.offload
        on_layer = functools.partial(store.score_layer, rows=range(1), start=start, stops=[stop])

        def report(share: float) -> None:
            on_progress((start**2 + share * (stop**2 - start**2)) / self._whole(len(tokens)) ** 2)

        blocks = prefill_blocks(cache, range(1), start, stop, self.settings.prefill_chunk_size, on_layer=on_layer)
        try:
            self.target.prefill(torch.tensor([tokens[start:stop]], device=self.device), blocks,
                                on_progress and report, cache_only=True)
        finally:
            if offload is not None:
                offload.close_work()

    @property
    def heads(self) -> range:
        """This rank's part of the whole model's KV heads."""
        count, rank = self.target.config.n_kv_head, 0 if self.target.group is None else self.target.group.rank
        return range(rank * count, (rank + 1) * count)

    def allocate(self, length: int) -> KVCache:
        """Room for a prefix of `length` tokens."""
        settings, config, dtype = self.settings, self.target.config, self.target.dtype
        self.release()
        sizes = Sizes(1, length + 1024, self.budget(1), self.vocab_size, length)  # questions are to fit, too
        if self.placement.offload:
            sizes = replace(sizes, resident_layers=self._resident(1, length, self._plan(settings, sizes)))
        self._check(self._plan_document(sizes), sizes)
        with torch.inference_mode(False):
            return KVCache(config, self.target.rope, batch=1, capacity=length, block_size=1, device=self.device,
                           resident_layers=sizes.resident_layers, piece=settings.piece_tokens, dtype=dtype,
                           flush_interval=settings.flush_interval, chunk_size=settings.scored_chunk_size)

    # -- a batch -------------------------------------------------------------------------------------------------------

    def _needed(self, ids: list[list[int]], max_new_tokens: int) -> int:
        """Tokens that a row has to hold."""
        return memory.needed_tokens(max(map(len, ids)) + max_new_tokens, self.settings, self.placement.max_seq_len)

    def _fits(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> bool:
        state = self.state
        if state is None or state.batch != len(ids) or state.capacity < needed:
            return False
        same = self.prefix is None if shared is None else shared.is_same(self.prefix)
        if not same or self._wanted == self.budget(max(map(len, ids)), state.capacity):
            return same
        # A view that is not the user's choice need not grow with every turn of a conversation.
        return self.settings.budget is None and (state.base > 0 or self._num_held(ids) > 0)

    def _new(self, ids: list[list[int]], needed: int, shared: Prefix | None) -> DecodeBatch:
        batch, base = len(ids), 0 if shared is None else shared.num_shared
        settings = self.settings_for(batch, shared=base > 0)
        self.release()  # before the new ones are planned
        sizes = self._sizes(settings, batch, base, needed, max(map(len, ids)))
        self._wanted, offloads = sizes.budget, not base and bool(self.placement.offload)
        if offloads:
            sizes = replace(sizes, resident_layers=self.placement.num_resident_layers or 0)
        if (base or offloads) and self.given.budget is None:
            plan = functools.partial(self._plan, settings)
            budgets = together(self.target.group, lambda: memory.view_within(plan, sizes, settings, self._free()))
            sizes = replace(sizes, budget=min(budgets))
        if offloads:
            sizes = replace(sizes, resident_layers=self._resident(batch, sizes.capacity, self._plan(settings, sizes)))
        self._check(self._plan(settings, sizes), sizes)
        if base:
            self.pack(shared.store)
        self.prefix = shared if base else None  # first: whoever finds a DecodeBatch over a document has to know of that
        compiles = self.placement.compile
        compiler = Compiler(self.device, recorder=None if compiles is False else self.recorder,
                            compiles=compiles is True)
        with torch.inference_mode(False):  # buffers that may be written inside and outside of that mode
            self.state = DecodeBatch(
                self.models, settings, sizes, compiler, shared=shared.store if base else None,
                meter=shared.meter if base else None, shelf=self._shelf,
                pack=self._may_pack(batch, sizes.capacity), row_unit=self._row_unit(batch, settings.block_size))
        return self.state

    def pack(self, store: PrefixStore) -> None:
        """Copies what rows will share into the CPU's own layout, after plans of memory, which do not count the copy."""
        if store.packed is None and packs(self.device, self.target.dtype) and self._may_pack(1, store.lens[0]):
            with torch.inference_mode(False):
                store.pack()

    def _may_pack(self, batch: int, capacity: int) -> bool:
        """Whether a second copy is a small part of what is free."""
        layer = memory.layer_bytes(self.target.config, batch, capacity, self.target.dtype)
        return 8 * self.target.config.n_layer * layer < (memory.available(self.device) or 0)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _plan(self, settings: Settings, sizes: Sizes) -> MemoryPlan:
        draft = self.models.draft and self.models.draft.config
        return memory.plan_memory(self.target.config, draft, settings, sizes, self.target.dtype, self.device)

    def _plan_document(self, sizes: Sizes) -> MemoryPlan:
        """The plan of a document. Where its layers on the device are not decided, it counts the fewest."""
        if sizes.resident_layers is None and self.placement.offload:
            sizes = replace(sizes, resident_layers=self.placement.num_resident_layers or 0)
        return memory.plan_document(self.target.config, self.settings, sizes, self.target.dtype, self.device)

    def _sizes(self, settings: Settings, batch: int, base: int, needed: int, longest: int) -> Sizes:
        """longest: tokens of a prompt."""
        capacity = memory.row_capacity(needed, settings, self.placement.max_seq_len, batch, base,
                                       self.target.config.max_len)
        return Sizes(batch, capacity, self.budget(longest, capacity, batch if base else 1), self.vocab_size, base)

    def _resident(self, batch: int, capacity: int, beside: MemoryPlan) -> int:
        """How many layers of an offloaded prefix stay on the device."""
        layer = memory.layer_bytes(self.target.config, batch, capacity, self.target.dtype)
        return agreed(self.target.group, memory.resident_layers(
            self.placement, len(self.target.config.full_layers), layer, beside.parts, memory.available(self.device),
            self.device))

    def _check(self, plan: MemoryPlan, sizes: Sizes) -> None:
        """Raises UserError if the plan does not fit."""
        of_no_use = ["--batch-size"] * (sizes.batch == 1)
        checks = [(plan.parts, self.device), ([plan.host], torch.device("cpu"))]
        if self.device.type == "cpu":  # the same memory, wherever a layer lies
            of_no_use += ["--offload", "--num-resident-layers"]
            checks = [((plan.host, *plan.parts), self.device)]
        for parts, device in checks:  # one GPU may have less memory free than another
            together(self.target.group, functools.partial(memory.check, parts, device, of_no_use))
        if sizes.resident_layers is not None:
            log.info("KV cache: %d of %d layers on %s, %.2f GiB in host memory", sizes.resident_layers,
                     len(self.target.config.full_layers), self.device, plan.host.bytes / 2**30)

    def _free(self) -> int | None:
        """Bytes of the device to plan with where there is a choice."""
        return memory.less_spare(memory.available(self.device), self.device)
