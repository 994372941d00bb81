"""Partial states and their merge, against one softmax over all keys in float64."""

import pytest
import torch

from triforce import attention
from triforce.cpu import PackedPrefix


def softmax_attention(q, k, v, visible):
    scores = (q.double() @ k.double().transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("group", [1, 4])
def test_merged_parts_equal_the_whole(dtype, tolerance, group):
    torch.manual_seed(0)
    q = torch.randn(2, 2 * group, 5, 16).to(dtype)
    k, v = torch.randn(2, 2, 40, 16).to(dtype), torch.randn(2, 2, 40, 16).to(dtype)
    visible = torch.ones(2, 5, 10, dtype=torch.bool).tril(3)
    rows = attention.fold(q, 2)
    bias = attention.fold_mask(visible, group)
    parts = [attention.dense(rows, k[:, :, :13], v[:, :, :13]),
             attention.dense(rows, k[:, :, 13:30], v[:, :, 13:30]),
             attention.masked(rows, k[:, :, 30:], v[:, :, 30:], bias, no_empty_rows=True)]
    out, lse = attention.merge(attention.merge(parts[0], parts[1]), parts[2])
    seen = torch.cat([torch.ones(2, 5, 30, dtype=torch.bool), visible], 2).repeat(1, group, 1)[:, None]
    expected, expected_lse = softmax_attention(rows, k, v, seen)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("folded", [True, False])
def test_a_sink_is_one_more_key_without_a_value(folded):
    torch.manual_seed(0)
    q, k, v, sinks = (torch.randn(*shape).double() for shape in ((2, 4, 5, 16), (2, 2, 40, 16), (2, 2, 40, 16), (4,)))
    rows, several = attention.fold(q, 2), [x.repeat_interleave(2, 1) for x in (k, v)]  # by KV head, or by head
    parts = [attention.dense(rows if folded else q, *(x[:, :, part] for x in ((k, v) if folded else several)))
             for part in (slice(13), slice(13, None))]
    scores = torch.cat([q @ several[0].mT / 4, sinks[:, None, None].expand(2, -1, 5, 1)], -1)
    expected = scores.softmax(-1)[..., :-1] @ several[1]
    torch.testing.assert_close(attention.join(parts, sinks).reshape(q.shape), expected)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5])
def test_few_keys(keys, dtype, tolerance):
    torch.manual_seed(0)
    q = torch.randn(3, 2, 6, 16).to(dtype)
    k, v = (torch.randn(3, 2, keys, 16).to(dtype) for _ in range(2))
    visible = torch.ones(3, 1, 6, keys, dtype=torch.bool)
    found = [(attention.dense(q, k, v), visible)]
    hidden = visible.clone()
    hidden[1:, :, 3:, 1:] = False
    bias = torch.where(hidden, 0.0, float("-inf"))
    found += [(attention.masked(q, k, v, bias, no_empty_rows), hidden) for no_empty_rows in (True, False)]
    for (out, lse), seen in found:
        expected, expected_lse = softmax_attention(q, k, v, seen)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


