"""Partial states and their merge, against one softmax over all keys in float64."""

from functools import reduce
from types import SimpleNamespace

import pytest
import torch

from triforce import attention


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


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5])
def test_few_keys(keys, dtype, tolerance):
    """With and without a mask, for several sequences."""
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_causal_square(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, 17, 16).to(dtype) for _ in range(3))
    expected, _ = softmax_attention(q, k, v, torch.ones(17, 17, dtype=torch.bool).tril())
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(attention.causal(q, k, v)[0].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rows_that_see_themselves(dtype, tolerance):
    """The same as over all rows with all but the diagonal masked."""
    q, (k, v) = torch.randn(2, 3, 4 * 5, 16).to(dtype), torch.randn(2, 2, 3, 5, 16).to(dtype)
    bias = attention.fold_mask(torch.eye(5, dtype=torch.bool).expand(2, -1, -1), 4)
    own = attention.apart(q, k[..., None, :], v[..., None, :])
    for found, expected in zip(own, attention.masked(q, k, v, bias), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("long", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_keys_go_to_one_kernel_of_a_gpu(long, dtype, monkeypatch):
    """In half precision, with a mask that hides keys by a finite number, whichever mask was given: of a row that sees
    nothing the kernel would otherwise say that it sees one key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 8, dtype=torch.bfloat16) for n in (4, 16, 16))
    seen = torch.arange(16) < torch.tensor([0, 5, 16])[:, None]
    bias, asked = attention.fold_mask(seen[:, None].expand(-1, 4, -1), 1, dtype), []

    def kernel(q, k, v, is_causal, bias):
        asked.append(bias)
        return attention._plain(q, k, v, False, bias)

    expected = attention.masked(q, k, v, bias)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(attention, "_efficient_cuda", kernel)
    monkeypatch.setattr(attention, "_matmul", lambda a, b, dtype: (a.float() @ b.float()).to(dtype))
    found = attention.masked(q, k, v, bias, long=long)
    assert [one.shape for one in asked] == [(3, 2, 4, 16)]
    assert asked[0].dtype == torch.bfloat16 and asked[0].isfinite().all()
    monkeypatch.undo()
    own = attention.dense(q, k[:, :, :4], v[:, :, :4])
    for one, other in zip(attention.merge(own, found), attention.merge(own, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert all(torch.equal(one[0], mine[0].float()) for one, mine in zip(attention.merge(own, found), own, strict=True))


@pytest.mark.parametrize("hidden", [-torch.inf, attention.HIDDEN])
@pytest.mark.parametrize("count, parted", [(1, False), (2, False), (2, True), (3, True), (4, False), (4, True)])
def test_states_that_are_joined_on_a_gpu_are_those_that_are_merged(count, parted, hidden, monkeypatch):
    """At once, where a CPU merges one after the other. A last state that hides all keys of a row changes none of the
    row's bits, whatever it says of them. The states of a prefill, which has many rows, are merged. The second state is
    one of three parts."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, 8)
    states = [attention.dense(q, *torch.randn(2, 2, 2, 5, 8)) for _ in range(count)]
    states[1:] = [(out.bfloat16(), lse) for out, lse in states[1:]]
    nothing = states[0][0] + 1, torch.full_like(states[0][1], hidden)
    if parted:
        parts = [attention.dense(q, *torch.randn(2, 2, 2, 5, 8)) for _ in range(3)]
        states[1] = tuple(torch.stack(x) for x in zip(*parts, strict=True))
        one = reduce(attention.merge, parts)
        torch.testing.assert_close(attention.join(states), attention.join([states[0], one, *states[2:]]))
    expected = attention.join(states)
    calls, merge, added, addcmul = [], attention.merge, [], torch.addcmul
    monkeypatch.setattr(attention, "merge", lambda *states: calls.append(1) or merge(*states))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch, "addcmul", lambda *tensors: added.append(1) or addcmul(*tensors))
    found = attention.join(states)
    torch.testing.assert_close(found, expected)
    assert len(added) == count - 1  # a state that weighs nothing is not among the products
    assert not calls and torch.equal(attention.join([*states, nothing]), found)
    many = [(torch.cat([out] * 171, -2), torch.cat([lse] * 171, -1)) for out, lse in states]  # 513 rows
    torch.testing.assert_close(attention.join(many)[:, :, :3], expected)
    assert len(calls) == count - 1


def test_parts_of_a_batch_are_put_together_in_order(monkeypatch):
    """As on a GPU of 8 processors, by the kernel of this machine."""
    torch.manual_seed(0)
    (q, k, v), calls = (torch.randn(11, 2, n, 16) for n in (3, 20, 20)), []
    whole = attention.dense(q, k, v)
    monkeypatch.setattr(attention, "_flash_cuda", lambda q, k, v, causal: (calls.append(len(q)),
                                                                          attention._plain(q, k, v, False))[1])
    monkeypatch.setattr(attention, "_kernel", lambda q: attention._flash_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(attention, "LONG", 20)
    for one, other in zip(whole, attention.dense(q, k, v), strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [4, 4, 3]
