"""What the ranks of tests/test_parallel.py run: `python tests/parallel_worker.py N`.

They are forks of one process that has imported everything, with the environment that torchrun gives: N processes that
each import PyTorch would spend most of their time on that. For the same reason that process also computes, before it
forks, what one computes: the functions with `cache`. torchrun itself is met by the command line's tests.
"""

import gc
import json
import os
import socket
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]
import float8_folders  # noqa: E402
from conftest import VOCAB, make_engine, random_pair, random_prompt  # noqa: E402
from widen import shard  # noqa: E402

import triforce  # noqa: E402
from triforce.engine import memory  # noqa: E402
from triforce.engine.engine import Engine  # noqa: E402
from triforce.hf.checkpoint import load_model  # noqa: E402
from triforce.hf.fingerprint import weights_fingerprint  # noqa: E402
from triforce.hf.folders import TINY  # noqa: E402
from triforce.model import ModelConfig, Transformer  # noqa: E402
from triforce.parallel import from_environment, subgroup  # noqa: E402
from triforce.runtime import host  # noqa: E402

SETTINGS = {"flush_interval": 16, "chunk_size": 4, "rebuild_interval": 16, "prefill_chunk_size": 64}
PROMPT = random_prompt(300)
GREEDY = {"max_new_tokens": 8, "temperature": 0}


def engine_of(target, draft, **more) -> Engine:
    return make_engine(target, draft, **SETTINGS, **more, budget=64)


def logits_of(model, ids):
    return make_engine(model, retrieval=False).logits(ids)


KINDS = {"untied": {}, "tied": {"tie_word_embeddings": True},
         "windows": {"sliding_layers": (0,), "sliding_window": 20, "sliding_theta": 50.0, "post_norm": True,
                     "shifted_norms": True, "activation": "gelu", "embedding_scale": 3.0},
         "experts": {"mlp_bias": False, "num_experts": 6, "active_experts": 2, "weighs_anew": True}}


@cache
def every_kind_alone(n_kv_head: int, kind: str):
    """Biases, norms and rotated parts of heads, and a vocabulary that does not divide: (a model, ids, its logits)."""
    config = ModelConfig(65, 32, 2, 8, n_kv_head, 8, 48, qkv_bias=True, out_bias=True, mlp_bias=True,
                         qk_norm=True, rotary_factor=0.5, nope_layers=(1,))
    whole = Transformer.random(replace(config, **KINDS[kind]), seed=3, std=0.3)
    for name, parameter in whole.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.copy_(torch.linspace(0.5, 1.5, 8))
    ids = [random_prompt(50, vocab_size=65)]
    return whole, ids, logits_of(whole, ids)


def every_kind_of_parameter(group) -> None:
    for kind in [*KINDS][: 1 if group.size == 8 else 4]:
        whole, ids, expected = every_kind_alone(8 if group.size == 8 else 4, kind)
        part = shard(whole, group)
        assert group.agree(weights_fingerprint(part)) == weights_fingerprint(part)  # of the weights of all ranks
        assert part.config.n_head == 8 // group.size and part.embedding.weight.shape[0] == -(-65 // group.size)
        found = logits_of(part, ids)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


WAYS_TO_SAY = ({"gamma": "auto", "gamma_inner": 3},
               {"gamma": "auto", "sampling": "coupled", "leaves": 1, "leaves_inner": 2},
               {"gamma": "auto", "sampling": "coupled", "tree_size": 32},
               {"gamma": 2, "offload": True})
SAID = {"max_new_tokens": 10, "temperature": 0.0}
DRAWN = {"max_new_tokens": 10, "temperature": 1.0, "top_p": 1.0, "seed": 6}
LAW = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": None, "seed": [0]}


@cache
def said_alone():
    """(the pair, what it says in each way, bytes on the host in the last)."""
    engines = [engine_of(*random_pair(), **more) for more in WAYS_TO_SAY]
    said = [engine.generate(PROMPT, **(DRAWN if "sampling" in more else SAID)).tokens
            for engine, more in zip(engines, WAYS_TO_SAY, strict=True)]
    return random_pair(), said, engines[-1].prepare([PROMPT], SAID["max_new_tokens"], **LAW).cache.prefix.offload.nbytes


