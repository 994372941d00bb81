"""KV caches: the target's prefix and tail, its full view, and the draft's streaming cache. Knows nothing of tokens.

The target's keys and values live in two places. The **prefix** is long, holds whole multiples of `flush_interval`
tokens of a row and needs no mask. The **tail** holds the newest tokens in a static shape: those since the last flush
and the block being computed. Where a token's K/V lie is thus a function of its absolute position alone, so a step of
a given block size computes the same bits whatever was drafted before. To undo drafted tokens is to forget a length:
their slots are overwritten. A **view** is the prefix (or a selection from it) that a level attends to; all views
share the tail, so what the full level verifies, the others see.

A forward pass is given one of the `...Block` objects below as its `kv`: built once a step, it holds what all layers
share (angles, masks, slots). Its `layer(i)` has two methods: `write` takes a layer's new keys and values in and attends
over what is small and static; `read` attends over what is long. `write` is compiled with the layer around it; `read`
calls one fixed kernel, whose lengths may change without anything being compiled anew.

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, T tail slots, D head_dim.
"""

import torch
from torch import Tensor

from . import attention
from .graphs import put
from .model import ModelConfig, RotaryEmbedding, eager, rotate
from .offload import Offload
from .packed import MIN_ROWS, MIN_TOKENS, PackedPrefix

GROWTH = 1024  # tokens of a batch's masked part that are attended to together
ALIGNED = 8 * attention.SPLIT  # tokens: tensor cores load 8 at a time, of each part of a product
STRIDE = 512  # tokens of a prefix for which the same graph serves, where a kernel reads the length on the device


def aligned(tokens: int) -> int:
    """So many tokens or a few more, over which a GPU's products are fast."""
    return -(-tokens // ALIGNED) * ALIGNED


class View:
    """A run of keys and values per layer that a level attends to besides the tail.

    Row b sees the first `lens[b]` positions of `k[layer]`, `v[layer]`, each [B, K, capacity, D]. How they are attended
    to is its `extent`.
    """

    bounded = False  # its length is read on the device, and `extent` is only an upper bound
    lies_near = False  # its storage is followed by the tail: see TargetCache.near
    offload: Offload | None = None  # what keeps the layers that `k` and `v` lack
    packed: list[PackedPrefix] | None = None  # per layer: its first tokens once more, for blocks of several rows

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, storage=None, num_layers=None):
        """storage: per layer K and V, [2, B, K, capacity or more, D]. None: allocated, for the first num_layers."""
        shape = (batch, config.n_kv_head, capacity, config.head_dim)
        if storage is None:
            layers = range(config.n_layer if num_layers is None else num_layers)
            self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
            self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        else:
            self.k, self.v = ([kv[half, :, :, :capacity] for kv in storage] for half in range(2))
        self.lens = [0] * batch
        self.len = torch.zeros(batch, dtype=torch.int32, device=device)  # [B], the same on the device

    def set_len(self, row: int, length: int) -> None:
        self.lens[row] = length
        self.len[row].fill_(length)

    @property
    def extent(self) -> tuple[int, int, tuple[int, ...]]:
        """(dense, longest, starts). The first `dense` positions (where `bounded`, those that are there) are seen by
        every row and go through one fused kernel; the others, `longest - dense` of them, are masked per row. starts:
        empty, or per row where its masked ones begin; those between `dense` and there go through the fused kernel row
        by row."""
        return min(self.lens), max(self.lens), ()


