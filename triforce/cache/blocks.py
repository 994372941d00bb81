"""Blocks of a target's cache: what a decoding step, or a chunk of a prefill, gives the model as its `kv`.

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, T tail slots, D head_dim.
"""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import attention
from ..attention import rotate
from ..cpu import MANY_ROWS, MIN_ROWS
from ..model import ModelConfig, RotaryEmbedding, eager
from ..runtime.graphs import put
from .kv_cache import KVCache
from .offload import Passage
from .prefix import GROWTH, PrefixStore
from .store import Extent, View


def _target_geometry(rope: RotaryEmbedding, start: Tensor, prefix_len: Tensor, tree, tail_slots: int,
                     config: ModelConfig, view_len: Tensor | None, room: int, dtype: torch.dtype):
    """What all layers of a block share: cos, sin [kinds, B, H + 2K, M, D], slots [B, M], bias [B, 1, G * M, room + T];
    for a tree whose rows see their paths apart, the paths' slots [B, M, P] and bias [B, 1, 1, M, P], else None. Values
    have angles of 0, so that one operation turns all heads of a token. tree: what has a `Layout`. view_len [B], room:
    length and capacity of a view that lies before the tail; None, 0: there is none. dtype: of the bias. And what
    `_window_geometry` goes by, where layers have windows: the rows' positions [B, M], and what they see of the tail.
    """
    layout, first = tree.layout(start.device), start - prefix_len  # the pending token's slot
    positions = start[:, None] + layout.depths  # [B, M]
    turned, still = config.n_head + config.n_kv_head, config.n_kv_head
    # As projected heads lie in memory, [B, M, H + 2K, D].
    cos, sin = (torch.cat([table[:, :, :, None].expand(-1, -1, -1, turned, -1),
                           torch.full_like(table, value)[:, :, :, None].expand(-1, -1, -1, still, -1)], 3)
                .transpose(2, 3) for table, value in zip(rope(positions), (1.0, 0.0), strict=True))
    slots, group = first[:, None] + layout.slots, config.query_group
    slot = torch.arange(tail_slots, device=start.device)
    seen = slot < (first[:, None] + layout.before)[..., None]  # [B, M, T]
    path = None if layout.path is None else first[:, None, None] + layout.path  # [B, M, P]
    if path is not None and not layout.apart:
        seen = seen | (path[..., None] == slot).any(2)
    windows = (positions, seen) if config.sliding_layers else None
    bias = attention.fold_mask(seen, group, dtype)
    if room:
        bias = torch.cat([_view_bias(view_len, 0, room, tree.rows, group, dtype), bias], -1)
    if not layout.apart:
        return cos, sin, slots + room, bias, None, None, windows
    own = torch.where(path >= 0, 0.0, float("-inf"))[:, None, None]
    return cos, sin, slots + room, bias, path.clamp(min=0) + room, own, windows


def _window_geometry(positions: Tensor, seen: Tensor, prefix: PrefixStore, config: ModelConfig,
                     dtype: torch.dtype) -> list[Tensor]:
    """What layers with a window share: biases [B, 1, G * M, n] over the tail, over the ring of what all rows share, if
    they do, and over that of each row's own tokens."""
    device, oldest = seen.device, (positions - config.sliding_window)[..., None]  # [B, M, 1]: no longer seen
    masks = [seen & (prefix.len[:, None, None] + torch.arange(seen.shape[2], device=device) > oldest)]
    for store, length, base in ((prefix.shared, prefix.base, 0), (prefix, prefix.len[:, None], prefix.base)):
        if store is not None:  # each slot of a ring holds the newest token that it can
            newest = length - base - 1
            place = newest - (newest - torch.arange(store.ring, device=device)) % store.ring  # [B, ring] or [ring]
            masks.append((place >= 0)[..., None, :] & ((place + base)[..., None, :] > oldest))
    return [attention.fold_mask(x, config.query_group, dtype) for x in masks]


def _view_bias(view_len: Tensor, start: int, stop: int, rows: int, group: int, dtype: torch.dtype) -> Tensor:
    """Hides those positions in [start, stop) of a view that a row of the batch does not have."""
    held = torch.arange(start, stop, device=view_len.device) < view_len[:, None]  # [B, stop - start]
    return attention.fold_mask(held[:, None].expand(-1, rows, -1), group, dtype)


