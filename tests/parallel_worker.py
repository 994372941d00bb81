"""What each rank of tests/test_parallel.py runs: `torchrun --nproc-per-node N tests/parallel_worker.py`."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]
from conftest import random_pair, random_prompt  # noqa: E402
from on_chip import widened_draft  # noqa: E402
from widen import SHAPES, widen  # noqa: E402

import triforce  # noqa: E402
from triforce.checkpoint import TINY, load_model, tiny_draft  # noqa: E402
from triforce.engine import Engine  # noqa: E402
from triforce.model import ModelConfig, Transformer  # noqa: E402
from triforce.parallel import from_environment, shard  # noqa: E402
from triforce.state import Settings  # noqa: E402

SETTINGS = {"flush_interval": 16, "chunk_size": 4, "rebuild_interval": 16, "prefill_chunk_size": 64}
PROMPT = random_prompt(300)


def engine_of(target, draft, **more) -> Engine:
    offload = more.pop("offload", False)
    return Engine(target, None, draft, settings=Settings(**SETTINGS, **more), budget=64, offload=offload)


def main() -> None:
    torch.set_num_threads(1)
    group, device = from_environment("cpu")

    # Every kind of parameter: biases, and a vocabulary that does not divide.
    config = ModelConfig(65, 32, 2, 8, 4, 8, 48, qkv_bias=True, out_bias=True, mlp_bias=True)
    for tied in (False, True):
        whole = Transformer.random(ModelConfig(**{**vars(config), "tie_word_embeddings": tied}), seed=3, std=0.3)
        part = shard(whole, group)
        assert part.config.n_head == 8 // group.size and part.embedding.weight.shape[0] == -(-65 // group.size)
        ids = [random_prompt(50, vocab_size=65)]
        expected, found = (Engine(m, None, settings=Settings(retrieval=False)).logits(ids) for m in (whole, part))
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    # What is said: alone, and shared.
    target, draft = random_pair()
    part = shard(target, group) if group.size == 2 else None  # this one has two KV heads
    if part is not None:
        for more in ({"gamma": 6}, {"gamma": 7, "gamma_inner": 3, "auto": True}, {"gamma": 6, "offload": True}):
            alone, shared = engine_of(target, draft, **more), engine_of(part, draft, **more)
            options = {"max_new_tokens": 32, "temperature": 0.0}
            assert shared.generate(PROMPT, **options).tokens == alone.generate(PROMPT, **options).tokens
            drawn = shared.generate(PROMPT, max_new_tokens=24, temperature=1.0)  # each rank would draw another seed
            assert group.agree((drawn.tokens, drawn.stats.seed)) == (drawn.tokens, drawn.stats.seed)
        assert shared._state.cache.full.offload.nbytes == alone._state.cache.full.offload.nbytes // 2

    # A checkpoint, of which each rank reads its part; a batch.
    tiny, alone = (triforce.load("tiny", device=device, group=g, gamma=4, max_batch_size=2) for g in (group, None))
    assert sum(p.numel() for p in tiny.target.parameters()) < 1.1 / group.size * alone.target.config.num_parameters
    ids = [random_prompt(200, vocab_size=4096), random_prompt(90, seed=1, vocab_size=4096)]
    greedy = {"max_new_tokens": 24, "temperature": 0}
    tokens = [[out.tokens for out in engine.generate(ids, **greedy)] for engine in (tiny, alone)]
    assert tokens[0] == tokens[1]

    # The draft on some of the ranks: one of two, or shared by two of four.
    ranks = [0] if group.size == 2 else [0, 1]
    some = triforce.load("tiny", device=device, group=group, gamma=4, max_batch_size=2, draft_ranks=ranks)
    assert (some.draft is not None) == (group.rank in ranks)
    if some.draft is not None:
        assert some.draft.config.n_head == 2 // len(ranks)
    assert [out.tokens for out in some.generate(ids, **greedy)] == tokens[1]
    drawn = some.generate(ids[0], max_new_tokens=16, temperature=0.6, seed=1)
    assert group.agree(drawn.tokens) == drawn.tokens
    assert drawn.stats.acceptance_rate["retrieval"] > 0.1  # what was broadcast is what was drafted

    # The benchmarks' widened model, made share by share.
    small = load_model(TINY / "target", "cpu", torch.float32)
    shape = replace(SHAPES["llama-3.1-8b"], vocab_size=4999, dim=384, n_layer=9, n_head=16, n_kv_head=4, ffn_dim=704)
    part = widen(small, shape, dtype=torch.float32, group=group)
    assert len(part.layers) == 9 and part.layers[8].attention.qkv.weight.shape == (24 // group.size * 128, 384)
    expected, found = (Engine(m, None, settings=Settings(retrieval=False)).logits([ids[0]]) for m in (small, part))
    torch.testing.assert_close(found[..., :4096], expected, rtol=1e-2, atol=2e-2)

    draft_args = SimpleNamespace(draft_shape="llama-68m", draft_ranks=ranks)
    how = {"vocab_size": 4999, "device": "cpu", "dtype": torch.float32}
    draft = widened_draft(load_model(tiny_draft(), "cpu", torch.float32), draft_args, group, **how)
    assert (draft is not None) == (group.rank in ranks) and (draft is None or draft.config.n_head == 12 // len(ranks))

    # A rank that goes astray is noticed by all.
    try:
        tiny.generate(ids[0], max_new_tokens=32, temperature=1.5, seed=group.rank)
    except RuntimeError as error:
        assert "ranks disagree" in str(error)
    else:
        raise AssertionError("nobody noticed")
    assert [out.tokens for out in tiny.generate(ids, **greedy)] == tokens[1]
    print(f"rank {group.rank} of {group.size} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