def what_is_said(group) -> None:
    """Alone, and shared by two."""
    (target, draft), said, whole = said_alone()
    part = shard(target, group)
    for more, expected in zip(WAYS_TO_SAY, said, strict=True):
        shared = engine_of(part, draft, **more)
        assert shared.generate(PROMPT, **(DRAWN if "sampling" in more else SAID)).tokens == expected
        drawn = shared.generate(PROMPT, max_new_tokens=6, temperature=1.0)  # each rank would draw another seed
        assert group.agree((drawn.tokens, drawn.stats.seed)) == (drawn.tokens, drawn.stats.seed)
    assert shared.prepare([PROMPT], SAID["max_new_tokens"], **LAW).cache.prefix.offload.nbytes == whole // 2
    # Biased, with log-probabilities and levels: on every rank, and as one rank tells them.
    one, out = (engine.generate(PROMPT, max_new_tokens=8, temperature=0.0, logprobs=2, logit_bias={5: 2.0, 7: -9.0})
                for engine in (engine_of(target, draft, **WAYS_TO_SAY[-1]), shared))
    assert out.tokens == one.tokens and out.levels == one.levels and len(out.logprobs) == 8
    assert group.agree(out.logprobs) == out.logprobs
    for told, expected in zip(out.logprobs, one.logprobs, strict=True):
        assert abs(told.model_logprob - expected.model_logprob) < 1e-3
        assert [token for token, _ in told.top] == [token for token, _ in expected.top]


@cache
def checkpoint_alone():
    """(ids, what one says, how many parameters it has)."""
    ids = [random_prompt(200, vocab_size=4096), random_prompt(90, seed=1, vocab_size=4096)]
    alone = triforce.load("tiny", device="cpu", gamma=4, max_batch_size=2)
    return ids, [out.tokens for out in alone.generate(ids, **GREEDY)], alone.target.config.num_parameters


DOCUMENT, QUESTIONS = random_prompt(300, seed=5), [random_prompt(n, seed=n) for n in (4, 20)]


@cache
def answers_alone():
    """(the pair, what it answers about a document)."""
    engine = engine_of(*random_pair(), gamma=2)
    book = engine.prefill(DOCUMENT)
    return random_pair(), [out.tokens for out in engine.generate(QUESTIONS, prefix=book, **SAID)]


def questions_about_a_document(group) -> None:
    """A shared prefix, of which each rank has its heads; saved by all ranks, and opened by them and by one."""
    (target, draft), expected = answers_alone()
    shared = engine_of(shard(target, group), draft, gamma=2)
    book = shared.prefill(DOCUMENT)
    answers = shared.generate(QUESTIONS, prefix=book, **SAID)
    assert [out.tokens for out in answers] == expected and answers[0].stats.shared_tokens == book.num_shared > 200
    folder = group.agree(tempfile.mkdtemp())
    path = os.path.join(folder, "book.prefix")
    book.save(path)
    alone = engine_of(target, draft, gamma=2)
    alone._identity = shared.identity()  # as of a checkpoint's folder, which is the same for any number of ranks
    for engine in (shared, alone):
        opened = engine.open(path)
        assert [out.tokens for out in engine.generate(QUESTIONS, prefix=opened, **SAID)] == expected
    kept = os.path.join(folder, "kept.prefix")
    shared.prefill(DOCUMENT[:150], keep=kept)
    whole = shared.prefill(DOCUMENT, keep=kept, keep_every=64)
    assert 0 < whole.num_read < 150 and len(shared.open(kept)) == len(DOCUMENT)
    assert [out.tokens for out in shared.generate(QUESTIONS, prefix=whole, **SAID)] == expected
    found, files = [], Path(folder, "files")
    for turn in range(4):  # written, read, damaged, read again
        if turn == 2 and group.rank == 0:  # in numbers of the other rank
            [file] = files.iterdir()
            data = file.read_bytes()
            file.write_bytes(data[:-6000] + bytes(1000) + data[-5000:])
        group.agree(None)
        out = engine_of(shard(target, group), draft, gamma=2, cache_dir=files).generate(DOCUMENT * 2, **SAID)
        found.append((out.tokens, out.stats.reused_tokens))
    assert [tokens for tokens, _ in found] == [found[0][0]] * 4 and [reused for _, reused in found] == [0, 576, 0, 576]


