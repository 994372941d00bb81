"""Records what the library says, to the bit, and compares: run it before and after a change that is to change nothing.

    python tests/bits.py record FILE [--device cuda --dtype float16] [--only SETTING ...]
    PYTHONPATH=OTHER_CHECKOUT python tests/bits.py compare FILE [--device cuda --dtype float16] [--only SETTING ...]

Every setting below answers the same prompts: greedy with and without speculation, and drawn with a seed. Of each answer
are kept its tokens, a hash of the log-probabilities behind them, which the logits decide, and how drafting went. Where
the output is promised to be the same with speculation and without, that is checked, too, in one run. The exit status is
0 if nothing differs.

It uses the public interface alone, so that checkouts that differ in everything else can be compared: the one that
PYTHONPATH names. The settings with several ranks start processes of their own. Not a test: bits depend on the machine.
"""

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import triforce
from triforce import Engine, Generation
from triforce.config import Placement, Settings
from triforce.model import ModelConfig, Transformer

NEW = 20  # tokens of an answer
ENDED = {"logit_bias": [{7: 1e6}, None, None], "stop_token_ids": [7]}  # the first of three ends at once
COMMON = {"gamma": 6, "flush_interval": 64, "budget": 256, "max_seq_len": 1024}
COUPLED = {"sampling": "coupled"}
LEAVES = {**COUPLED, "leaves": 1, "leaves_inner": 3}
TREE = {**COUPLED, "tree_size": 24, "block_size": 8}
SHARED = {"max_seq_len": 2048, "max_batch_size": 3}

# name: what differs from COMMON, and
#   scene: what is asked, one of SCENES below; without it one prompt
#   ranks: processes
#   shape: of random models instead of the embedded pair, on a GPU alone
#   cuda: for a GPU alone
#   apart: not compared with and without speculation: after an answer with it more is held, and less is prefilled
#   within: not compared with what was recorded; with and without speculation are
ALONE = {
    "hierarchy": {}, "hierarchy, gamma 7, 3": {"gamma": 7, "gamma_inner": 3}, "hierarchy, gamma 1": {"gamma": 1},
    "budget of all": {"budget": 1024}, "budget 144": {"budget": 144}, "chunks of 16": {"chunk_size": 16},
    "flush 128": {"flush_interval": 128}, "block 16": {"block_size": 16, "gamma": 12},
    "rebuild 8": {"rebuild_interval": 8},
    "retrieval": {"draft": False}, "retrieval, gamma 3": {"draft": False, "gamma": 3},
    "snapkv": {"draft": False, "draft_cache": "snapkv"}, "streaming": {"draft": False, "draft_cache": "streaming"},
    "following": {"draft": False, "draft_cache": "query"}, "hierarchy, following": {"draft_cache": "query"},
    "hierarchy over streaming": {"draft_cache": "streaming"}, "hierarchy over snapkv": {"draft_cache": "snapkv"},
    "draft": {"retrieval": False},
    "draft, window 64": {"retrieval": False, "draft_window": 64, "draft_sink": 2},
    "ngram": {"draft": "ngram"}, "ngram only": {"draft": "ngram", "retrieval": False},
    "nothing": {"draft": False, "retrieval": False},
    "prefill by 100": {"prefill_chunk_size": 100}, "recent 0.5": {"recent": 0.5},
    "coupled": COUPLED, "coupled, retrieval": {**COUPLED, "draft": False},
    "leaves": LEAVES, "leaves, draft": {**COUPLED, "leaves": 2, "retrieval": False},
    "tree": TREE, "fp8": {"weights": "fp8"}, "bfloat16": {"dtype": "bfloat16"},
    "offload": {"offload": True}, "offload, 3 layers": {"offload": True, "num_resident_layers": 3},
    "offload, pieces of 64": {"offload": True, "piece_tokens": 64},
    "offload, retrieval": {"offload": True, "draft": False},
    "offload, streaming": {"offload": True, "draft": False, "draft_cache": "streaming"},
    "offload, leaves": {"offload": True, **LEAVES},
}


def also(prefix: str, more: dict, *names: str) -> dict:
    """Settings from above, with more."""
    return {f"{prefix}, {name}".removesuffix(", hierarchy"): {**ALONE[name], **more} for name in names}


