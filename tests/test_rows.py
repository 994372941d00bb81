"""A row of a step has the same bits wherever in the block it lies, on any number of a CPU's threads.

With speculation a token is checked in some row of a block, without it in the first: that both have the same logits to
the bit rests on this. Each test gives all rows the same numbers and wants the same from each. A promise of the whole
library, not of one module.
"""

import math
from functools import partial

import pytest
import torch
from conftest import bits, make_engine, make_state, random_pair, random_prompt, slow
from torch import nn

from triforce import attention
from triforce.cpu import GELU, Linear, PackedPrefix, SiLU, adapt, pack_weights, row_unit
from triforce.decode.plan import AUTOREGRESSION
from triforce.engine.logprobs import logits_of
from triforce.model import ModelConfig, Transformer

ROWS = (4, 8, 12, 16, 36, 64)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, *slow(2, 3, 8)], autouse=True)  # more of them wait for each other where cores are busy
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    yield request.param
    torch.set_num_threads(before)


def rows_of(*shape: int, rows: int, dtype=torch.float32) -> torch.Tensor:
    """[*shape[:-1], rows, shape[-1]]: random numbers, the same in each row."""
    return torch.randn(*shape[:-1], 1, shape[-1]).to(dtype).expand(*shape[:-1], rows, -1).contiguous()


def skip_where_rows_are_shared_out(dtype, threads: int) -> None:
    """Some CPUs without instructions for bf16 share a product of it out to many threads in mid-row."""
    if dtype == torch.bfloat16 and threads > 2:
        pytest.skip("bits of rows in bf16 are not promised for more than two threads")


def same(y: torch.Tensor, dim: int = 2) -> bool:
    return torch.equal(y, y.narrow(dim, 0, 1).expand_as(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ffn_dim", [704, 1408, 5632, 8960, 11008, 14336])
def test_the_gate(ffn_dim, dtype):
    kinds = (SiLU(), nn.functional.silu), (GELU("tanh"), partial(nn.functional.gelu, approximate="tanh"))
    for rows in ROWS:
        gate, up = rows_of(1, 2 * ffn_dim, rows=rows, dtype=dtype).chunk(2, -1)
        for activate, plain in kinds:
            y = activate(gate) * up
            assert same(y, 1)
            torch.testing.assert_close(y, plain(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 64), (256, 256), (256, 1408), (576, 960), (896, 1151)])
def test_products(sizes, dtype, threads):
    skip_where_rows_are_shared_out(dtype, threads)
    layer = Linear(*sizes, True).to(dtype)
    for packed in (False, True):
        if packed and dtype == torch.float32:
            layer.pack(8)
        for rows in ROWS:
            with torch.inference_mode():
                assert same(layer(rows_of(1, sizes[0], rows=rows, dtype=dtype)), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048,), (9, 64), (3, 80), (32, 128)])
