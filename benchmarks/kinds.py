"""What a step takes of models with layers of several kinds, or experts, at their shapes, with random weights.

    python benchmarks/kinds.py --shape gemma-3-4b --contexts 32768 122880 --compile --out rows.jsonl
    python benchmarks/kinds.py --config FOLDER/config.json --contexts 4096

A step of one row, one of all rows of a verify, and six steps over the view with the verify after them, in milliseconds;
the prefill (with --compile, compiling too); bytes of weights, of keys and values, and of the device's memory at the
highest point. Random routing chooses the experts.
"""

import argparse
import gc
import json
import sys
import time
from datetime import date
from pathlib import Path

import torch

from triforce.config import Placement, Settings
from triforce.decode.plan import AUTOREGRESSION, ONE_ROW, DraftPlan
from triforce.engine import memory
from triforce.engine.engine import Engine
from triforce.hf.config import config_from_hf
from triforce.model import Transformer

sys.path.insert(0, str(Path(__file__).parent))
from harness import device_name, report, run_or_plot, times  # noqa: E402

NEW = 600  # tokens that there is room for
SHAPES = {
    "gemma-3-4b": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10_240, "vocab_size": 262_208,
                   "sliding_window": 1024},
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                      "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True,
                      "vocab_size": 151_936},
    "gpt-oss-20b": {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
                    "num_experts_per_tok": 4, "vocab_size": 201_088}}


def run(args) -> None:
    try:
        hf = json.loads(Path(args.config).read_text()) if args.config else SHAPES[args.shape]
    except (OSError, ValueError) as error:
        raise SystemExit(f"--config {args.config}: {error}; give a config.json") from None
    config = config_from_hf({"max_position_embeddings": max(args.contexts) + 2 * NEW, **hf})
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = Transformer.random(config, device=device, dtype=getattr(torch, args.dtype))
    machine = {"device": device_name(args.device), "date": str(date.today()), "torch": torch.__version__,
               "dtype": args.dtype, "compile": args.compile, "shape": args.config or args.shape}
    for context in args.contexts:
        ids = torch.randint(5, config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
        engine = Engine(model, None, settings=Settings(), placement=Placement(device=device,
                                                                              compile=args.compile or None))
        begun = time.perf_counter()
        state = engine.prepare([ids], NEW, temperature=0.0)
        row = {"context": context, "prefill_s": time.perf_counter() - begun, "block": state.hierarchy.outer.rows,
               "weights_gb": model.weight_bytes / 1e9, "kv_gb": state.cache.prefix.nbytes / 1e9}
        with torch.inference_mode():
            row |= {"one_row_ms": times(state, ONE_ROW)[1], "padded_ms": times(state, AUTOREGRESSION)[1],
                    "view_of_6_ms": times(state, DraftPlan(6, None, True, 0, 6)),
                    "peak_gb": memory.peak(device) / 1e9}
        report(f"{machine['shape']}, {context:,} tokens", row, machine, args.out)
        engine.release()
        del state, engine
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gemma-3-4b")
    parser.add_argument("--config", metavar="FILE", help="a config.json, in place of a shape")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32_768])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--out", metavar="FILE", help="append rows of JSON")
    run_or_plot(run, None, argparse.Namespace(**vars(parser.parse_args()), plot=None))


if __name__ == "__main__":
    main()