def checkpoint(group) -> None:
    """Of which each rank reads its part; a batch; the draft on some of the ranks; a rank that goes astray."""
    ids, expected, size = checkpoint_alone()
    tiny = triforce.load("tiny", device="cpu", group=group, gamma=4, max_batch_size=2)
    assert sum(p.numel() for p in tiny.target.parameters()) < 1.1 / group.size * size
    assert [out.tokens for out in tiny.generate(ids, **GREEDY)] == expected

    ranks = draft_ranks(group)
    some = triforce.load("tiny", device="cpu", group=group, gamma=4, max_batch_size=2, draft_ranks=ranks)
    assert (some.draft is not None) == (group.rank in ranks)
    if some.draft is not None:
        assert some.draft.config.n_head == 2 // len(ranks)
    assert [out.tokens for out in some.generate(ids, **GREEDY)] == expected
    if group.size > 2:  # the rest does not depend on how many they are
        return
    drawn = some.generate(ids[0], max_new_tokens=16, temperature=0.6, seed=1)
    assert group.agree(drawn.tokens) == drawn.tokens
    assert drawn.stats.acceptance_rate["retrieval"] > 0.1  # what was broadcast is what was drafted

    with pytest.raises(RuntimeError, match="ranks disagree"):
        tiny.generate(ids[0], max_new_tokens=16, temperature=1.5, seed=group.rank)
    assert [out.tokens for out in tiny.generate(ids, **GREEDY)] == expected


@cache
def in_fp8_alone():
    """(ids, a folder in blocks of 128 and its logits, what the embedded target says when it is rounded to fp8)."""
    ids, folder = random_prompt(120, vocab_size=4096), Path(tempfile.mkdtemp())
    float8_folders.save(load_file(TINY / "target" / "model.safetensors"),
                        json.loads((TINY / "target" / "config.json").read_text()), "blocks", folder)
    alone = triforce.load("tiny", device="cpu", gamma=4, weights="fp8")
    return ids, folder, logits_of(load_model(folder, dtype="float32"), [ids]), alone.generate(ids, **GREEDY).tokens