SETTINGS = {
    **ALONE,
    **also("batch", {"scene": "batch"}, "hierarchy", "retrieval", "snapkv", "draft", "ngram", "leaves", "offload",
           "fp8", "bfloat16"),
    **also("ended rows", {"scene": "ended"}, "hierarchy", "coupled", "offload"),
    **also("shared", {"scene": "shared", **SHARED}, "hierarchy", "coupled", "leaves", "tree", "retrieval", "offload"),
    "shared, one question": {"scene": "question", **SHARED},
    **also("shared, ended rows", {"scene": "ended shared", **SHARED}, "hierarchy", "coupled"),
    **also("common beginning", {"scene": "common", **SHARED}, "hierarchy", "coupled"),
    **also("reuse", {"scene": "reuse"}, "hierarchy", "offload"),
    "conversation": {"scene": "conversation", "apart": True},
    "conversation about a document": {"scene": "conversation about", "apart": True, **SHARED},
    **also("kept document", {"scene": "kept", **SHARED, "prefill_chunk_size": 256}, "hierarchy", "offload"),
    "float16": {"dtype": "float16", "draft": False}, "fp8 drafts": {"draft_dtype": "fp8", "cuda": True},
    **also("two ranks", {"ranks": 2}, "hierarchy", "offload", "leaves", "bfloat16"),
    "two ranks, draft on one": {"ranks": 2, "draft_ranks": [0]}, "two ranks, batch": {"ranks": 2, "scene": "batch"},
    "two ranks, shared": {"ranks": 2, "scene": "shared", **SHARED},
    "two ranks, float16": {"ranks": 2, "dtype": "float16"},
    "written": {"compile": False, "cuda": True},
    **also("compiled", {"compile": True, "cuda": True, "within": True}, "hierarchy", "leaves"),
    "compiled, batch": {"compile": True, "scene": "batch", "cuda": True, "within": True},
    "compiled, shared": {"compile": True, "scene": "shared", **SHARED, "cuda": True, "within": True},
    **{f"{shape}{more}": {"shape": shape, "scene": scene, "budget": 1024, "gamma": gamma, "max_batch_size": 4,
                          "max_seq_len": 33_280, "flush_interval": 128, **options}
       for shape in ("7B", "8B")
       for more, scene, gamma, options in ((", shared", "shared", 3, {}), (", shared, coupled", "shared", 3, COUPLED),
                                           (", shared, ended rows", "ended shared", 3, {}),
                                           (", one row", "prompt", 6, {}))},
}
SHAPES = {"7B": ModelConfig(32_000, 4096, 4, 32, 32, 128, 11_008, max_position_embeddings=131_072),
          "8B": ModelConfig(128_256, 4096, 4, 32, 8, 128, 14_336, max_position_embeddings=131_072)}
DRAFT = ModelConfig(32_000, 768, 2, 12, 12, 64, 3072)
DOCUMENT = {"tiny": 1300, "7B": 32_768, "8B": 32_768}  # tokens

Ask = Callable[..., list[Generation]]  # of `speculate` and the options of `Sampling`


# -- engines and texts -------------------------------------------------------------------------------------------------


def make_engine(options: dict, shape: str, group) -> Engine:
    if shape == "tiny":
        return triforce.load("tiny", group=group, **options)
    placement = {name: options.pop(name) for name in ("device", "dtype", "max_seq_len", "max_batch_size", "compile")
                 if name in options}
    how = {"device": placement["device"], "dtype": getattr(torch, placement.get("dtype", "float16"))}
    draft = replace(DRAFT, vocab_size=SHAPES[shape].vocab_size)
    return Engine(Transformer.random(SHAPES[shape], seed=0, **how), None, Transformer.random(draft, seed=1, **how),
                  settings=Settings(**options), placement=Placement(**placement))


def long_text(engine: Engine, count: int) -> list[int]:
    """So many ids."""
    if engine.tokenizer is None:
        return torch.randint(0, engine.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    from pydoc_data.topics import topics  # a long English text that every Python carries

    return engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[: 8 * count])[:count]


# -- scenes: each takes an engine and returns what asks it -------------------------------------------------------------