def test_norms(shape, dtype):
    """Of whole rows, and of each head in a row."""
    norm = nn.RMSNorm(shape[-1], 1e-6).to(dtype)
    adapt(norm)
    nn.init.uniform_(norm.weight)
    for rows in ROWS:
        x = rows_of(1, math.prod(shape), rows=rows, dtype=dtype).unflatten(-1, shape)
        assert same(norm(x).detach(), 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("heads", [(4, 1, 64), (2, 7, 64), *slow(((3, 3, 64),), ((8, 4, 128),))])
def test_attention(heads, dtype, threads):
    """Over as many keys as a tail, a view and a tail, and parts of a prefix have; and over the few that are left over
    where flush_interval or piece_tokens does not divide what is attended to together."""
    skip_where_rows_are_shared_out(dtype, threads)
    num, group, dim = heads
    for rows in ROWS:
        for length in (1, 2, 3, 7, 160, 1184):
            q = rows_of(1, num, dim, rows=group * rows, dtype=dtype)
            k, v = torch.randn(2, 1, num, length, dim).to(dtype)
            bias = torch.zeros(1, 1, group * rows, length)
            bias[..., 1::2] = float("-inf")
            states = [attention.dense(q, k, v), attention.masked(q, k, v, bias, True)]
            if dtype == torch.float32:
                states.append(attention.masked(q, k, v, bias))
                states.append(PackedPrefix(k[0], v[0]).dense(q))
            states += [attention.merge(states[0], states[-1]), (attention.join(states), states[0][1])]
            assert all(same(out) and same(lse) for out, lse in states)


@pytest.mark.parametrize("config", [
    {"n_head": 9, "n_kv_head": 3, "ffn_dim": 192, "qk_norm": True},  # as many heads as SmolLM2 has
    {"n_head": 4, "n_kv_head": 1, "ffn_dim": 250, "nope_layers": (0,)},
    {"n_head": 4, "n_kv_head": 2, "ffn_dim": 192, "sliding_layers": (0,), "sliding_window": 200, "sliding_theta": 500.0,
     "post_norm": True, "shifted_norms": True, "qk_norm": True, "activation": "gelu", "embedding_scale": 8.0},
    *slow({"n_head": 2, "n_kv_head": 2, "ffn_dim": 8960, "rotary_factor": 0.5}),
])
def test_logits_with_speculation_on_and_off(config):
    target = Transformer.random(ModelConfig(vocab_size=1000, dim=64, n_layer=1, head_dim=32,
                                            max_position_embeddings=4096, **config), std=0.2)
    runs = []
    for retrieval in (True, False):
        state = make_state(target, None, [random_prompt(300, vocab_size=1000)], vocab_size=1000, retrieval=retrieval,
                           gamma=7)
        runs.append(bits(state, 32, plan=None if retrieval else AUTOREGRESSION))
    assert runs[0][:2] == runs[1][:2]
    windows = "sliding_layers" in config  # a view's level then sees what the full one does
    assert runs[0][2]["full"] >= 10 or windows  # and drafts were rejected on the way


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_four_rows_give_the_bits_of_more(batch, pack):
    """Steps of 4, 8, 12 and 16 rows, in turns and one kind alone, over a prefix that is packed or not."""
    target, _ = random_pair(std=0.2)
    pack_weights(target, 8)
    prompts = [random_prompt((4200 if pack else 300) + 9 * row, seed=row) for row in range(batch)]
    state = make_state(target, None, prompts, block_size=16, gamma=15, retrieval=False, ngram=True, capacity=5120,
                       pack=pack, flush_interval=64)
    assert (state.cache.prefix.packed is not None) == (pack and batch == 1) and state.hierarchy.outer.row_unit == 4
    level, runs = state.hierarchy.outer, []
    for turns in ((4,), (16,), (4, 8, 12, 16)):
        state.rewind(500, plan=AUTOREGRESSION)
        tokens = []
        for rows in 9 * (4 // len(turns)) * turns:
            level.rows_of = lambda plan, drafted, rows=rows: rows
            state.round()
            tokens.append((state.texts(state.lens[0])[0], logits_of(level)[:, 0].clone()))
        runs.append(tokens)
    for run in runs[1:]:
        assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("owner,name", [(SiLU, "forward"), (attention, "dense"), (attention, "masked"),
                                        (nn.RMSNorm, "forward"), (Linear, "forward")])
def test_where_rows_are_not_even_padded_steps_have_all(owner, name, monkeypatch):
    """As some CPUs' kernels are: whichever part of a step depends on how many rows there are."""
    whole, (target, draft), seen = getattr(owner, name), random_pair(), set()

    def uneven(*args, **more):
        out = whole(*args, **more)
        states = out if isinstance(out, tuple) else (out,)
        states = tuple(x * (1 + 1e-3 * states[0].shape[-2]) for x in states)
        return states if isinstance(out, tuple) else states[0]

    monkeypatch.setattr(owner, name, uneven)
    assert row_unit(target, 1, 8, False) == 8
    engine = make_engine(target, draft, gamma=2, budget=64, flush_interval=16, chunk_size=4)
    target.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
    engine.generate(random_prompt(60), 12, temperature=0.0, speculate=False)
    assert seen == {8}


@pytest.mark.parametrize("rows", [8, 32])
def test_attention_over_few_keys(rows):
    """As pieces of an offloaded prefix may end, in its layout on the host."""
    for count in range(1, 32):
        q = torch.randn(2, 2, 1, 64).repeat(1, 1, rows, 1)
        k, v = torch.randn(2, 2, count, 2, 64).transpose(2, 3)
        bias = torch.zeros(2, 1, rows, count)
        for out, _ in (attention.masked(q, k, v, bias, long=True), attention.dense(q, k, v)):
            assert torch.equal(out, out[:, :, :1].expand_as(out)), count