def weights_in_fp8(group) -> None:
    """A rank's share ends in the midst of a block; and a row's scale is that of the whole row."""
    ids, folder, expected, said = in_fp8_alone()
    part = load_model(folder, dtype="float32", group=group)
    assert part.layers[0].mlp.down.weight.shape == (256, 704 // group.size)
    torch.testing.assert_close(logits_of(part, [ids]), expected, rtol=1e-3, atol=1e-3)
    rounded = triforce.load("tiny", device="cpu", gamma=4, weights="fp8", group=group)
    for speculate in (True, False):
        assert rounded.generate(ids, speculate=speculate, **GREEDY).tokens == said


def where_one_rank_is_fuller(group) -> None:
    """All say so, in the same words, and go on."""
    engine, available = engine_of(shard(random_pair()[0], group), None, gamma=2), memory.available
    before = engine.generate(PROMPT[:100], **SAID).tokens
    if group.rank == 1:
        memory.available = lambda device: 1000
    with pytest.raises(triforce.UserError, match="needs") as error:
        engine.generate(random_prompt(3000), **SAID)
    memory.available = available
    assert group.agree(str(error.value)) == str(error.value)
    assert engine.generate(PROMPT[:100], **SAID).tokens == before


def where_one_rank_has_a_broken_weight(group) -> None:
    """All tell whose it is, and go on."""
    engine = engine_of(shard(random_pair()[0], group), None, gamma=2)
    weight = engine.target.layers[1].mlp.down.weight
    before = weight[0, 0].item()
    weight[0, 0] = float("nan") if group.rank == 1 else before
    with pytest.raises(triforce.UserError, match="weights of layers.1.mlp.down are no finite numbers"):
        engine.generate(PROMPT, **SAID)
    weight[0, 0] = before
    assert len(engine.generate(PROMPT, **SAID).tokens) == SAID["max_new_tokens"]


def draft_ranks(group) -> list[int]:
    """One of two, two of four, four of eight."""
    return list(range(group.size // 2))


HALF_DRAWN = {"max_new_tokens": 4, "temperature": 1.0, "seed": [1, 2]}


@cache
def half_alone():
    """(target, draft, ids, what the target says alone, and what it draws)."""
    config = ModelConfig(VOCAB, 64, 2, 16, 8, 8, 64, max_position_embeddings=8192)
    small = replace(config, dim=32, n_layer=1, n_head=4, n_kv_head=4)
    target, draft = (Transformer.random(c, seed=i, std=0.3) for i, c in enumerate((config, small)))
    ids = [PROMPT[:154], PROMPT[:74]]  # each flushes once
    engine = engine_of(target, None, gamma=3, max_batch_size=2, sampling="coupled", leaves=1)
    alone = ([out.tokens for out in engine.generate(ids, **how)] for how in (GREEDY, HALF_DRAWN))
    return target, draft, ids, *alone


def draft_on_half(group) -> None:
    """A batch; over eight ranks, the draft over four of them, as MagicDec was published with: one KV head each. The way
    to draft that has every level; with two ranks, where a sum takes little, the others, too."""
    target, draft, ids, alone, drawn_alone = half_alone()
    ranks = draft_ranks(group)
    part = subgroup(group, ranks)
    shared = {"draft": shard(draft, part) if part is not None else None, "draft_ranks": ranks}
    ways = [{"gamma_inner": 2, **shared}]
    if group.size == 2:
        ways += [{"draft": None, "draft_cache": "query"},
                 {"retrieval": False, "sampling": "coupled", "leaves": 1, **shared}]
    for more in ways:
        engine = engine_of(shard(target, group), gamma=3, max_batch_size=2, **more)
        assert [out.tokens for out in engine.generate(ids, **GREEDY)] == alone
        if group.size == 2:
            drawn = [out.tokens for out in engine.generate(ids, **HALF_DRAWN)]
            assert group.agree(drawn) == drawn and (drawn == drawn_alone or "sampling" not in more)
    assert engine.target.config.n_kv_head == 8 // group.size


def forked(rank: int, count: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    # PyTorch makes its pool of threads anew after a fork, and fails where two threads find that out at once.
    torch.set_num_threads(1)
    host._home = None  # the parent computed with one thread, so nothing waits here for threads that are not there
    group, _ = from_environment("cpu")
    for check, _ in checks(count):
        check(group)
    print(f"rank {group.rank} of {group.size} done", flush=True)
    dist.destroy_process_group()


def checks(count: int) -> list:
    """What so many ranks compute, each with what one computes for it."""
    found = [(every_kind_of_parameter, lambda: [every_kind_alone(8 if count == 8 else 4, kind) for kind in KINDS])]
    if count == 2:  # the target of this pair has two KV heads
        found += [(what_is_said, said_alone), (questions_about_a_document, answers_alone)]
    if count != 4:
        found += [(draft_on_half, half_alone)]
    if count != 8:  # the embedded target has four
        found += [(checkpoint, checkpoint_alone)]
    if count == 2:
        found += [(weights_in_fp8, in_fp8_alone), (where_one_rank_is_fuller, random_pair),
                  (where_one_rank_has_a_broken_weight, random_pair)]
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    count = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as tempfile.tempdir:  # of all ranks
        for _, alone in checks(count):
            alone()
        gc.freeze()  # what there is now is not to be looked through, and thereby copied, in every rank
        processes.start_processes(forked, (count, port), nprocs=count, start_method="fork")