class FullView(View):
    """The whole prefix: its first layers on the device, in `k` and `v`, the others, if any, in `offload`.

    A batch's rows flush at different times. So that a row's bits do not depend on when its neighbours do, what is not
    masked stays what it was when the batch began, and the masked part grows in steps of GROWTH, each a state of its
    own: where a row has not come that far, it adds exactly nothing.
    """

    _batch_extent: tuple[int, int, tuple[int, ...]] | None = None

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, dtype, offload: Offload | None):
        super().__init__(config, batch, capacity, device, dtype, num_layers=offload and offload.num_resident)
        self.offload = offload
        self.bounded = batch == 1 and offload is None and attention.spans(self.len.device, dtype, config.head_dim)
        self.ends = torch.arange(2, dtype=torch.int32, device=device)  # see `attention.up_to`
        self.starts = torch.zeros_like(self.len)  # what `extent` says of them, on the device

    def load(self, i: int, row: int, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) of layer i: [2, K, stop - start, D]."""
        if i < len(self.k):
            return torch.stack([self.k[i][row, :, start:stop], self.v[i][row, :, start:stop]])
        return self.offload.load(i, row, start, stop)

    def store(self, i: int, row: int, start: int, kv: Tensor) -> None:
        """Writes [2, K, n, D] at `start`."""
        if i < len(self.k):
            stop = start + kv.shape[2]
            self.k[i][row, :, start:stop], self.v[i][row, :, start:stop] = kv
        else:
            self.offload.store(i, row, start, kv)

    def hot(self, i: int, row: int) -> tuple[Tensor, Tensor]:
        """Layer i as a prefill of this row writes and reads it: K, V, each [K, at least as far as it came, D]."""
        if i < len(self.k):
            return self.k[i][row], self.v[i][row]
        k, v = self.offload.work(i, row)
        return k.transpose(0, 1), v.transpose(0, 1)

    def pack(self) -> None:
        """Packs what row 0 holds, if that is worth it."""
        length = self.lens[0]
        self.packed = None
        if length >= MIN_TOKENS:
            layers = zip(self.k, self.v, strict=True)
            self.packed = [PackedPrefix(k[0, :, :length], v[0, :, :length]) for k, v in layers]

    def fix_extent(self, max_len: int) -> None:
        """Called once the prompts are in: no row's prefix will outgrow max_len."""
        self._batch_extent = None
        if len(self.lens) == 1:
            return
        dense = min(self.lens)
        if self.offload is None and max(self.lens) > dense:
            self._batch_extent = dense, dense + max_len - max(self.lens), tuple(self.lens)
            self.starts.copy_(torch.tensor(self.lens))
        else:  # the pieces of what streams past are those of all rows
            self._batch_extent = dense, max_len, ()

    @property
    def extent(self) -> tuple[int, int, tuple[int, ...]]:
        return self.extent_after(0)

    def extent_after(self, more: int) -> tuple[int, int, tuple[int, ...]]:
        """`extent`, once each row has so many tokens more."""
        if self.bounded:
            bound = min(-(-(self.lens[0] + more) // STRIDE) * STRIDE, self.k[0].shape[2])
            return bound, bound, ()
        if self._batch_extent is None:
            return min(self.lens) + more, max(self.lens) + more, ()
        dense, longest, starts = self._batch_extent
        grown = more + max(n - start for n, start in zip(self.lens, starts or [dense] * len(self.lens), strict=True))
        return dense, min(longest, dense + max(-(-grown // GROWTH), 1) * GROWTH), starts


class TargetCache:
    """The target's K/V for one batch of conversations: allocated once, sized by `capacity` tokens a row."""

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, capacity: int, block_size: int,
                 flush_interval: int, chunk_size: int, budget: int = 0, offload: Offload | None = None, device, dtype):
        """offload: keeps the prefix of the last layers. None: all of it is here."""
        self.config, self.rope = config, rope
        self.group = config.n_head // config.n_kv_head
        self.capacity, self.flush_interval, self.chunk_size = capacity, flush_interval, chunk_size
        self.full = FullView(config, batch, capacity, device, dtype, offload)
        # The tail has room for a block that starts just before a flush, and for a drafting level that runs ahead.
        slots = aligned(flush_interval + 2 * block_size)
        layers = range(config.n_layer)
        # A retrieval view of `budget` tokens lies right before the tail, so that one call attends over both. (In bf16
        # on a CPU, the kernel for unmasked keys is worth more than that.)
        before = aligned(budget) if torch.device(device).type == "cuda" or dtype == torch.float32 else 0
        near = [torch.zeros(2, batch, config.n_kv_head, before + slots, config.head_dim, device=device, dtype=dtype)
                for _ in layers]  # K, then V
        self.near = near if before else None
        self.tail = [kv[:, :, :, before:] for kv in near]
        self.tail_k, self.tail_v = [kv[0] for kv in self.tail], [kv[1] for kv in self.tail]
        # What retrieval scores: the mean key of every chunk, and the queries of the block that was last verified.
        chunks = (batch, config.n_kv_head, capacity // chunk_size if chunk_size else 0, config.head_dim)
        self.chunk_keys = [torch.zeros(chunks, device=device, dtype=dtype) for _ in layers]
        rows = (batch, config.n_head, block_size, config.head_dim)
        self.queries = [torch.zeros(rows, device=device, dtype=dtype) for _ in layers]
        # [B, M], 1 for the rows whose tokens were kept
        self.query_weight = torch.zeros(batch, block_size, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (*self.full.k, *self.full.v, *self.tail, *self.chunk_keys, *self.queries)
        return sum(t.nbytes for t in tensors)

    def whole(self, length: int) -> int:
        """Of so many tokens, those that lie in the prefix: whole flush intervals."""
        return length - length % self.flush_interval

    def prefill_blocks(self, row: int, start: int, stop: int, size: int, *, keep_queries: bool = False, level=eager,
                       on_layer=None) -> list[tuple[int, int, "PrefillBlock"]]:
        """Chunks of at most `size` of the tokens [start, stop) of a row: what `Transformer.prefill` takes.

        Args:
            keep_queries: of the last tokens, for a view to choose by.
            level: compiles chunks, where enough of them are alike.
            on_layer: see `PrefillBlock`.
        """
        edges = [*range(start, stop, size), stop]
        if keep_queries:
            rows = self.query_weight.shape[1]
            kept = min(edges[-1] - edges[-2], rows)
            self.query_weight[row] = torch.arange(rows, device=self.query_weight.device) < kept
        blocks = []
        for a, b in zip(edges, edges[1:], strict=False):
            alike = len(edges) > 5 and a > 0 and b - a == size
            block = PrefillBlock(self, row, a, b, begin=start, end=stop, keep_queries=keep_queries and b == stop,
                                 compiled=level if alike else eager, on_layer=on_layer)
            blocks.append((a - start, b - start, block))
        return blocks

    def seat_tail(self, row: int, length: int) -> None:
        """Starts decoding at `length` tokens, which all lie in the prefix: those past `whole` move to the tail."""
        whole = self.whole(length)
        for i, tail in enumerate(self.tail):
            tail[:, row, :, : length - whole] = self.full.load(i, row, whole, length)
        self.full.set_len(row, whole)

    def seat_layer(self, i: int, row: int, length: int) -> None:
        """The same for one layer that a prefill has just written, while it is hot; scores its chunks."""
        whole = self.whole(length)
        k, v = self.full.hot(i, row)
        self.tail_k[i][row, :, : length - whole] = k[:, whole:length]
        self.tail_v[i][row, :, : length - whole] = v[:, whole:length]
        self._score_keys(i, row, 0, k[:, :whole])

    def spill_tail(self, row: int) -> None:
        """Copies the tail behind the prefix, so that a prefill can go on from there."""
        start = self.full.lens[row]
        tokens = min(self.flush_interval, self.capacity - start)
        for i, tail in enumerate(self.tail):
            self.full.store(i, row, start, tail[:, row, :, :tokens])

    def flush(self, row: int) -> None:
        """Moves a full interval of verified tokens from the tail to the prefix."""
        start = self.full.lens[row]
        self.spill_tail(row)
        self.full.set_len(row, start + self.flush_interval)
        for i, tail_k in enumerate(self.tail_k):
            self._score_keys(i, row, start, tail_k[row, :, : self.flush_interval])

    def _score_keys(self, i: int, row: int, start: int, k: Tensor) -> None:
        """Mean keys of the chunks in k [K, n, D], which begin at `start`; both are multiples of chunk_size."""
        if self.chunk_size and k.shape[1]:
            chunks = k.unflatten(1, (-1, self.chunk_size))  # [K, C, chunk, D]
            first = start // self.chunk_size
            self.chunk_keys[i][row, :, first : first + chunks.shape[1]] = chunks.mean(2)


def _target_geometry(rope: RotaryEmbedding, start: Tensor, prefix_len: Tensor, rows: int, tail_slots: int,
                     config: ModelConfig, view_len: Tensor | None, near: int):
    """What all layers of a block share: cos, sin [B, H + 2K, M, D], slots [B, M], bias [B, 1, G * M, near + T].

    Values have angles, too, of 0: all heads of a token are turned in one go.

    Args:
        view_len, near: of a view that lies before the tail, [B], and its capacity. None, 0: there is none.
    """
    positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
    turned, still = config.n_head + config.n_kv_head, config.n_kv_head
    cos, sin = (torch.cat([table[:, None].expand(-1, turned, -1, -1),
                           torch.full_like(table, value)[:, None].expand(-1, still, -1, -1)], 1)
                for table, value in zip(rope(positions), (1.0, 0.0), strict=True))
    slots, group = positions - prefix_len[:, None], config.n_head // config.n_kv_head
    bias = attention.fold_mask(torch.arange(tail_slots, device=start.device) <= slots[..., None], group)
    if near:
        bias = torch.cat([_view_bias(view_len, 0, near, rows, group), bias], -1)
    return cos, sin, slots + near, bias


def _view_bias(view_len: Tensor, start: int, stop: int, rows: int, group: int) -> Tensor:
    """Hides, of positions [start, stop) of a view, those that a row of the batch does not have."""
    held = torch.arange(start, stop, device=view_len.device) < view_len[:, None]  # [B, stop - start]
    return attention.fold_mask(held[:, None].expand(-1, rows, -1), group)


class TargetBlock:
    """`kv` of a decoding step over one view: M rows a row of the batch, at consecutive positions from `start`."""

    def __init__(self, cache: TargetCache, view: View, start: Tensor, rows: int, extent: tuple, keep_queries: bool,
                 compiled=eager, on_piece=None):
        """start: [B], the position of each row's first token. extent: see `View`.

        on_piece: called with (layer, number, piece) for what `Offload.pieces` streams past, before it is overwritten.
        """
        self.cache, self.view, self.rows = cache, view, rows
        self.dense_len, self.max_len, self.starts = dense_len, max_len, starts = extent
        self.keep_queries, self.compiled, self.on_piece = keep_queries, compiled, on_piece
        tail_slots = cache.tail_k[0].shape[2]
        self.near = cache.near if view.lies_near else None
        self.cos, self.sin, self.slots, self.seen_bias = compiled(_target_geometry)(
            cache.rope, start, cache.full.len, rows, tail_slots, cache.config,
            None if self.near is None else view.len, 0 if self.near is None else view.k[0].shape[2])
        self.ragged_bias = None
        if self.near is None and max_len > dense_len:
            first = 0 if starts else dense_len
            self.ragged_bias = _view_bias(view.len - view.starts if starts else view.len, first,
                                          first + max_len - dense_len, rows, cache.group)

    def layer(self, i: int) -> "TargetLayer":
        return TargetLayer(self, i)


class TargetLayer:
    """One layer of a TargetBlock."""

    def __init__(self, block: TargetBlock, i: int):
        cache, config = block.cache, block.cache.config
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.cos, self.sin, self.slots, self.seen_bias = block.cos, block.sin, block.slots, block.seen_bias
        self.seen = cache.tail[i] if block.near is None else block.near[i]  # where `write` writes, and attends
        self.queries = cache.queries[i] if block.keep_queries else None
        self.one_query = block.view.bounded
        self._block, self._i = block, i

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D], or as `attention.up_to` takes them, and what they
        see in the tail, or, where it lies before that, in view and tail; K and V are written."""
        sizes = [self.n_head, 2 * self.n_kv_head]
        if torch.compiler.is_compiling():  # two kernels; of the shorter form the compiler makes a third, for both
            (q, kv), cos, sin = (x.split(sizes, dim=1) for x in (heads, self.cos, self.sin))
            q, kv = rotate(q, cos[0], sin[0]), rotate(kv, cos[1], sin[1])
        else:
            q, kv = rotate(heads, self.cos, self.sin).split(sizes, dim=1)
        if self.queries is not None:
            self.queries[:, :, : q.shape[2]] = q
        kv = kv.unflatten(1, (2, -1))  # [B, 2, K, M, D]
        put(self.seen, self.slots, kv.permute(0, 3, 1, 2, 4), batch_dim=1, dim=3)
        q = attention.fold(q, self.n_kv_head)
        if self.one_query:
            q = q.contiguous()  # as the view's kernel wants them; on its own that copy would take longer
        states = [attention.masked(q, self.seen[0], self.seen[1], self.seen_bias, no_empty_rows=True)]
        return attention.as_one_query(q) if self.one_query else q, states

    def read(self, q: Tensor) -> list:
        """What the queries see in the view: a state over its dense part, one over its ragged part, where there are."""
        block = self._block
        if block.near is not None:
            return []
        if self._i >= len(block.view.k):
            return self._read_pieces(q)
        k, v, dense = block.view.k[self._i], block.view.v[self._i], block.dense_len
        states = []
        if block.ragged_bias is not None:
            states.append(self._ragged(q, k, v))
        start = 0
        if block.view.packed is not None and q.shape[2] >= MIN_ROWS:
            packed = block.view.packed[self._i]
            states.append(packed.partial(q))
            start = packed.length
        if self.one_query and dense > 0:
            states.append(attention.up_to(q, block.rows * block.cache.group, k, v, block.view.len, dense,
                                          block.view.ends))
        elif dense > start:
            states.append(attention.partial(q, k[:, :, start:dense], v[:, :, start:dense]))
        if block.starts:
            rows = [attention.partial(q[row, None], k[row, None, :, dense:stop], v[row, None, :, dense:stop])
                    for row, stop in enumerate(block.starts)]
            states.append(attention.beside(rows))
        return states

    def _ragged(self, q: Tensor, k: Tensor, v: Tensor) -> attention.State:
        """Over what is masked, GROWTH positions at a time."""
        block, merged = self._block, None
        length = block.max_len - block.dense_len
        for begin in range(0, length, GROWTH):
            end = min(begin + GROWTH, length)
            seen = [torch.stack([x[row, :, start + begin : start + end] for row, start in enumerate(block.starts)])
                    if block.starts else x[:, :, block.dense_len + begin : block.dense_len + end] for x in (k, v)]
            state = attention.masked(q, *seen, block.ragged_bias[..., begin:end])
            merged = state if merged is None else block.compiled(attention.merge)(merged, state)
        return merged

    def _read_pieces(self, q: Tensor) -> list:
        """The same of a layer that streams past: the states of its pieces, merged as they come."""
        block, offload = self._block, self._block.view.offload
        dense, longest, merge = block.dense_len, block.max_len, block.compiled(attention.merge)
        merged = None
        for number, kv in offload.pieces(self._i, longest):
            start = number * offload.piece
            k, v = kv[:, :, : longest - start].transpose(2, 3)  # [B, K, n, D] each
            split = min(max(dense - start, 0), k.shape[2])
            if split > 0:
                state = attention.partial(q, k[:, :, :split], v[:, :, :split])
                merged = merge(merged or attention.empty(q), state)
            if split < k.shape[2]:
                bias = block.ragged_bias[..., start + split - dense : start + k.shape[2] - dense]
                state = attention.masked(q, k[:, :, split:], v[:, :, split:], bias)
                merged = merge(merged or attention.empty(q), state)
            if block.on_piece is not None:
                block.on_piece(self._i, number, kv)
        return [] if merged is None else [merged]


class PrefillBlock:
    """`kv` of a prefill chunk of one row: positions [start, stop), written straight into the prefix.

    Args:
        begin, end: the positions of the whole prefill that this chunk is a part of.
        on_layer: called with each layer's number when the last chunk's keys and values are written.
    """

    def __init__(self, cache: TargetCache, row: int, start: int, stop: int, *, begin: int, end: int,
                 keep_queries: bool = False, compiled=eager, on_layer=None):
        self.cache, self.row, self.start, self.stop, self.begin, self.end = cache, row, start, stop, begin, end
        self.keep_queries, self.compiled, self.on_layer = keep_queries, compiled, on_layer
        self.cos, self.sin = cache.rope(torch.arange(start, stop, device=cache.full.len.device))  # [M, D]

    def layer(self, i: int) -> "PrefillLayer":
        return PrefillLayer(self, i)


class PrefillLayer:
    """One layer of a PrefillBlock."""

    def __init__(self, block: PrefillBlock, i: int):
        cache, config, here = block.cache, block.cache.config, slice(block.start, block.stop)
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head
        self.cos, self.sin = block.cos, block.sin
        self._block, self._i = block, i
        self._offload = cache.full.offload if i >= len(cache.full.k) else None
        if self._offload is not None:
            if block.start == block.begin:
                self._offload.open_work(i, block.row, block.begin, block.end)
            self._offload.await_chunk(block.start)
        self._prefix_k, self._prefix_v = (kv[None] for kv in cache.full.hot(i, block.row))
        self.k, self.v = self._prefix_k[:, :, here], self._prefix_v[:, :, here]  # [1, K, M, D]
        self._queries = cache.queries[i][block.row] if block.keep_queries else None

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [1, H + 2K, M, D] -> queries [1, H, M, D]; K and V are written."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        self.k.copy_(rotate(k, self.cos, self.sin))
        self.v.copy_(v)
        return rotate(q, self.cos, self.sin), []

    def close(self, q: Tensor) -> None:
        """All that a chunk leaves behind is there, once its last queries are kept."""
        block = self._block
        if self._offload is not None:
            self._offload.store_chunk(self._i, block.row, block.start, block.stop)
        if self._queries is not None:
            rows = min(self._queries.shape[1], q.shape[2])
            self._queries[:, :rows] = q[0, :, -rows:]
        if block.on_layer is not None and block.stop == block.end:
            block.on_layer(self._i)

    def read(self, q: Tensor) -> list:
        """The causal square of the chunk, and all that comes before it, unmasked."""
        block = self._block
        self.close(q)
        group = self.n_head // self.n_kv_head
        states = [attention.causal(q, self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1))]
        if block.start > 0:
            before = attention.partial(attention.fold(q, self.n_kv_head), self._prefix_k[:, :, : block.start],
                                       self._prefix_v[:, :, : block.start])
            states.append((attention.unfold(before[0], self.n_head), before[1].reshape(states[0][1].shape)))
        return states


class StreamingCache:
    """Attention sinks and a ring of recent tokens (StreamingLLM, arXiv 2309.17453), for a draft of short context.

    Keys are stored unrotated and rotated by their rank in the cache whenever they are attended to, so that a model
    trained on 2,048 positions never meets position 124,928.

    Args:
        slack: how many tokens at least may be written ahead and then forgotten. The ring holds `window_size + slack`.
    """

    def __init__(self, config: ModelConfig, rope: RotaryEmbedding, *, batch: int, num_sink: int, window_size: int,
                 slack: int, device, dtype):
        self.config = config
        capacity = -(-(num_sink + window_size + slack) // 8) * 8  # a multiple of what tensor cores load at a time
        self.num_sink, self.window_size = num_sink, window_size
        shape = (batch, config.n_kv_head, capacity, config.head_dim)
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
        self.angles = rope(torch.arange(shape[2], device=device))  # cos, sin of every rank, [capacity, D] each

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def row(self, row: int) -> "StreamingCache":
        """The same storage, seen as a batch of one."""
        view = object.__new__(StreamingCache)
        view.__dict__.update(self.__dict__)
        view.k, view.v = [k[row, None] for k in self.k], [v[row, None] for v in self.v]
        return view


def _streaming_geometry(angles: tuple[Tensor, Tensor], start: Tensor, rows: int, num_sink: int, window_size: int,
                        group: int):
    """What all layers share: cos, sin of the keys [B, 1, capacity, D] and of the rows [B, 1, M, D], slots [B, M], bias
    [B, 1, G * M, capacity]. angles: those of every rank, [capacity, D] each."""
    capacity = len(angles[0])
    ring = capacity - num_sink
    positions = start[:, None] + torch.arange(rows, device=start.device)  # [B, M]
    slots = torch.where(positions < num_sink, positions, num_sink + (positions - num_sink) % ring)
    # Which position each slot holds once this block is written: the newest one that maps to it.
    slot = torch.arange(capacity, device=start.device)
    newest = positions[:, -1:]
    held = torch.where(slot < num_sink, slot, newest - (newest - slot) % ring)  # [B, capacity]
    oldest = (start[:, None] - window_size + 1).clamp(min=num_sink)  # [B, 1]
    ranks = [torch.where(p < num_sink, p, num_sink + p - oldest).clamp(min=0) for p in (held, positions)]
    (key_cos, key_sin), (cos, sin) = ([table[rank] for table in angles] for rank in ranks)
    held, positions = held[:, None], positions[..., None]
    recent = (held > positions - window_size) & (held >= num_sink) | (slot < num_sink)
    bias = attention.fold_mask((held <= positions) & recent, group)
    return key_cos[:, None], key_sin[:, None], cos[:, None], sin[:, None], slots, bias


class StreamingBlock:
    """`kv` of a draft's step: `rows` tokens a row of the batch, at consecutive positions from `start` [B]."""

    def __init__(self, cache: StreamingCache, start: Tensor, rows: int, compiled=eager):
        self.cache, self.compiled = cache, compiled
        config = cache.config
        self.key_cos, self.key_sin, self.cos, self.sin, self.slots, self.bias = compiled(_streaming_geometry)(
            cache.angles, start, rows, cache.num_sink, cache.window_size, config.n_head // config.n_kv_head)

    def layer(self, i: int) -> "StreamingLayer":
        return StreamingLayer(self, i)


class StreamingLayer:
    """One layer of a StreamingBlock."""

    def __init__(self, block: StreamingBlock, i: int):
        self.n_head, self.n_kv_head = block.cache.config.n_head, block.cache.config.n_kv_head
        self.key_cos, self.key_sin, self.cos, self.sin = block.key_cos, block.key_sin, block.cos, block.sin
        self.slots, self.bias, self.k, self.v = block.slots, block.bias, block.cache.k[i], block.cache.v[i]

    def write(self, heads: Tensor) -> tuple[Tensor, list]:
        """Unrotated [B, H + 2K, M, D] -> queries [B, K, G * M, D] and what they see in the whole cache."""
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        put(self.k, self.slots, k.transpose(1, 2), dim=2)
        put(self.v, self.slots, v.transpose(1, 2), dim=2)
        keys = rotate(self.k, self.key_cos, self.key_sin)
        q = attention.fold(rotate(q, self.cos, self.sin), self.n_kv_head)
        return q, [attention.masked(q, keys, self.v, self.bias, no_empty_rows=True)]

    def read(self, q: Tensor) -> list:
        return []