class TargetBlock:
    """`kv` of a decoding step over one view: M rows a row of the batch, at the positions of a tree from `start` on."""

    def __init__(self, cache: KVCache, view: View, start: Tensor, tree, extent: Extent, keep_queries: bool,
                 compiled=eager, on_piece=None):
        """start: [B], the position of each row's first token. extent: how much of the view is attended to.

        tree: a `TokenTree`, or else what has rows and a `Layout`.
        on_piece: see `Passage`.
        """
        self.cache, self.view, self.extent, self.compiled = cache, view, extent, compiled
        self.n_head, self.n_kv_head, self.keep_queries = cache.config.n_head, cache.config.n_kv_head, keep_queries
        self.alone = view.joined and view.shared is None and not cache.config.sinks
        self.waits = view.joined and view.follows  # `read` attends to the tail, once the view before it is chosen
        self.passage = None if view.streams is None else Passage(view.streams, ahead=True, on_piece=on_piece)
        tail, room = cache.tail, cache.tail.room if view.joined else 0
        self.cos, self.sin, self.slots, self.bias, self.path, self.path_bias, windows = compiled(_target_geometry)(
            cache.rope, start, cache.prefix.len, tree, tail.slots, cache.config, view.len if room else None, room,
            torch.float32 if tail.slots + room > attention.AT_ONCE else tail.whole.dtype)  # as what it is added to
        self.ragged_bias = self.parts = self.near_path_bias = None
        if cache.config.sliding_layers:
            self.window_biases = _window_geometry(  # uncompiled: each document has a base of its own
                *windows, cache.prefix, cache.config, tail.whole.dtype)
            if self.path_bias is not None:  # from the newest token of a path to the oldest
                self.near_path_bias = self.path_bias.clone()
                self.near_path_bias[..., cache.config.sliding_window :] = float("-inf")
        if view.length_on_device and extent.longest:
            self.parts = attention.parts_up_to(view.own_len, extent.longest, view.places, tree.rows * cache.group,
                                               fused=compiled(attention.join) is not attention.join)
        elif extent.longest > extent.dense:
            self.ragged_bias = _view_bias(view.own_len, *extent, tree.rows, cache.group, tail.whole.dtype)
        self.num_parts = 0 if self.parts is None else len(self.parts.lengths)

    def layer(self, i: int) -> "TargetBlock":
        """Compiled code sees attributes of its own: what it reads is then the same for all layers."""
        layer, tail = copy.copy(self), self.cache.tail
        layer.i, (layer.cos, layer.sin) = i, self.cache.rope.of_layer(i, self.cos, self.sin)
        # Where `write` writes, and what it attends over: [2, B, K, T, D], or with the view before it.
        layer.written = layer.near = (tail.storage if self.view.joined else tail.kv)[i]
        layer.queries = self.cache.queries[i] if self.keep_queries else None
        if i in self.cache.config.sliding_layers:  # it reads the prefix's newest keys, whatever the view
            layer.near, layer.bias, layer.alone, layer.waits = tail.kv[i], self.window_biases[0], False, False
            layer.path_bias, layer.num_parts = self.near_path_bias, 0
        return layer

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Writes K and V. Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D], or [P, B, K, G * M, D] for
        `num_parts`; and states over the tail, or over view and tail where the view lies right before it."""
        q, kv = rotate(heads, self.cos, self.sin).split([self.n_head, 2 * self.n_kv_head], dim=1)
        if self.queries is not None:
            self.queries[:, :, : q.shape[2]] = q
        kv = kv.unflatten(1, (2, -1))  # [B, 2, K, M, D]
        put(self.written, self.slots, kv.permute(0, 3, 1, 2, 4), batch_dim=1, dim=3)
        q = attention.fold(q, self.n_kv_head)
        # The path comes first, since every row sees itself on it.
        states = [] if self.path is None else [attention.apart(q, *self._path(kv), self.path_bias)]
        states = states if self.waits else [*states, self._near(q)]
        # As the view's kernel wants them; on its own that copy would take longer.
        return q.expand(self.num_parts, *q.shape).contiguous() if self.num_parts else q, states

    def _near(self, q: Tensor) -> attention.State:
        """The state over the tail, and over the view where that lies right before it."""
        return attention.masked(q, *self.near, self.bias, no_empty_rows=self.path is None, alone=self.alone)

    def _path(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each row's path, [B, K, M, P, D] each. kv: [B, 2, K, M, D], those of the rows."""
        if self.path.shape[2] == 1:  # itself alone
            return kv[:, 0, :, :, None], kv[:, 1, :, :, None]
        rows = torch.arange(len(kv), device=kv.device)[:, None, None]
        k, v = (half[rows, :, self.path].permute(0, 3, 1, 2, 4) for half in self.written)
        return k, v

    def read(self, q: Tensor) -> list:
        """States over the shared part, the view's dense part and its ragged part, where they exist. The ragged part
        comes last: where it weighs nothing, no bits depend on it."""
        view, i, longest, of_parts = self.view, self.i, self.extent.longest, q
        q = q[0] if self.num_parts else q
        if i in self.cache.config.sliding_layers:
            return self._in_window(q)
        for one in (view.shared, view):
            if one is not None and one.follows:
                one.follow(i, q)
        states = [] if view.shared is None else [over_shared(view, i, q, self.passage)]
        if view.joined or longest == 0:
            return [*states, self._near(q)] if self.waits else states
        if i in view.streamed:
            return [*states, self.passage.attend(i, longest, partial(self._attend, q))]
        k, v, start = view.k[i], view.v[i], 0
        if self.parts is not None:
            return [*states, attention.up_to(of_parts, k, v, self.parts)]
        if view.packed is not None and q.shape[2] >= MIN_ROWS:
            states.append(view.packed[i].dense(q))
            start = view.packed[i].length
        return states + self._attend(q, start, k[:, :, start:longest], v[:, :, start:longest])

    def _in_window(self, q: Tensor) -> list:
        """States over the rings."""
        prefix, biases = self.cache.prefix, self.window_biases[1:]
        stores = [store for store in (prefix.shared, prefix) if store is not None]
        return [attention.ring(q, store.k[self.i], store.v[self.i], bias)
                for store, bias in zip(stores, biases, strict=True)]

    def _attend(self, q: Tensor, start: int, k: Tensor, v: Tensor) -> list:
        """States over K and V [B, K, n, D] of positions from `start` on: over those that all rows see, and over the
        others, GROWTH at a time."""
        offset = self.extent.dense - start  # of what is masked
        split = min(max(offset, 0), k.shape[2])
        states = [attention.dense(q, k[:, :, :split], v[:, :, :split])] if split else []
        for begin in range(split, k.shape[2], GROWTH):
            here = slice(begin, min(begin + GROWTH, k.shape[2]))
            bias = self.ragged_bias[..., here.start - offset : here.stop - offset]
            states.append(attention.masked(q, k[:, :, here], v[:, :, here], bias, long=True))
        return states


