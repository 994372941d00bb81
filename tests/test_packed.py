"""oneDNN's layout: the same products, and used where it pays."""

import pytest
import torch
from conftest import random_prompt

import triforce
from triforce import cpu
from triforce.cache.prefix import PrefixStore
from triforce.cpu import Linear, packs
from triforce.engine import memory

pytestmark = pytest.mark.skipif(not packs(torch.device("cpu"), torch.float32), reason="no oneDNN")


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_it_did(bias):
    torch.manual_seed(0)
    layer, x = Linear(96, 80, bias), torch.randn(2, 5, 96)
    with torch.inference_mode():
        expected = layer(x)
        layer.pack(8)
        assert layer.weight is None
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_a_document_is_packed_when_it_is_computed(monkeypatch, watched):
    """No question waits for it, and none has it done again. It takes at most an eighth of what is free."""
    packed = watched(PrefixStore, "pack", lambda store: store.lens[0])  # the lengths of what is packed
    monkeypatch.setattr("triforce.cache.prefix.MIN_TOKENS", 200)
    engine = triforce.load("tiny", device="cpu", gamma=3)
    document = engine.prefill(random_prompt(600))
    taken = document.num_shared * engine.target.config.kv_elements_per_token * 4
    monkeypatch.setattr(memory, "check", lambda *args: None)
    for free, times in ((8 * taken + 1000, 1), (8 * taken - 1000, 0)):
        monkeypatch.setattr(memory, "available", lambda device, free=free: free)
        packed.clear()
        document = engine.prefill(random_prompt(600))
        assert packed == [document.num_shared] * times and (document.store.packed is not None) == bool(times)
        assert taken * (1 + times) <= document.nbytes < taken * (1.3 + times)  # chunk keys, too
        monkeypatch.setattr(memory, "available", lambda device: 2**40)
        for _ in range(2):
            engine.generate([random_prompt(9), random_prompt(12)], 4, prefix=document)
        assert packed == [document.num_shared]


def test_prompts_of_any_length_make_few_shapes(watched):
    """oneDNN keeps code for each number of rows that it multiplies, so a process would grow with every length."""
    linear, plain = Linear(16, 8, bias=False), Linear(16, 8, bias=False)
    plain.weight = linear.weight
    with torch.no_grad():
        seen = watched(cpu, "multiply", lambda x, *more: len(x))
        x = torch.randn(2, 1024, 16, generator=torch.Generator().manual_seed(0))
        expected = plain(x)
        linear.pack(8)
        for rows in range(1, 1025):
            for part, out in ((x[:1, :rows], expected[:1, :rows]), (x[:, :rows], expected[:, :rows])):
                assert torch.allclose(linear(part), out, atol=1e-6)
    assert len({*seen}) < 110 and max(seen) == 2048 and {*range(1, 65)} <= {*seen}  # few rows are what a step has
