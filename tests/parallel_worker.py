"""What the ranks of tests/test_parallel.py run: `python tests/parallel_worker.py N`.

They are forks of one process that has imported everything, with the environment that torchrun gives: N processes that
each import PyTorch would spend most of their time on that. torchrun itself is met by the command line's tests.
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]
from conftest import VOCAB, make_engine, random_pair, random_prompt  # noqa: E402
from on_chip import widened_draft  # noqa: E402
from shares import first_ranks, holds_whole  # noqa: E402
from widen import SHAPES, widen  # noqa: E402

import triforce  # noqa: E402
from triforce.engine import Engine  # noqa: E402
from triforce.hf.checkpoint import TINY, load_model, tiny_draft  # noqa: E402
from triforce.hf.places import shard  # noqa: E402
from triforce.model import ModelConfig, Transformer  # noqa: E402
from triforce.parallel import from_environment, subgroup  # noqa: E402

SETTINGS = {"flush_interval": 16, "chunk_size": 4, "rebuild_interval": 16, "prefill_chunk_size": 64}
PROMPT = random_prompt(300)
GREEDY = {"max_new_tokens": 12, "temperature": 0}


def engine_of(target, draft, **more) -> Engine:
    return make_engine(target, draft, **SETTINGS, **more, budget=64)


def logits_of(model, ids):
    return make_engine(model, retrieval=False).logits(ids)


def every_kind_of_parameter(group) -> None:
    """Biases, and a vocabulary that does not divide."""
    config = ModelConfig(65, 32, 2, 8, 8 if group.size == 8 else 4, 8, 48, qkv_bias=True, out_bias=True, mlp_bias=True)
    for tied in (False, True):
        whole = Transformer.random(replace(config, tie_word_embeddings=tied), seed=3, std=0.3)
        part = shard(whole, group)
        assert part.config.n_head == 8 // group.size and part.embedding.weight.shape[0] == -(-65 // group.size)
        ids = [random_prompt(50, vocab_size=65)]
        expected, found = logits_of(whole, ids), logits_of(part, ids)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def what_is_said(group) -> None:
    """Alone, and shared by two."""
    target, draft = random_pair()
    part = shard(target, group)
    for more in ({"gamma": 6}, {"gamma": "auto", "gamma_inner": 3}, {"gamma": 6, "offload": True}):
        alone, shared = engine_of(target, draft, **more), engine_of(part, draft, **more)
        options = {"max_new_tokens": 32, "temperature": 0.0}
        assert shared.generate(PROMPT, **options).tokens == alone.generate(PROMPT, **options).tokens
        drawn = shared.generate(PROMPT, max_new_tokens=24, temperature=1.0)  # each rank would draw another seed
        assert group.agree((drawn.tokens, drawn.stats.seed)) == (drawn.tokens, drawn.stats.seed)
    same_results(group, alone, shared)
    law = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": None, "seed": [0]}
    share, whole = (engine.prepare([PROMPT], 24, **law).cache.prefix.offload.nbytes for engine in (shared, alone))
    assert share == whole // 2


def same_results(group, alone: Engine, shared: Engine) -> None:
    """Biased, with log-probabilities and levels: on every rank, and as one rank tells them."""
    one, out = (engine.generate(PROMPT, max_new_tokens=16, temperature=0.0, logprobs=2, logit_bias={5: 2.0, 7: -9.0})
                for engine in (alone, shared))
    assert out.tokens == one.tokens and out.levels == one.levels and len(out.logprobs) == 16
    assert group.agree(out.logprobs) == out.logprobs
    for told, expected in zip(out.logprobs, one.logprobs, strict=True):
        assert abs(told.model_logprob - expected.model_logprob) < 1e-3
        assert [token for token, _ in told.top] == [token for token, _ in expected.top]


def checkpoint(group) -> None:
    """Of which each rank reads its part; a batch; the draft on some of the ranks; a rank that goes astray."""
    tiny, alone = (triforce.load("tiny", device="cpu", group=g, gamma=4, max_batch_size=2) for g in (group, None))
    assert sum(p.numel() for p in tiny.target.parameters()) < 1.1 / group.size * alone.target.config.num_parameters
    ids = [random_prompt(200, vocab_size=4096), random_prompt(90, seed=1, vocab_size=4096)]
    tokens = [[out.tokens for out in engine.generate(ids, **GREEDY)] for engine in (tiny, alone)]
    assert tokens[0] == tokens[1]

    ranks = draft_ranks(group)
    some = triforce.load("tiny", device="cpu", group=group, gamma=4, max_batch_size=2, draft_ranks=ranks)
    assert (some.draft is not None) == (group.rank in ranks)
    if some.draft is not None:
        assert some.draft.config.n_head == 2 // len(ranks)
    assert [out.tokens for out in some.generate(ids, **GREEDY)] == tokens[1]
    drawn = some.generate(ids[0], max_new_tokens=16, temperature=0.6, seed=1)
    assert group.agree(drawn.tokens) == drawn.tokens
    assert drawn.stats.acceptance_rate["retrieval"] > 0.1  # what was broadcast is what was drafted

    try:
        tiny.generate(ids[0], max_new_tokens=32, temperature=1.5, seed=group.rank)
    except RuntimeError as error:
        assert "ranks disagree" in str(error)
    else:
        raise AssertionError("nobody noticed")
    assert [out.tokens for out in tiny.generate(ids, **GREEDY)] == tokens[1]


def draft_ranks(group) -> list[int]:
    """One of two, two of four, four of eight."""
    return list(range(group.size // 2))


def draft_on_half(group) -> None:
    """A batch; over eight ranks, the draft over four of them, as MagicDec was published with: one KV head each. The way
    to draft that has every level; with two ranks, where a sum takes little, the others, too."""
    config = ModelConfig(VOCAB, 64, 2, 16, 8, 8, 64, max_position_embeddings=8192)
    small = replace(config, dim=32, n_layer=1, n_head=4, n_kv_head=4)
    target, draft = (Transformer.random(c, seed=i, std=0.3) for i, c in enumerate((config, small)))
    ids = [PROMPT[:150], PROMPT[:70]]  # each flushes once
    alone = [out.tokens for out in engine_of(target, None, gamma=3, max_batch_size=2).generate(ids, **GREEDY)]

    ranks = draft_ranks(group)
    part = subgroup(group, ranks)
    shared = {"draft": shard(draft, part) if part is not None else None, "draft_ranks": ranks}
    ways = [{"gamma_inner": 2, **shared}]
    if group.size == 2:
        ways += [{"retrieval": False, **shared}, {"draft": None}, {"draft": None, "draft_cache": "streaming"}]
    for more in ways:
        engine = engine_of(shard(target, group), gamma=3, max_batch_size=2, **more)
        assert [out.tokens for out in engine.generate(ids, **GREEDY)] == alone
        drawn = engine.generate(ids, max_new_tokens=8, temperature=1.0, seed=[1, 2])
        assert group.agree([out.tokens for out in drawn]) == [out.tokens for out in drawn]
    assert engine.target.config.n_kv_head == 8 // group.size


def widened(group) -> None:
    """The benchmarks' large model, made share by share; and with half of the shares left out."""
    small = load_model(TINY / "target", "cpu", torch.float32)
    shape = replace(SHAPES["llama-3.1-8b"], vocab_size=4999, dim=384, n_layer=9, n_head=16, n_kv_head=8, ffn_dim=704)
    part = widen(small, shape, dtype=torch.float32, group=group)
    assert len(part.layers) == 9 and part.layers[8].attention.qkv.weight.shape == (32 // group.size * 128, 384)
    ids = [random_prompt(200, vocab_size=4096)]
    expected, found = logits_of(small, ids), logits_of(part, ids)
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)

    first = first_ranks(group, 2 * group.size)
    wide = replace(shape, vocab_size=9000, n_head=32, n_kv_head=16, ffn_dim=1408)
    part = widen(small, wide, dtype=torch.float32, group=first)
    assert part.config.n_kv_head == 16 // first.size and holds_whole(small.config, part.config, group.size)
    assert not holds_whole(small.config, replace(part.config, n_kv_head=0), group.size)
    found = logits_of(part, ids)
    assert found.shape[-1] == 9000 and (found[..., 4096:] < -200).all()
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)

    how = {"vocab_size": 9000, "device": "cpu", "dtype": torch.float32}
    model = load_model(tiny_draft(), "cpu", torch.float32)
    args = SimpleNamespace(draft_shape="llama-68m", draft_ranks=draft_ranks(group))
    draft = widened_draft(model, args, group, **how)
    assert (draft is not None) == (group.rank in args.draft_ranks)
    assert draft is None or draft.config.n_head == 12 // len(args.draft_ranks)
    args.draft_ranks = [*range(3 * group.size // 2)]
    draft = widened_draft(model, args, first, **how)
    assert draft.config.n_head == 12 // len(args.draft_ranks)
    expected, found = logits_of(model, ids), logits_of(draft, ids)
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)


def forked(rank: int, count: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    main()


def main() -> None:
    torch.set_num_threads(1)
    group, _ = from_environment("cpu")
    every_kind_of_parameter(group)
    if group.size == 2:  # the target of this pair has two KV heads
        what_is_said(group)
    if group.size != 4:
        draft_on_half(group)
    if group.size != 8:  # the embedded target has four
        checkpoint(group)
        widened(group)
    print(f"rank {group.rank} of {group.size} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    count = int(sys.argv[1])
    processes.start_processes(forked, (count, port), nprocs=count, start_method="fork")