def answer(engine: Engine, prompts: list[list[int]], **how) -> list[Generation]:
    """With the numbers from which the hashes are made."""
    how = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 20, **how}
    return engine.generate(prompts, **how)


def batch(engine: Engine, **more) -> Ask:
    prompts = [long_text(engine, 3000)[start:][:length] for start, length in ((0, 700), (1000, 300), (2000, 40))]
    return lambda speculate, **how: answer(engine, prompts, speculate=speculate, **more, **how)


def single(engine: Engine) -> Ask:
    length = 700 if engine.tokenizer else DOCUMENT["7B"]
    return lambda speculate, **how: answer(engine, [long_text(engine, length)], speculate=speculate, **how)


def shared(engine: Engine, count: int = 3, kept: bool = False, **more) -> Ask:
    """Questions about a document."""
    ids = long_text(engine, 3000 if engine.tokenizer else DOCUMENT["7B"] + 1000)
    document, rest = ids[: len(ids) - 1000], ids[-1000:]
    document = document[: DOCUMENT["tiny"] if engine.tokenizer else None]
    questions = [rest[100 * i :][: 8 + 15 * i] for i in range(count)]
    book = read_again(engine, document) if kept else engine.prefill(document)

    def ask(speculate: bool, **how) -> list[Generation]:
        found = answer(engine, questions, prefix=book, speculate=speculate, **more, **how)
        assert found[0].stats.shared_tokens > 1000
        return found

    return ask


