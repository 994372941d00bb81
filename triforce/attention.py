"""Attention as a merge of partial states. Knows nothing of caches, positions or models: tensors in, tensors out.

A partial state is `(out, lse)`: attention over some of the keys, normalised over those alone, and the log of the sum
of their exponentials. Two states over disjoint keys merge exactly (FlashAttention, arXiv 2205.14135). So a long prefix
goes to the fastest fused kernel of the device, and the few newest keys, which need a mask, to another one.

Which kernel (`dense`, `causal`, `masked`, `shared` and `up_to` choose by this table; measured on an H200):

    keys      device  dtype    rows, and what else        kernel
    unmasked  GPU     half     512 or more, whole tiles   cuDNN: 1.7 times faster on 8,192 rows
    causal                     others                     flash: reads at full bandwidth for 16 rows
              GPU     float32                             memory-efficient
              CPU     float32                             flash
              CPU     half     64 or more                 flash: in bf16, plain products are faster on few rows
              others                                      products and a softmax
    masked    GPU     half     up to 1,024 keys, or `long`  memory-efficient
              CPU     float32  each sees a key            flash
              others                                      products and a softmax
    shared    GPU     half     many, or many KV heads     cuDNN, over parts of the keys
              others                                      as unmasked, rows of all sequences together
    up to a   GPU     half     D is 64, 96, 128 or 256    flash for sequences of any lengths
    length

Shapes: B batch, K KV heads, G query heads per KV head, M rows of a block, R = G * M folded rows, S keys, D head_dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

LONG = 2048  # keys from which on it pays to have a kernel split them
TILE = 128  # rows that cuDNN's kernel takes at a time
HALF = TILE // 2  # of which it computes less: of many KV heads that counts
MANY = 512  # rows, in whole tiles: cuDNN takes most of a second to plan for a number that fills no tiles
FEW = 16, 64  # KV heads, and rows of each, up to which the flash kernel reads long keys as fast as cuDNN's does
RING = 128  # keys of a part of a ring, that a GPU's processor takes at a time
AT_ONCE = 1024  # masked keys up to which one kernel is faster than products and a softmax, one after the other
SPLIT = 4  # parts of a product over long keys on a GPU; 2 to 7 take the same time (measured on an H200)
VECTOR = 32  # float32 numbers that a CPU's loop takes at once, at most (two registers of AVX-512)
HIDDEN = -65504.0  # beside a masked key in half precision: the least of float16
EMPTY = -1e30  # the lse of a part without keys. The flash kernel says inf
# Rows of a KV head that the flash kernel takes as one; of few, keys in parts; of whole units: see `Parts`.
BLOCK, FEW_BLOCKS, PARTS, UNIT = 64, 4, 16, 512
FEWEST = 12  # keys: over fewer, a CPU's products (MKL's, where there is AVX-512) round some rows in another way
# out [B, K, R, D], lse [B, K, R] float32 (float64 for float64 inputs). Several, over parts of some keys, have one more
# dimension, in front. One that nothing is joined with may have None as its lse, see `masked`.
State = tuple[Tensor, Tensor]


def fold(q: Tensor, n_kv_head: int) -> Tensor:
    """[B, H, M, D] -> [B, K, G * M, D]: the queries that share a KV head become rows, so that KV is read once."""
    return q.reshape(q.shape[0], n_kv_head, -1, q.shape[-1])


def fold_mask(visible: Tensor, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Boolean [B, M, S] -> additive [B, 1, G * M, S] of a dtype: 0 where visible, elsewhere -inf, or HIDDEN in half
    precision: of a row with -inf alone, a GPU's kernel says that it sees a key. Both weigh exactly nothing."""
    bias = torch.where(visible, 0.0, HIDDEN if _is_half(dtype) else float("-inf")).to(dtype)
    return (bias if group == 1 else bias.repeat(1, group, 1))[:, None]