def test_float16_products_beyond_its_range():
    """As those of a Qwen2.5, whose first keys have a bias in the hundreds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 64).half() for rows in (3, 40, 40))
    q, k = q + 60, k + 60  # products of 230,000
    out, lse = attention.dense(q, k, v)
    expected, expected_lse = softmax_attention(q, k, v, torch.ones(3, 40, dtype=torch.bool))
    assert (q.double() @ k.double().transpose(2, 3)).min() > 65_504
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-3, atol=0)
    assert torch.isfinite(out).all() and (out - expected).abs().max() < 2


def test_empty_states():
    q = torch.randn(1, 2, 3, 8)
    none = torch.empty(1, 2, 0, 8)
    empty = attention.dense(q, none, none)
    assert (empty[0] == 0).all() and (empty[1] == float("-inf")).all()
    out, lse = attention.merge(empty, empty)
    assert (out == 0).all() and (lse == float("-inf")).all()
    k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    state = attention.dense(q, k, v)
    for merged in (attention.merge(empty, state), attention.merge(state, empty)):
        assert torch.equal(merged[0], state[0]) and torch.equal(merged[1], state[1])


@pytest.mark.parametrize("batch,heads,rows,fused,count", [(1, 4, 64, True, 16), (1, 4, 65, True, 1), (1, 5, 1, True, 1),
                                                          (2, 1, 128, True, 16), (1, 4, 64, False, 1)])
def test_keys_of_few_heads_are_read_in_parts(batch, heads, rows, fused, count, monkeypatch):
    """Where that is compiled; each key up to a length once."""
    monkeypatch.setattr(attention, "UNIT", 3)
    k = torch.empty(batch, heads, 130, 8)[:, :, :120]
    lengths = torch.tensor([7, 100][-batch:], dtype=torch.int32)
    parts = attention.parts_up_to(lengths, 110, attention.places(k), rows, fused)
    assert parts.lengths.shape == (count, batch, heads) and parts.lengths.max() <= parts.bound
    read = [place + i for place, n in zip(parts.keys.tolist(), parts.lengths.flatten().tolist(), strict=False)
            for i in range(n)]
    assert sorted(read) == [130 * row + i for row, n in enumerate(lengths.repeat_interleave(heads)) for i in range(n)]


@pytest.mark.parametrize("dim,block", [(64, 256), (96, 128), (128, 128), (256, 64)])
def test_no_number_of_keys_is_split_block_by_block(dim, block):
    """PyTorch's flash kernel makes the fewest splits that keep a GPU of 132 processors 85% as busy as the best number
    does. Of 65,536 tokens that would be 528 partial sums of a KV head."""
    def splits(sequences: int, blocks: int) -> int:
        able = [n for n in range(1, min(128, blocks) + 1) if n == 1 or -(-blocks // n) != -(-blocks // (n - 1))]
        busy = {n: sequences * n / 264 / -(-sequences * n // 264) for n in able}
        return next(n for n in able if busy[n] >= 0.85 * max(busy.values()))

    assert splits(32, 33) == 33
    for heads in (1, 2, 3, 4):
        for bound in range(4096, 262_145, 1024):
            place = torch.zeros(1, heads, dtype=torch.int32)
            parts = attention.parts_up_to(torch.tensor([bound], dtype=torch.int32), bound, place, 10, fused=True)
            assert parts.keys.max() <= bound and splits(16 * heads, -(-parts.bound // block)) <= 16


def test_masked_keys_contribute_exactly_nothing():
    """Not even their bits: whatever finite garbage lies in a masked slot, the result is the same."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    visible = torch.ones(1, 3, 9, dtype=torch.bool)
    visible[..., 6:] = False
    bias = attention.fold_mask(visible, 1)
    for no_empty_rows in (True, False):
        clean = attention.masked(q, k, v, bias, no_empty_rows)
        dirty_k, dirty_v = k.clone(), v.clone()
        dirty_k[:, :, 6:], dirty_v[:, :, 6:] = 1e4, -1e4
        dirty = attention.masked(q, dirty_k, dirty_v, bias, no_empty_rows)
        assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    nothing = attention.masked(q, k, v, torch.full((1, 1, 3, 9), float("-inf")))
    assert (nothing[0] == 0).all() and (nothing[1] == float("-inf")).all()


@pytest.mark.slow
def test_attention_over_a_million_keys():
    """Positions, sums and bytes at that length, with a key that outweighs all others near the end: by a kernel, with a
    mask, and packed. What a GPU's kernels do there is not seen here."""
    million, generator = 2**20, torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(1, 1, 4, 16, generator=generator), torch.randn(2, 1, 1, million, 16, generator=generator)
    k[0, 0, million - 3] = 12 * q[0, 0, 0]
    expected = softmax_attention(q, k, v, torch.ones(1, 1, dtype=torch.bool))
    for found in (attention.dense(q, k, v), attention.masked(q, k, v, torch.zeros(1, 1, 4, million)),
                  PackedPrefix(k[0], v[0]).dense(q)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0][0, 0, 0], v[0, 0, million - 3], rtol=1e-2, atol=1e-2)
