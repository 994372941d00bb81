"""The view that drafts: a few thousand tokens of the prefix. Exactness never depends on which ones, only speed does.

Knows nothing of drafting or acceptance: it is told when to rebuild. There are four ways to choose (`config.VIEWS`):

- "retrieval": the chunks that the last verified queries attend to most, by the mean key of each, per KV head, chosen
  anew again and again (TriForce, arXiv 2404.11912, section 4.1);
- "query": the same, and in each step and layer again, by the pending token's query, which is about to read it: what the
  next token needs is often not what the last ones needed. An offloaded layer keeps what was chosen last;
- "snapkv": single tokens, chosen once, by the attention that the prompt's last tokens pay to each and to its neighbours
  (SnapKV, arXiv 2404.14469);
- "streaming": none, only the sink and a window as wide as the budget allows (StreamingLLM, arXiv 2309.17453).

Chosen chunks of layers on the device are copied at once. Those of an offloaded layer are **gathered**: picked out of
the pieces that the next verify streams past anyway. Until then the layer keeps its earlier selection, and the view is
**due**. Where nothing streams past, a view is chosen when a round first reads it.

Rows that share a prefix read it through one view, a `CommonView`, chosen by the queries of all of them. Each has a view
of its own for what comes after.

Layout of a row's view, `budget` tokens: [sink | recent window, a ring | selected chunks]. A prefix that fits the budget
is viewed whole, in order.

Shapes: B batch, L layers, K KV heads, G query heads per KV head, M rows of queries, C chunks, D head_dim.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import attention
from ..config import VIEWS, split_view
from ..runtime.graphs import Compiler
from .kv_cache import KVCache, aligned
from .store import Extent, View

SMOOTHED = 7  # tokens over which "snapkv" averages attention
COMMON = -1  # stands for the view that all rows share, among numbers of rows
QUERIES_OF_A_ROW = 8  # the fewest of a row that choose where rows choose together, unless a block has fewer


def common_queries(newest: int, rows: int) -> int:
    """How many queries of each row choose together. All rows bring hardly more queries than one row alone."""
    return min(max(newest // rows, QUERIES_OF_A_ROW), newest)


class RetrievalView(View):
    """A view of each row's own part of the prefix: all of it, or what comes after the part that all rows share.

    Args:
        budget: tokens. recent: the share of the newest tokens.
        shared: the view of the prefix that the rows share; None: they share none.
    """

    of_shared = False

    def __init__(self, cache: KVCache, *, budget: int, chunk_size: int, recent: float = 0.25,
                 kind: str = "retrieval", batch: int, device, dtype, compiler: Compiler,
                 shared: "CommonView | None" = None):
        self.joined = cache.joins_view and not self.of_shared
        self.layers = cache.config.full_layers  # others read their newest keys, on each level
        super().__init__(cache.config, batch, aligned(budget), device, dtype,
                         slots=[aligned(budget) * (i in self.layers) for i in range(cache.config.n_layer)],
                         storage=cache.tail.storage if self.joined else None)
        self.length_on_device = not (self.joined or self.of_shared) and attention.spans(
            self.len.device, dtype, cache.config.head_dim)
        self.places = attention.places(self.k[self.layers[0] if self.layers else 0])
        self.cache, self.budget, self.chunk_size, self.kind = cache, budget, chunk_size, VIEWS[kind]
        self.source = cache.prefix.shared if self.of_shared else cache.prefix  # what it is chosen from
        self.shared, self.base = shared, 0 if shared is None else shared.lens[0]
        self.room = self.source.lens[0] if self.of_shared else self.source.capacity - self.source.base
        self.window_size, chunks = self._split(recent)
        self.select_size = 1 if self.kind.unit == "token" else chunk_size  # tokens that are selected together
        self.num_selected = chunks * chunk_size // self.select_size
        self.held = chunk_size + self.window_size + chunks * chunk_size  # tokens of a selection, at most the budget
        self.follows = self.kind.follows and self.num_selected > 0
        self.selected = [False] * batch  # per row: a selection, or still the whole prefix
        self.num_rebuilds = 0
        # Per row: what was selected last, and the length of its own part of the prefix then.
        self._chunks = torch.zeros(batch, len(self.layers), cache.config.n_kv_head, self.num_selected,
                                   dtype=torch.int64, device=device)
        self._prefix_len = torch.zeros(batch, dtype=torch.int64, device=device)
        self._offload, self._due = self.source.offload, [False] * batch
        self.is_stale = False  # its offloaded layers hold what an earlier call selected, or nothing
        self._at = torch.empty(0)  # positions of the layer that streams past: see `gather`
        self._row = torch.zeros(1, dtype=torch.int64, device=device)  # the row that is chosen for: one graph serves all
        self._select = compiler.step(self._select_and_copy)

    def _split(self, recent: float) -> tuple[int, int]:
        """Tokens of the window, and the number of selected chunks. A common view's window does not move, and is half as
        large."""
        rest, chunk, interval = self.budget - self.chunk_size, self.chunk_size, self.cache.flush_interval
        if self.kind.unit is None:
            return rest if self.of_shared else rest // interval * interval, 0
        if not self.of_shared:
            return split_view(self.budget, chunk, interval, recent)
        window = min(int(rest * recent / 2), rest - chunk) // chunk * chunk
        return window, (rest - window) // chunk

    @property
    def extent(self) -> Extent:
        return Extent(self.budget, self.budget) if self.length_on_device else super().extent

    def tensors(self) -> list[Tensor]:
        common = [] if self.shared is None else self.shared.tensors()
        return [*super().tensors(), self._chunks, self._prefix_len, *common]

    def open(self, row: int) -> None:
        """A row has been prefilled, or is back at an earlier length. Chooses its view here, or later by `catch_up`."""
        if self._offload is None and (self.kind.renews or self.kind.unit is None):  # else by the prompt's queries
            self.fit(row)
            self._due[row] = True
        else:
            self.choose(row)
            self.is_stale = self.is_stale or self._due[row]

    def catch_up(self, rows: Iterable[int]) -> list[int]:
        """Chooses what is due of these rows' views, which a round is about to read. Returns the rows that it chose for,
        perhaps COMMON too."""
        late = [row for row in rows if self._due[row] and self._offload is None]
        for row in late:
            self.choose(row)
        return late + [COMMON] if self.shared is not None and self.shared.catch_up([0]) else late

    def renew(self, rows: Iterable[int]) -> list[int]:
        """Chooses anew for these rows, COMMON perhaps among them, where there is something to choose: returns those."""
        renewed = []
        for row in rows if self.kind.renews else ():
            view, place = (self.shared, 0) if row == COMMON else (self, row)
            if view.selected[place]:
                view.choose(place)
                renewed.append(row)
        self.num_rebuilds += len(renewed)
        return renewed

    def choose(self, row: int) -> None:
        """Selects for one row, from the queries that the cache kept. No host sync."""
        self.fit(row)
        length = self.lens[row]
        for i in () if self.selected[row] else self.layers:
            for view, tokens in zip((self.k[i], self.v[i]), self.source.layer(i, row), strict=True):
                view[row, :, :length] = tokens[:, :length]
        if self.selected[row]:
            self._row.fill_(row)
            self._select()
        self._due[row] = self.selected[row] and self._offload is not None

    def fit(self, row: int) -> None:
        """Sets the length of a row's view by the length of its prefix."""
        prefix_len = self.source.own_lens[row]
        self.selected[row] = prefix_len > self.budget
        self.truncate(row, self.held if self.selected[row] else prefix_len)

    def flush(self, row: int) -> None:
        """Takes in the interval that was just flushed, so that drafting never loses the newest tokens."""
        if self._due[row] and self._offload is None:
            self.fit(row)
            return
        interval = self.cache.flush_interval
        start = self.source.own_lens[row] - interval
        if not self.selected[row]:
            if start + interval > self.budget:
                self.choose(row)
                self.num_rebuilds += 1
                return
            at = start
            self.truncate(row, start + interval)
        else:
            at = self.chunk_size + start % self.window_size
        stop = self.source.lens[row]
        for i in self.layers:
            self.store(i, row, at, self.source.load(i, row, stop - interval, stop))

    def _positions(self, chunks: Tensor, prefix_len: Tensor) -> Tensor:
        """Sink, recent window and chunks [N, K, num_selected]: [N, K, held]. prefix_len: one for all, or [N]."""
        window, device = self.window_size, chunks.device
        recent_start = (prefix_len - window).reshape(-1, 1, 1)
        # Ring slot j holds the position of the window that is congruent to j, so that a flush overwrites the oldest.
        recent = recent_start + (torch.arange(window, device=device) - recent_start) % window
        sink = torch.arange(self.chunk_size, device=device)
        tokens = self._tokens(chunks)
        return torch.cat([part.expand(*tokens.shape[:2], -1) for part in (sink, recent, tokens)], 2)

    def _tokens(self, chunks: Tensor) -> Tensor:
        """Where the tokens of chunks [N, K, n] stand: [N, K, tokens]."""
        size = self.select_size
        return (chunks[..., None] * size + torch.arange(size, device=chunks.device)).flatten(2)

    def _newest(self) -> tuple[Tensor, Tensor]:
        """Which queries of each row choose a view [B, m], and their weights [B * m]: the latest whose tokens were kept,
        filled up by others of weight 0. Each row weighs 1 in all, or 0 if it brought no tokens."""
        weight = self.cache.query_weight if self.of_shared else self._of_row(self.cache.query_weight)[None]  # [B, M]
        latest = torch.arange(1, weight.shape[1] + 1, device=weight.device) * weight
        kept = latest.topk(common_queries(self.cache.newest, len(weight))).indices
        weight = weight.gather(1, kept)
        return kept, (weight / weight.sum(1, keepdim=True).clamp(min=1)).flatten()

    def _scores(self) -> list[Tensor]:
        """Of each layer [K, chunks or tokens], -inf for those that cannot be chosen."""
        is_chunk, (kept, weight) = self.kind.unit == "chunk", self._newest()
        mask = self._mask(self.room // self.select_size, self._of_row(self.source.own_len))

        def of(i: int) -> Tensor:  # of several rows, the keys are a copy, which does not outlive this
            keys = self._of_row((self.source.chunk_keys if is_chunk else self.source.k)[i])[:, : len(mask)]
            queries = self.cache.queries[i] if self.of_shared else self._of_row(self.cache.queries[i])[None]
            queries = queries.take_along_dim(kept[:, None, :, None], 2)  # [B, H, m, D]
            return chunk_scores(queries.transpose(0, 1).flatten(1, 2), keys, weight, mask, 0 if is_chunk else SMOOTHED)

        return [of(i) for i in self.layers]

    def _mask(self, count: int, length: Tensor) -> Tensor:
        """Additive, over chunks or tokens [count]: 0 for those between sink and window, which may be chosen. length: of
        the prefix."""
        place = torch.arange(count, device=length.device)
        begin = self.chunk_size // self.select_size  # after the sink
        end = (length - self.window_size) // self.select_size  # from here on: the window
        return torch.where((place >= begin) & (place < end), 0.0, float("-inf"))

    def _select_and_copy(self) -> None:
        """The selection of a row, in static shapes: what lies beyond its prefix is masked, so a graph can replay it."""
        source, row, chunks = self.source, self._row, self._of_row(self._chunks)
        prefix_len = self._of_row(source.own_len).long()
        if self.num_selected and self.layers:
            scores = torch.stack(self._scores())
            # One call for all layers: ten times faster on a GPU than one a layer.
            chunks = scores.topk(self.num_selected, -1, sorted=False).indices
            self._chunks[row] = chunks[None]  # [L, K, num_selected]
        self._prefix_len[row] = prefix_len[None]
        resident = [i for i in self.layers if i not in source.streamed]
        if not resident:
            return
        at = self._positions(chunks[: len(resident)], prefix_len)  # [L, K, held]
        heads = torch.arange(at.shape[1], device=at.device)[:, None]
        for i, here in zip(resident, at, strict=True):
            for tokens, view in ((source.k[i], self.k[i]), (source.v[i], self.v[i])):
                # Whole tokens, five times faster on a GPU than by `gather`.
                _in_words(view[:, :, : at.shape[2]])[row] = _in_words(tokens)[row[:, None], heads, here][None]

    def follow(self, i: int, q: Tensor) -> None:
        """Chooses the chunks of layer i by the pending tokens' queries, which are about to read it, and copies them.
        Sink and window stay, and a row whose prefix fits the budget keeps it. In static shapes, without a host sync.

        The queries of drafted tokens have no say: a level's distribution after a token must not depend on the tokens
        that are checked against it, or rejection sampling would be biased.

        Args:
            q: [B, K, G * M, D], the pending token's first of M. One row's view may be read by several rows.
        """
        source, first = self.source, self.chunk_size + self.window_size  # after sink and window
        if i in source.streamed:
            return
        q = q.unflatten(2, (self.cache.group, -1))[:, :, :, 0]  # [B, K, G, D]
        if self.of_shared:
            q = q.transpose(0, 1).flatten(1, 2)[None]
        keys = source.chunk_keys[i][:, :, : self.room // self.chunk_size]
        length = source.own_len[:, None, None]  # [B, 1, 1]
        mask = self._mask(keys.shape[2], length)  # [B, 1, C]
        paid = shares(q, keys, mask[:, :, None]).sum(2) + mask  # [B, K, C]
        # The best chunk of each residue class, of which every one has a candidate: half as long on a GPU as the best of
        # all, and worth as much within 0.015 a token.
        classes = self.num_selected
        table = torch.nn.functional.pad(paid, (0, -paid.shape[2] % classes), value=float("-inf"))
        best = table.unflatten(2, (-1, classes)).argmax(2)
        at = self._tokens(best * classes + torch.arange(classes, device=keys.device))
        here = torch.arange(first, self.held, device=keys.device)
        at = torch.where(length > self.budget, at, here.clamp(max=source.k[i].shape[2] - 1))
        rows, heads = (torch.arange(count, device=keys.device) for count in at.shape[:2])
        where = rows[:, None, None], heads[:, None], at
        for tokens, view in ((source.k[i], self.k[i]), (source.v[i], self.v[i])):
            _in_words(view)[:, :, first : self.held] = _in_words(tokens)[where]

    def _of_row(self, x: Tensor) -> Tensor:
        """The entry of [B, ...] for the row that is chosen for. It is a copy if there are several rows."""
        return x[0] if len(x) == 1 else x.index_select(0, self._row)[0]

    @property
    def awaiting(self) -> list[int]:
        """Rows that the next verify gathers tokens for."""
        return [] if self._offload is None else [row for row, due in enumerate(self._due) if due]

    def gathered(self) -> None:
        """All pieces of all offloaded layers have been given to `gather`."""
        self._due, self.is_stale = [False] * len(self._due), False

    def gather(self, i: int, start: int, piece: Tensor) -> None:
        """Picks the selected tokens of layer i out of a piece [2, B, P, K, D] from `start` on, for the rows that await
        it. The pieces of a layer come in order."""
        if start == 0:
            self._at = self._positions(self._chunks[:, self.layers.index(i)], self._prefix_len)  # [B, K, held]
        at = (self._at - start).clamp(0, piece.shape[2] - 1)
        here = (at == self._at - start)[..., None]
        heads = torch.arange(at.shape[1], device=at.device)[:, None]
        for row in self.awaiting:
            for tokens, view in zip(piece, (self.k[i], self.v[i]), strict=True):
                tokens, view = _in_words(tokens[row]), _in_words(view[row, :, : at.shape[2]])  # [P, K, D], [K, held, D]
                torch.where(here[row], tokens[at[row], heads], view, out=view)


class CommonView(RetrievalView):
    """The view of the prefix that all rows share: one row, chosen by the queries of all."""

    of_shared = True

    def __init__(self, cache: KVCache, **options):
        super().__init__(cache, batch=1, **options)
        self.fit(0)


def chunk_scores(queries: Tensor, chunk_keys: Tensor, weight: Tensor, mask: Tensor, smoothed: int = 0) -> Tensor:
    """How much queries [H, M, D] of weights [M] attend to each of chunk_keys [K, C, D], pooled over the GQA group:
    [K, C] float32. mask: [C], additive. smoothed: an odd number of neighbours to average over; 0: none."""
    q = queries.reshape(len(chunk_keys), -1, queries.shape[-1])  # [K, G * M, D]
    weights = weight.repeat(q.shape[1] // len(weight))
    attended = weights @ shares(q, chunk_keys, mask)
    if smoothed:
        attended = torch.nn.functional.avg_pool1d(attended, smoothed, 1, smoothed // 2)
    return attended + mask  # once more: a far chunk's share may round to the same 0


def shares(q: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """What each of queries [..., R, D] pays to each of keys [..., C, D], in all 1: [..., R, C] float32."""
    # Scaled first: the products of a Qwen2.5 overflow in float16.
    return (q * q.shape[-1] ** -0.5 @ keys.transpose(-1, -2) + mask.to(q.dtype)).softmax(-1, dtype=torch.float32)


def _in_words(x: Tensor) -> Tensor:
    """The same memory [..., D] in elements of 16 bytes, if D fills them: a GPU picks 16 bytes as fast as 2."""
    return x.view(torch.complex128) if x.shape[-1] * x.itemsize % 16 == 0 else x