def dense(q: Tensor, k: Tensor, v: Tensor) -> State:
    """Attention of every row over every key.

    Args:
        q: [B, K, R, D]. k, v: [B, K, S, D], or [1, K, S, D] that all sequences share, which are read once for all; any
            strides as long as D is contiguous. S may be 0.
    """
    if len(k) < len(q):
        return of_batch(lambda q: dense(q, k, v), q)
    if k.shape[2] == 0:  # the fused kernels answer +inf, or end the process, on no keys
        return torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=_wide(q.dtype), device=q.device)
    if q.device.type == "cpu" and k.shape[2] < FEWEST:
        return masked(q, k, v, torch.zeros(1, 1, q.shape[2], k.shape[2]), no_empty_rows=True)
    return _kernel(q)(q, k, v, False)


def causal(q: Tensor, k: Tensor, v: Tensor) -> State:
    """Causal attention of a chunk on itself: q, k, v [B, H, M, D], row i sees keys 0 to i."""
    return _kernel(q)(q, k, v, True)


def windowed(q: Tensor, k: Tensor, v: Tensor, window: int) -> State:
    """Causal attention of the newest rows within a window: q [B, H, M, D], k, v [B, K, S, D]. Row i is that of key
    S - M + i, and sees the newest `window` keys up to it."""
    count, ahead, parts = q.shape[2], k.shape[2] - q.shape[2], []
    for start in range(0, count, MANY):
        first, stop = ahead + start - window + 1, ahead + min(start + MANY, count)
        rows = torch.arange(ahead + start, stop, device=q.device)[:, None]
        near = slice(max(first - (first - stop) % 8, 0), stop)  # a number of keys that the fastest kernel takes
        key = torch.arange(near.start, near.stop, device=q.device)
        bias = fold_mask(((key <= rows) & (key > rows - window))[None], q.shape[1] // k.shape[1], q.dtype)
        here = q[:, :, start : start + MANY]
        out, lse = masked(fold(here, k.shape[1]), k[:, :, near], v[:, :, near], bias, no_empty_rows=True, long=True)
        parts.append((out.reshape(here.shape), lse.reshape(here.shape[:3])))
    return tuple(torch.cat(part, 2) for part in zip(*parts, strict=True))


def by_powers(q: Tensor, k: Tensor, v: Tensor) -> list[State]:
    """`dense` of many rows over many keys, as states over parts of the keys: in powers of two, for cuDNN's kernel is
    planned anew for each number of them, which takes 75 ms (on an H200)."""
    if _kernel(q) is not _cudnn:
        return [dense(q, k, v)]
    states, start, length = [], 0, k.shape[2]
    while length - start >= LONG:
        stop = start + (1 << (length - start).bit_length() - 1)
        states.append(_cudnn(q, k[:, :, start:stop], v[:, :, start:stop], False))
        start = stop
    if start < length:
        states.append(_flash_cuda(q, k[:, :, start:], v[:, :, start:], False))
    return states


def shared(q: Tensor, k: Tensor, v: Tensor) -> State:
    """`dense` of all sequences [B, K, R, D] over keys that they share [1, K, S, D]: a state, or one of parts.

    cuDNN's kernel does not split long keys. It is given them in parts, as many as a GPU's processors can work on side
    by side: 122,880 keys of 8 KV heads take 0.34 ms for 256 rows, where the flash kernel takes 0.51. But each number
    of rows is planned for, 40 to 80 ms (on an H200): a prefill, which meets it once, takes `dense`.
    """
    rows, (heads, length) = len(q) * q.shape[2], k.shape[1:3]
    few = heads <= FEW[0] and rows <= FEW[1]
    if length < LONG or few or not _has_cudnn(q):
        return dense(q, k, v)
    count = parts_of_keys(heads, rows, length)

    def over_parts(q: Tensor) -> State:
        parts = [x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in (k, v)]  # [P, K, S / P, D]
        out, lse = _cudnn(q.expand(count, -1, -1, -1), *parts, False)
        return out[:, :, :rows], lse[:, :, :rows]

    # One plan serves all numbers of rows that are filled up to the same one.
    return of_batch(over_parts, q, HALF if rows <= HALF else -(-rows // TILE) * TILE)


def parts_of_keys(n_kv_head: int, rows: int, length: int, processors: int = 128) -> int:
    """The number of equal parts of the keys, a power of 2: each of a GPU's processors gets a KV head and 128 rows."""
    count = 1
    while count * n_kv_head * -(-rows // TILE) < processors and length % (2 * count) == 0:
        count *= 2
    return count


def of_batch(attend: Callable[[Tensor], State], q: Tensor, room: int = 0) -> State:
    """The state of q [B, K, R, D] by a function of one sequence, [1, K, B * R or `room`, D], over keys that all rows
    share; or, if it gives several, a state of parts of the keys. Rows beyond B * R are 0, and get no result."""
    rows, number = q.transpose(0, 1), len(q) * q.shape[2]
    if number < room:
        filled = q.new_zeros(q.shape[1], room, q.shape[3])
        filled[:, :number].unflatten(1, (len(q), -1)).copy_(rows)
    else:
        filled = rows.flatten(1, 2)
    out, lse = (x.unflatten(2, (len(q), -1)).transpose(1, 2) for x in attend(filled[None]))
    return (out, lse) if len(out) > 1 else (out[0], lse[0])


def merge_parts(out: Tensor, lse: Tensor) -> State:
    """The state over all of some keys, of one of parts, [P, B, K, R, D] and [P, B, K, R]. Another stays as it is."""
    if out.ndim == 4:
        return out, lse
    lse = lse.nan_to_num(posinf=EMPTY)
    if len(out) == 1:
        return out[0], lse[0]
    top = lse.amax(0)
    weights = (lse - top).exp()
    total = weights.sum(0)
    return ((weights / total)[..., None] * out).sum(0), top + total.log()


def spans(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `up_to` has a kernel there that is tested."""
    return device.type == "cuda" and _is_half(dtype) and head_dim in (64, 96, 128, 256)


class Parts(NamedTuple):
    """The first keys of each sequence as `up_to` takes them: P parts, each part of a KV head as a sequence of its own.

    Of few KV heads the flash kernel splits the keys a hundredfold, and joins that by a few processors: of 122,880 keys
    of two heads in 25 us, where reading takes 39 (on an H200). Of PARTS parts it splits each a few times: 6 us. But of
    32 blocks of 128 keys and one more it splits off each block: so they have whole UNITs of keys.
    """

    queries: Tensor  # [P * B * K + 1], int32, where each begins, in tokens
    keys: Tensor  # the same for keys, from the first one of all on, or more of them
    lengths: Tensor  # [P, B, K], int32
    bound: int  # no part is longer


def places(k: Tensor) -> Tensor:
    """Where each KV head of each sequence of keys [B, K, S, D] begins: [B, K], int32, in tokens."""
    batch, heads = ([i * (x // k.stride(2)) for i in range(n)] for n, x in zip(k.shape[:2], k.stride(), strict=False))
    return torch.tensor([[b + h for h in heads] for b in batch], dtype=torch.int32, device=k.device)


def parts_up_to(lengths: Tensor, bound: int, places: Tensor, rows: int, fused: bool) -> Parts:
    """Parts for so many rows of each KV head, of sequences that lie at `places` and have lengths [B], at most `bound`
    of them. fused: compiled code merges the parts. Otherwise that takes as long as one part takes more."""
    count, unit = (PARTS, UNIT) if fused and places.numel() * -(-rows // BLOCK) <= FEW_BLOCKS else (1, 1)
    size, make = -(-bound // (count * unit)) * unit, {"dtype": torch.int32, "device": places.device}
    first = torch.arange(0, (count + 1) * size, size, **make).clamp(max=bound)[:, None, None]
    here = lengths[:, None].expand(places.shape) - first[:count]
    return Parts(torch.arange(here.numel() + 1, **make), (first + places).flatten(), here.clamp(0, size), size)


def up_to(q: Tensor, k: Tensor, v: Tensor, parts: Parts) -> State:
    """`dense` over the first keys of each sequence, as a state of parts. The device alone knows how many they are: a
    graph of it stays valid as lengths change. The bits of a sequence depend on no other's length, and keys behind a
    length are not read.

    Args:
        q: [P, B, K, R, D], contiguous, the same for each part. k, v: [B, K, S, D], of equal strides; D is contiguous.
    """
    count, batch, n_kv_head, rows, dim = q.shape
    # The kernel splits keys over a GPU only where each sequence has one query, of more heads than the keys have: so the
    # rows are given as those heads, at least 2, of sequences that have one KV head.
    q = (q.expand(-1, -1, -1, 2, -1) if rows == 1 else q).flatten(0, 2)  # [N, R, D]
    tokens = sum((n - 1) * (x // k.stride(2)) for n, x in zip(k.shape[:3], k.stride(), strict=False)) + 1
    k, v = (x.as_strided((tokens, 1, dim), (x.stride(2), dim, 1)) for x in (k, v))
    # It does so for fewer than 1.6 blocks for each processor. Unsplit keys are read at 2.5 instead of 3.7 to 4.0 TB/s:
    # many sequences are given to it some at a time.
    blocks, processors = -(-rows // BLOCK), torch.cuda.get_device_properties(q.device).multi_processor_count
    at_once, outs, lses = parts.bound < LONG or len(q) * blocks < 1.6 * processors, [], []
    step = len(q) if at_once else max(processors // blocks, 1)
    for a, some in zip(range(0, len(q), step), q.split(step), strict=True):
        begins = parts.queries[: len(some) + 1], parts.keys[a : a + len(some) + 1]
        out, lse = torch.ops.aten._flash_attention_forward(some, k, v, *begins, 1, parts.bound, 0.0, False, False,
                                                           seqused_k=parts.lengths.flatten()[a : a + step])[:2]
        outs.append(out)
        lses.append(lse.reshape(-1, len(out)))
    # As it lies in memory, in one call or in several: compiled code, which reads them, knows their strides.
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses, 1))
    return tuple(x.unflatten(0, (count, batch, n_kv_head))[:, :, :, :rows] for x in (out, lse.t()))


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, no_empty_rows: bool = False, alone: bool = False,
           long: bool = False) -> State:
    """Attention with an additive mask. A masked key contributes exactly nothing to a row that sees one.

    Args:
        q: [B, K, R, D]. k, v: [B, K, S, D]. bias: [B, 1, R, S], see `fold_mask`. A row that sees no key has an lse of
            -inf, or of about HIDDEN, and an output that means nothing.
        no_empty_rows: each row sees a key. For one that sees none, the CPU's kernel answers lse 0.
        alone: and that no other state is joined with this one, whose lse may then be None.
        long: one kernel is to take them even if they are many.
    """
    half = _is_half(q.dtype)
    fits = q.is_cuda and half and q.shape[3] % 8 == 0 and k.shape[2] % 8 == 0
    if fits and (long or k.shape[2] <= AT_ONCE) and not is_compiling():
        if bias.dtype != q.dtype:
            bias = bias.clamp(min=HIDDEN).to(q.dtype)
        return _efficient_cuda(q, k, v, False, bias.expand(-1, q.shape[1], -1, -1))
    missing = FEWEST - k.shape[2] if q.device.type == "cpu" else 0
    if missing > 0:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (k, v))
        bias = torch.nn.functional.pad(bias, (0, missing), value=float("-inf"))
    if no_empty_rows and q.device.type == "cpu" and q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:2]
    if alone and no_empty_rows and q.is_cuda and half:
        return _plain_output(q, k, v, bias), None
    return _plain(q, k, v, False, bias)


def ring(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> State:
    """`masked` over a ring of keys, a multiple of RING. Of one sequence on a GPU, a state of parts: its few KV heads
    alone would occupy few processors (29 layers of Gemma 3 4B: 1.8 ms as one part, on an H200)."""
    if len(q) > 1 or not (q.is_cuda and _is_half(q.dtype)):
        return masked(q, *(x.expand(len(q), -1, -1, -1) for x in (k, v)), bias, long=True)
    k, v = (x[0].unflatten(1, (-1, RING)).transpose(0, 1) for x in (k, v))  # [P, K, RING, D]
    bias = bias[0].unflatten(2, (-1, RING)).permute(2, 0, 1, 3)  # [P, 1, R, RING]
    out, lse = masked(q.expand(len(k), -1, -1, -1), k, v, bias)
    return out[:, None], lse[:, None]


def apart(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> State:
    """Attention of each row over keys of its own, in their order: so the bits follow from these keys alone.

    Args:
        q: [B, K, G * M, D]. k, v: [B, K, M, P, D]. bias: [B, 1, 1, M, P] of 0 and -inf; each row sees a key.
    """
    wide, rows = _wide(q.dtype), q.unflatten(2, (-1, k.shape[2]))  # [B, K, G, M, D]
    k, v = k.to(wide)[:, :, None], v.to(wide)[:, :, None]  # [B, K, 1, M, P, D]
    scores = (rows.to(wide)[..., None, :] * k).sum(-1) * q.shape[-1] ** -0.5  # [B, K, G, M, P]
    if k.shape[4] == 1:
        return v.squeeze(4).expand(rows.shape).flatten(2, 3), scores.flatten(2)
    scores = scores if bias is None else scores + bias
    top = scores.amax(-1, keepdim=True)
    weights = _evenly(torch.exp, scores - top)
    total = weights.sum(-1, keepdim=True)
    out = (weights[..., None] * v).sum(-2) / total
    return out.flatten(2, 3), (top + _evenly(torch.log, total)).squeeze(-1).flatten(2)


def merge(a: State, b: State) -> State:
    """Attention over the union of two disjoint sets of keys. Two empty states merge to an empty one."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    weight = _evenly(torch.sigmoid, (lse_b - lse_a).nan_to_num(nan=0.0))  # nan: -inf minus -inf, both outs are 0
    out = torch.lerp(out_a.to(weight.dtype), out_b.to(weight.dtype), weight.unsqueeze(-1))
    return out, _evenly(torch.logaddexp, lse_a, lse_b)


def join(states: list[State], sinks: Tensor | None = None) -> Tensor:
    """The output of attention over the union of disjoint sets of keys, of which every row sees a key in the first. Some
    may be of parts. sinks [H]: logits of heads that one more state has, whose output is 0."""
    state, *others = [merge_parts(*state) for state in states]
    for other in others:
        state = merge(state, other)
    out, lse = state
    if sinks is None:
        return out
    sinks = sinks.view(out.shape[1], -1, 1)  # [K, G, 1]; or H, 1 for K, G
    sinks = sinks.expand(-1, -1, out.shape[2] // sinks.shape[1]).flatten(1)
    return out * _evenly(torch.sigmoid, lse - sinks)[..., None]


def _evenly(function, *args: Tensor) -> Tensor:
    """An elementwise function of tensors of one shape, with the same bits at every place: on a CPU, loops take whole
    vectors, and round what is left over in another way, so nothing is to be left over."""
    shape, count = args[0].shape, args[0].numel()
    if args[0].device.type != "cpu" or count % VECTOR == 0 and all(x.is_contiguous() for x in args):
        return function(*args)
    padded = (torch.nn.functional.pad(x.flatten(), (0, -count % VECTOR)) for x in args)
    return function(*padded)[:count].view(shape)


def _kernel(q: Tensor) -> Callable[[Tensor, Tensor, Tensor, bool], State]:
    """Of unmasked and causal keys, by the table above."""
    rows, head_dim = q.shape[2:]
    half = _is_half(q.dtype)
    if q.device.type == "cuda" and head_dim % 8 == 0 and head_dim <= 256:
        if half:
            return _cudnn if rows >= MANY and rows % TILE == 0 and _has_cudnn(q) else _flash_cuda
        if q.dtype == torch.float32:
            return _efficient_cuda
    if q.device.type == "cpu" and (q.dtype == torch.float32 or half and rows >= 64):
        return _flash_cpu
    return _plain


def _has_cudnn(q: Tensor) -> bool:
    """Whether cuDNN's kernel takes such rows."""
    return (q.is_cuda and _is_half(q.dtype) and q.shape[3] % 8 == 0 and q.shape[3] <= 128
            and torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(q.device) >= (8, 0))


def _cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> State:
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)[:2]
    return out, lse.reshape(q.shape[:3])


def _flash_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> State:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _efficient_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None = None) -> State:
    out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)[:2]
    return out, lse[:, :, : q.shape[2]]  # the kernel pads the rows of lse


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> State:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[:2]


def _plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, bias: Tensor | None = None) -> State:
    """Two matmuls and a softmax in float32 or wider: the slow twin of every kernel, and the small masked part."""
    wide = _wide(q.dtype)
    if is_causal:
        rows = torch.arange(q.shape[2], device=q.device)
        bias = torch.zeros(q.shape[2], q.shape[2], device=q.device).masked_fill(rows[:, None] < rows, float("-inf"))
    # In half precision the operands stay as they are: widening K and V would read and write them once more. A GPU's
    # tensor cores give the float32 sums; a CPU rounds them, which it may do only where no mask needs exact zeros.
    narrow = _is_half(q.dtype) and (q.is_cuda or q.device.type == "cpu" and bias is None)
    scale = q.shape[-1] ** -0.5
    if narrow and not q.is_cuda:  # or else the rounded products of a Qwen2.5 overflow
        q, scale = q * scale, 1.0
    scores = _matmul(q, k.transpose(-1, -2), wide) if narrow else q.to(wide) @ k.to(wide).transpose(-1, -2)
    scores = scores * scale  # [B, K, R, S]
    if bias is not None:
        scores = scores + bias
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)  # a row that sees nothing: exp(-inf), not nan
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    out = _weighted_sum(weights, v, wide) if narrow else weights @ v.to(wide)
    return out / total.clamp(min=torch.finfo(wide).tiny), (top + total.log()).squeeze(-1)


def _plain_output(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The output alone of `_plain` where every row sees a key, in half precision on a GPU: in half as many kernels."""
    wide = _wide(q.dtype)
    scores = _matmul(q, k.transpose(-1, -2), wide)
    weights = torch.add(bias, scores, alpha=q.shape[-1] ** -0.5).softmax(-1)
    return _weighted_sum(weights, v, wide)


def _weighted_sum(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K, R, S] @ [B, K, S, D] with sums in another dtype, on a GPU by parts of S: a head occupies one processor."""
    if not v.is_cuda or v.shape[2] <= 1024 or v.shape[2] % (8 * SPLIT):
        return _matmul(weights.to(v.dtype), v, dtype)
    weights = weights.unflatten(-1, (SPLIT, -1)).transpose(2, 3)  # [B, K, SPLIT, R, S / SPLIT]
    weights = weights.to(v.dtype, memory_format=torch.contiguous_format).flatten(1, 2)
    v = v.unflatten(2, (SPLIT, -1)).flatten(1, 2)
    return _matmul(weights, v, dtype).unflatten(1, (-1, SPLIT)).sum(2)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, K, R, S] @ [B, K, S, T] in a wider dtype than theirs."""
    if not a.is_cuda:
        return (a @ b).to(dtype)
    out = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype)
    return out.unflatten(0, a.shape[:2])


def heads_side_by_side(out: Tensor, n_head: int, dtype: torch.dtype) -> Tensor:
    """[B, K, G * M, D] or [B, H, M, D] -> [B, M, H * D], contiguous, as the projection of a layer takes it."""
    y = out.unflatten(2, (n_head // out.shape[1], -1)).permute(0, 3, 1, 2, 4)  # [B, M, K, G, D]; or H, 1 for K, G
    if is_compiling() and y.dtype == dtype:  # or else `to` is nothing, and y may lie in another order
        y = y.clone(memory_format=torch.contiguous_format)
    return y.to(dtype, memory_format=torch.contiguous_format).flatten(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x [..., D] by the angles of `RotaryEmbedding`: j and j + D / 2 are a pair."""
    pair = x.roll(x.shape[-1] // 2, -1)
    if x.is_cuda and not is_compiling():  # in three kernels instead of five
        return torch.addcmul(x * cos, pair, sin, out=x.new_empty(x.shape))
    return (x * cos + pair * sin).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)