def read_again(engine: Engine, document: list[int]):
    """The document, computed in two parts, kept in a file, and read from there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document"
        engine.prefill(document[: len(document) // 2], keep=path)
        whole = engine.prefill(document, keep=path, keep_every=256)
        assert whole.num_read == 512
        return engine.open(path)


def common(engine: Engine) -> Ask:
    """Prompts that begin with the same tokens."""
    ids = long_text(engine, 3000)
    prompts = [ids[: DOCUMENT["tiny"]] + ids[2000 + 100 * i :][: 20 + 15 * i] for i in range(3)]

    def ask(speculate: bool, **how) -> list[Generation]:
        engine.release()
        found = answer(engine, prompts, speculate=speculate, **how)
        assert found[0].stats.shared_tokens > 1000
        return found

    return ask


def reuse(engine: Engine) -> Ask:
    """Prompts that go on from what the engine holds: from within its answer, and from within the first prompt."""
    ids = long_text(engine, 3000)

    def ask(speculate: bool, **how) -> list[Generation]:
        engine.release()
        prompt, found = ids[:500], []
        for cut, more in ((500 + NEW // 2, ids[1000:1060]), (300, ids[2000:2100]), (0, [])):
            found += answer(engine, [prompt], speculate=speculate, **how)
            prompt = (prompt + found[-1].tokens)[:cut] + more
        assert found[0].stats.reused_tokens == 0 < found[2].stats.reused_tokens < found[1].stats.reused_tokens
        return found

    return ask


def conversation(engine: Engine, about: bool = False) -> Ask:
    """Turns, one of which is taken back."""
    book = engine.prefill(long_text(engine, DOCUMENT["tiny"])) if about else None

    def ask(speculate: bool, **how) -> list[Generation]:
        engine.release()
        begin = {} if about else {"system": engine.tokenizer.decode(long_text(engine, 200))}
        chat = engine.chat(book, **begin, speculate=speculate, max_new_tokens=NEW, logprobs=20, ignore_eos=True, **how)
        found = [chat.send("What is a statement?"), chat.send("And what is an expression of this language?")]
        chat.undo()
        found.append(chat.send("How long may a line be?"))
        assert found[1].stats.reused_tokens + found[1].stats.shared_tokens > 0
        return found

    return ask


SCENES = {
    "prompt": single, "batch": batch, "ended": lambda engine: batch(engine, **ENDED), "shared": shared,
    "question": lambda engine: shared(engine, 1), "ended shared": lambda engine: shared(engine, **ENDED),
    "common": common, "reuse": reuse, "conversation": conversation,
    "conversation about": lambda engine: conversation(engine, about=True),
    "kept": lambda engine: shared(engine, kept=True),
}


# -- runs --------------------------------------------------------------------------------------------------------------


def told(answers: list[Generation]) -> dict:
    """What is compared of answers: tokens, hashes of what the logits decide, and how drafting went."""
    # Not the drawn distribution: how a GPU sums it up follows from the number of tokens that are told at once.
    hashes = [hashlib.sha256(repr([(one.model_logprob, one.top) for one in found.logprobs]).encode())
              for found in answers]
    drafts = [[one.target_forwards, one.retrieval_rebuilds, one.shared_tokens, one.reused_tokens,
               sorted(one.acceptance_rate.items())] for one in (found.stats for found in answers)]
    return {"tokens": [found.tokens for found in answers], "logits": [one.hexdigest() for one in hashes],
            "drafts": json.loads(json.dumps(drafts))}


def run(name: str, device: str, dtype: str | None, group=None) -> dict:
    """All that one setting says, by the kind of decoding."""
    options = {**COMMON, "device": device, **({"dtype": dtype} if dtype else {}), **SETTINGS[name]}
    scene, shape = options.pop("scene", "prompt"), options.pop("shape", "tiny")
    for mark in ("ranks", "cuda", "apart", "within"):
        options.pop(mark, None)
    if scene in ("batch", "ended"):
        options["max_batch_size"] = 3
    engine = make_engine(options, shape, group)
    ask = SCENES[scene](engine)
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    found = {"drawn on": told(ask(True, **drawn)), "greedy on": told(ask(True, temperature=0.0)),
             "greedy off": told(ask(False, temperature=0.0))}
    if "sampling" in options:  # coupled
        found["drawn off"] = told(ask(False, **drawn))
    return found


def broken_promises(name: str, found: dict) -> list[str]:
    """Where speculation changes bits."""
    if "apart" in SETTINGS[name]:
        return []
    return [f"{name}, {kind}: {what} with speculation and without"
            for kind in ("greedy", "drawn") if f"{kind} off" in found for what in ("tokens", "logits")
            if found[f"{kind} on"][what] != found[f"{kind} off"][what]]


def run_ranks(name: str, device: str, dtype: str | None) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                        str(SETTINGS[name]["ranks"]), __file__, "rank", str(out), "--only", name, "--device", device,
                        *(["--dtype", dtype] if dtype else [])], check=True,
                       env={"OMP_NUM_THREADS": "1", **os.environ})
        return json.loads(out.read_text())


def chosen(device: str, only: list[str]) -> list[str]:
    """The names of the settings that this machine can run, or those that are asked for."""
    devices = torch.cuda.device_count() if device != "cpu" else 2
    on_gpu = ("cuda", "shape")
    return [name for name, options in SETTINGS.items() if (not only or name in only)
            and options.get("ranks", 1) <= devices
            and (device != "cpu" or only or not any(mark in options for mark in on_gpu))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare", "rank"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="of all settings that do not name one")
    parser.add_argument("--only", nargs="+", default=[], choices=[*SETTINGS], metavar="SETTING")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # models this small gain nothing from more
    if args.what == "rank":  # one of several
        from triforce.parallel import from_environment, leave

        group, device = from_environment(args.device)
        found = run(args.only[0], device, args.dtype, group)
        if group.rank == 0:
            args.file.write_text(json.dumps(found))
        leave()
        return 0
    print(f"code of {Path(triforce.__file__).parent}", flush=True)
    found, wrong = {}, []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRIFORCE_CACHE"] = cache
        for name in chosen(args.device, args.only):
            how = run_ranks if "ranks" in SETTINGS[name] else run
            found[name] = how(name, args.device, args.dtype)
            broken = broken_promises(name, found[name])
            wrong += broken
            print(f"{name}: {'DIFFERS with speculation and without' if broken else 'done'}", flush=True)
            gc.collect()
    if args.what == "record":
        args.file.write_text(json.dumps(found))
    else:
        before = json.loads(args.file.read_text())
        wrong += [f"{name}, {kind}: {what}, then and now" for name in found if "within" not in SETTINGS[name]
                  for kind in found[name] for what in found[name][kind]
                  if before.get(name, {}).get(kind, {}).get(what) != found[name][kind][what]]
    print("\n".join(f"DIFFER: {line}" for line in wrong) or f"{len(found)} settings, nothing differs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