def over_shared(view: View, i: int, q: Tensor, passage: Passage | None = None,
                attend: Callable = attention.shared) -> attention.State:
    """The state of queries [B, K, R, D] over layer i of the part that all rows share before a view, perhaps in parts.

    A prefill attends by `attention.dense`, whose kernel may depend on the number of rows. The kernel of a round on a
    CPU does not: rows that end would change the bits of the others. passage: of the pieces, if they stream past.
    """
    shared, base = view.shared, view.base
    if i not in shared.streamed:
        rows, most = len(q) * q.shape[2], MANY_ROWS if attend is attention.dense else math.inf
        if shared.packed is not None and MIN_ROWS <= rows < most:
            return attention.of_batch(shared.packed[i].dense, q)
        return attend(q, shared.k[i][:, :, :base], shared.v[i][:, :, :base])
    return passage.attend(i, base, lambda _, k, v: [attention.merge_parts(*attend(q, k, v))])


@dataclass
class PrefillBlock:
    """`kv` of a prefill chunk of some rows: positions [start, stop), written straight into the prefix."""

    cache: KVCache
    rows: range  # of the batch, with the same positions
    start: int
    stop: int
    is_first: bool  # of the chunks of a prefill
    lengths: list[int]  # where the tokens of each row end; what comes after is padding
    keep_queries: bool
    passage: Passage | None  # of all chunks together, where a shared prefix streams past
    on_layer: Callable[[int], None] | None  # called with each layer's number when K and V are written

    def __post_init__(self):
        place = torch.arange(self.start, self.stop, device=self.cache.prefix.len.device)
        self.cos, self.sin = self.cache.rope(place)  # [kinds, M, D]
        self.n_head, self.n_kv_head = self.cache.config.n_head, self.cache.config.n_kv_head

    def layer(self, i: int) -> "PrefillBlock":
        layer, prefix = copy.copy(self), self.cache.prefix
        layer.i, layer.offload = i, prefix.offload if i in prefix.streamed else None
        layer.cos, layer.sin = self.cache.rope.of_layer(i, self.cos, self.sin)
        if layer.offload is not None and self.is_first:
            layer.offload.open_work(i, self.rows.start, self.start)
        if i in prefix.windowed:  # a ring takes them in when they have been read
            shape = (len(self.rows), self.n_kv_head, self.stop - self.start, prefix.k[i].shape[3])
            layer.k, layer.v = (prefix.k[i].new_empty(shape) for _ in range(2))
            return layer
        kv = prefix.working_layer(i, self.rows)  # K, V [B, K, S, D], from position `base` on
        start, stop = self.start - prefix.base, self.stop - prefix.base
        layer.before = [x[:, :, :start] for x in kv]
        layer.k, layer.v = (x[:, :, start:stop] for x in kv)  # [B, K, M, D]
        return layer

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, H, M, D]; K and V are written."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q = rotate(q, self.cos, self.sin)
        self.k.copy_(rotate(k, self.cos, self.sin))
        self.v.copy_(v)
        return q, []

    def close(self, q: Tensor) -> None:
        """Stores what a chunk leaves behind: its last queries, and K and V of an offloaded layer or for a ring."""
        if self.offload is not None:
            self.offload.store_chunk(self.i, self.rows.start, self.start, self.stop)
        if self.i in self.cache.prefix.windowed:
            for row, k, v, length in zip(self.rows, self.k, self.v, self.lengths, strict=True):
                kv = torch.stack([k, v])[:, :, : length - self.start]  # no padding: it would overwrite what is needed
                self.cache.prefix.store(self.i, row, self.start, kv)
        if self.keep_queries:
            for row, mine, length in zip(self.rows, q, self.lengths, strict=True):
                newest = length - self.start
                count = min(self.cache.newest, newest)
                self.cache.queries[self.i][row][:, :count] = mine[:, newest - count : newest]
        if self.on_layer is not None:
            self.on_layer(self.i)

    def read(self, q: Tensor) -> list:
        """The causal square of the chunk, and all that comes before it, unmasked."""
        group, prefix, rows = self.cache.group, self.cache.prefix, q.shape[2]
        state = self._in_window(q) if self.i in prefix.windowed else None
        self.close(q)
        if state is not None:
            return [state]
        own = attention.causal(q, self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1))
        q, before = attention.fold(q, self.n_kv_head), []
        if prefix.shared is not None:
            before.append(over_shared(prefix, self.i, q, self.passage, attention.dense))
        if self.before[0].shape[2]:
            # Such a number of rows occurs once, so one plan for all keys is enough.
            once = rows & (rows - 1)
            before += [attention.dense(q, *self.before)] if once else attention.by_powers(q, *self.before)
        return [own, *((out.reshape(own[0].shape), lse.reshape(own[1].shape)) for out, lse in before)]

    def _in_window(self, q: Tensor) -> attention.State:
        """A layer with a window sees the newest keys, those of a shared prefix among them."""
        prefix, first = self.cache.prefix, max(self.start - self.cache.prefix.window + 1, 0)
        before = torch.stack([prefix.load(self.i, row, first, self.start) for row in self.rows], 1)  # [2, B, K, n, D]
        k, v = (torch.cat(x, 2) for x in zip(before, (self.k, self.v), strict=True))
        return attention.windowed(q, k, v, prefix.window)


