"""Which published models can draft for a checkpoint, by the vocabulary that its config.json gives.

The list is a hint. Whether two tokenizers are the same is compared when they are loaded.
"""

from ..model import ModelConfig

LLAMA, QWEN2 = "LlamaForCausalLM", "Qwen2ForCausalLM"
KNOWN = [  # (architecture, sizes of its vocabulary, repository, millions of parameters)
    (LLAMA, (32000,), "JackFram/llama-68m", 68),
    (LLAMA, (32000,), "TinyLlama/TinyLlama_v1.1", 1100),
    (LLAMA, (128256,), "meta-llama/Llama-3.2-1B", 1236),
    (LLAMA, (49152,), "HuggingFaceTB/SmolLM2-135M", 135),
    (LLAMA, (64000,), "01-ai/Yi-1.5-6B", 6061),
    (QWEN2, (151936, 152064), "Qwen/Qwen2.5-0.5B", 494),
]
SMALLER = 4  # a draft of more than a quarter of the target's weights takes too long to be one


def candidates(config: ModelConfig) -> list[str]:
    """Repositories, the smallest first."""
    return [name for architecture, sizes, name, millions in KNOWN
            if architecture == config.architecture and config.vocab_size in sizes
            and SMALLER * millions * 1e6 <= config.num_parameters * config.num_shards]
