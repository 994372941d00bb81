"""Records what the library says, to the bit, and compares: run it before and after a change that is to change nothing.

    python tests/bits.py record FILE [--device cuda --dtype float16]
    python tests/bits.py compare FILE [--device cuda --dtype float16]

Every setting below decodes the same prompts with the embedded pair: greedy with and without speculation, and drawn with
a seed. What is kept of each run are its tokens and a hash of the logits behind them. The settings with several ranks
start processes of their own. Not a test: bits depend on the machine.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import triforce
from triforce.plan import AUTOREGRESSION
from triforce.request import default_document

NEW = 48
LENGTHS = {"one": [700], "batch": [700, 300, 40]}
COMMON = {"gamma": 6, "flush_interval": 64, "budget": 256, "keep_logits": True, "max_seq_len": 1024, "compile": None}

# name: what differs from COMMON. "batch": three ragged prompts; "ranks": processes.
SETTINGS = {
    "hierarchy": {}, "hierarchy, gamma 7, 3": {"gamma": 7, "gamma_inner": 3}, "hierarchy, gamma 1": {"gamma": 1},
    "budget of all": {"budget": 1024}, "budget 144": {"budget": 144}, "chunks of 16": {"chunk_size": 16},
    "flush 128": {"flush_interval": 128}, "block 16": {"block_size": 16, "gamma": 12},
    "rebuild 8": {"rebuild_interval": 8},
    "retrieval": {"draft": False}, "retrieval, gamma 3": {"draft": False, "gamma": 3},
    "snapkv": {"draft": False, "draft_cache": "snapkv"}, "streaming": {"draft": False, "draft_cache": "streaming"},
    "hierarchy over streaming": {"draft_cache": "streaming"}, "hierarchy over snapkv": {"draft_cache": "snapkv"},
    "draft": {"retrieval": False}, "draft, full": {"retrieval": False, "draft_cache": "full"},
    "draft, snapkv": {"retrieval": False, "draft_cache": "snapkv"},
    "draft, window 64": {"retrieval": False, "draft_window": 64, "draft_sink": 2},
    "ngram": {"draft": "ngram"}, "ngram only": {"draft": "ngram", "retrieval": False},
    "nothing": {"draft": False, "retrieval": False},
    "prefill by 100": {"prefill_chunk_size": 100}, "recent 0.5": {"recent": 0.5},
    "offload": {"offload": True}, "offload, 3 layers": {"offload": True, "num_resident_layers": 3},
    "offload, pieces of 64": {"offload": True, "piece_tokens": 64},
    "offload, retrieval": {"offload": True, "draft": False},
    "offload, streaming": {"offload": True, "draft": False, "draft_cache": "streaming"},
    "batch": {"batch": True}, "batch, retrieval": {"batch": True, "draft": False},
    "batch, snapkv": {"batch": True, "draft": False, "draft_cache": "snapkv"},
    "batch, draft": {"batch": True, "retrieval": False},
    "batch, draft, full": {"batch": True, "retrieval": False, "draft_cache": "full"},
    "batch, ngram": {"batch": True, "draft": "ngram"},
    "batch, offload": {"batch": True, "offload": True}, "half precision": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "draft": False},
    "two ranks": {"ranks": 2}, "two ranks, batch": {"ranks": 2, "batch": True},
    "two ranks, draft on one": {"ranks": 2, "draft_ranks": [0]}, "two ranks, offload": {"ranks": 2, "offload": True},
}


def decode(engine, prompts: list[list[int]], speculate: bool, **sampling) -> dict:
    """Tokens of each row, and of each a hash of the logits that they were drawn from."""
    state = engine.prepare(prompts, NEW + 16, plan=None if speculate else AUTOREGRESSION, **sampling)
    outer = state.hierarchy.outer
    rows, digests = [[] for _ in prompts], [hashlib.sha256() for _ in prompts]
    while min(map(len, rows)) < NEW:
        emitted = state.round()
        for row, (tokens, new) in enumerate(zip(rows, emitted, strict=True)):
            left = max(NEW - len(tokens), 0)
            digests[row].update(outer.logits[row, : len(new[:left])].float().cpu().contiguous().numpy().tobytes())
            tokens += new[:left]
    return {"tokens": rows, "logits": [digest.hexdigest() for digest in digests]}


def run(name: str, device: str, dtype: str | None, group=None) -> dict:
    """All that one setting says, by the kind of decoding."""
    options = {**COMMON, "device": device, **({"dtype": dtype} if dtype else {}), **SETTINGS[name]}
    options.pop("ranks", 0)
    prompts = LENGTHS["batch" if options.pop("batch", False) else "one"]
    engine = triforce.load("tiny", max_batch_size=len(prompts), group=group, **options)
    ids = engine.tokenizer.encode(default_document())
    prompts = [ids[start * 1000 :][:length] for start, length in enumerate(prompts)]
    law = {"top_p": 0.9, "top_k": None, "min_p": None, "seed": [3 + row for row in range(len(prompts))]}
    found = {"drawn": decode(engine, prompts, True, **{**law, "temperature": 0.8})}
    for speculate in (True, False):
        found["greedy on" if speculate else "greedy off"] = decode(engine, prompts, speculate,
                                                                   **{**law, "temperature": 0.0})
    return found


def run_all(device: str, dtype: str | None, only: list[str]) -> dict:
    found = {}
    for name, options in SETTINGS.items():
        if only and name not in only:
            continue
        if "ranks" not in options:
            found[name] = run(name, device, dtype)
        elif device == "cpu" or torch.cuda.device_count() >= options["ranks"]:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "found.json"
                subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                str(options["ranks"]), __file__, "rank", str(out), "--only", name, "--device", device,
                                *(["--dtype", dtype] if dtype else [])], check=True)
                found[name] = json.loads(out.read_text())
        if name in found:
            same = found[name]["greedy on"] == found[name]["greedy off"]
            print(f"{name}: greedy on and off {'identical' if same else 'DIFFER'}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare", "rank"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="of all settings that do not name one")
    parser.add_argument("--only", nargs="+", default=[], metavar="SETTING")
    args = parser.parse_args()
    if args.what == "rank":
        from triforce.parallel import from_environment, leave

        group, device = from_environment(args.device)
        found = run(args.only[0], device, args.dtype, group)
        if group.rank == 0:
            args.file.write_text(json.dumps(found))
        leave()
        return 0
    found = run_all(args.device, args.dtype, args.only)
    if args.what == "record":
        args.file.write_text(json.dumps(found))
        return 0
    before = json.loads(args.file.read_text())
    differ = [f"{name}, {kind}, {what}" for name in found for kind in found[name] for what in found[name][kind]
              if before.get(name, {}).get(kind, {}).get(what) != found[name][kind][what]]
    print("\n".join(f"DIFFERS: {line}" for line in differ) or f"{len(found)} settings: all as recorded")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