def prefill_blocks(cache: KVCache, rows: range, start: int, stop: int, size: int, *,
                   lengths: list[int] | None = None, keep_queries: bool = False,
                   on_layer=None) -> list[tuple[int, int, PrefillBlock]]:
    """Chunks of at most `size` of the tokens [start, stop) of some rows: what `Transformer.prefill` takes.

    Args:
        lengths: where the tokens of each row end; rows that end differently are one chunk. None: at `stop`.
        keep_queries: of the last tokens, for a view to choose by.
        on_layer: called with each layer's number when all K and V are written.
    """
    lengths, passage = lengths or [stop] * len(rows), None
    edges = [*range(start, stop, size), stop]
    if cache.prefix.len.is_cuda and min(lengths) == stop:
        # The end of the last chunk, beyond whole tiles, becomes a chunk of its own with all queries that are kept:
        # another kernel is the fastest for it. A last chunk of full size is not cut.
        count = stop - edges[-2]
        whole = (count - (cache.newest if keep_queries else 1)) // attention.TILE * attention.TILE
        if count % attention.TILE and count < size and whole > 0:
            edges.insert(-1, edges[-2] + whole)
    if keep_queries:
        place = torch.arange(cache.query_weight.shape[1], device=cache.query_weight.device)
        for row, length in zip(rows, lengths, strict=True):
            cache.query_weight[row] = place < min(length - edges[-2], cache.newest)
    if cache.prefix.streams is not None:
        passage = Passage(cache.prefix.streams)
    return [(a - start, b - start, PrefillBlock(cache, rows, a, b, a == start, lengths, keep_queries and b == stop,
                                                passage, on_layer if b == stop else None))
            for a, b in itertools.pairwise(edges)]
