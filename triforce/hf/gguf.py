"""GGUF files, llama.cpp's format, as Hugging Face folders: config.json, tokenizer and weights widened to a float dtype.

The package `gguf` reads the format and undoes the quantization; this module says what the values mean. Not every file
of an architecture can be had: one with another tokenizer or layers unlike each other is refused by name.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from ..errors import UserError
from .config import ARCHITECTURES, config_from_hf
from .files import FLAG, TEXT, Fields, about, check_file, guarded, number, several, shown, whole
from .names import FUSED, places
from .vocabulary import llama_pipeline, merges_of, surround

# By their names here, those in config.json. Files of Mistral call themselves llama.
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3": "gemma3_text"}
COUNT, POSITIVE, IDS = whole(0, 2**31), number(1e-9, 1e15), several(whole(0, 2**31))
NORMAL, UNKNOWN, CONTROL, OWN, UNUSED = range(1, 6)  # types of tokens
# Keys of an architecture that the model lacks. 0 says nothing, and the number beside a key changes nothing.
LACKING = {"final_logit_softcapping": 0, "attn_logit_softcapping": 0, "attention.scale": 0, "attention.clamp_kqv": 0,
           "logit_scale": 1, "embedding_scale": 1, "residual_scale": 1, "rope.scaling.yarn_attn_factor": 1,
           "rope.scale_linear": 1, "rope.scaling.yarn_log_multiplier": 0, "rope.scaling.yarn_ext_factor": -1}
# They end a text, if special.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<|eom_id|>",
        "<end_of_turn>")
BARE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's special tokens that do not take in the space behind them
# How a byte-level tokenizer cuts words, by its name in the file: digits at a time.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
         r"|\s+")
DIGITS = {"qwen2": "", "llama-bpe": "{1,3}"}
GPT2 = ("gpt-2", "smollm")  # by the expression of GPT-2, which the package has; smollm takes digits one by one first


class GGUF:
    """A file, opened: everything that its folder needs.

    Raises:
        UserError: the file is cut off, one of several parts, or of an architecture or tokenizer that is not supported;
            the package `gguf` is not installed.
    """

    def __init__(self, path: str | Path):
        try:
            import gguf
        except ImportError:
            raise UserError("GGUF files are read by the package gguf; install it: pip install gguf") from None
        self.path, self.package = Path(path), gguf
        check_file(self.path)
        with guarded(f"{path} is cut off, damaged, or no GGUF file"):
            reader = gguf.GGUFReader(self.path)
            self.fields = Fields({name: field.contents() for name, field in reader.fields.items()})
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        with about(self.path):
            self.kind = self.fields.get("general.architecture", TEXT)
            if self.kind not in FAMILIES:
                raise UserError(f"architecture {shown(self.kind)} is not supported; supported are "
                                f"{', '.join(FAMILIES)}")
            if (parts := self.fields.get("split.count", COUNT, 1)) > 1:
                raise UserError(f"this is one of {parts} parts; join them: llama-gguf-split --merge FIRST OUT.gguf")
            self.model = config_from_hf(self.config)

    def value(self, name: str, kind: tuple, *default):
        """A value of this architecture's own, such as `block_count`."""
        return self.fields.get(f"{self.kind}.{name}", kind, *default)

    # -- config.json ---------------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> dict:
        """config.json, without a dtype."""
        dim, heads = self.value("embedding_length", COUNT), self.value("attention.head_count", whole(1, 2**12))
        head = self.value("attention.key_length", COUNT, dim // heads)
        values = self.value("attention.value_length", COUNT, head)
        if values != head:
            raise UserError(f"keys have {head} dimensions and values {values}; they must have equally many")
        for name, neutral in LACKING.items():
            # llama.cpp's YaRN has a factor of 1, and -1 stands for that.
            if (found := self.fields.values.get(f"{self.kind}.{name}")) not in (None, int(neutral < 0), neutral):
                raise UserError(f"{self.kind}.{name} {shown(found)} is not supported; use the model's own folder")
        rows = self._tensor("token_embd.weight").shape[1]
        rotated = self.value("rope.dimension_count", COUNT, head)
        window = self.value("attention.sliding_window", COUNT, 0) or None
        kind = "mistral" if window and self.kind == "llama" else FAMILIES[self.kind]
        config = {
            "architectures": [ARCHITECTURES[kind]], "model_type": kind, "vocab_size": int(rows),
            "hidden_size": dim, "num_hidden_layers": self.value("block_count", COUNT), "num_attention_heads": heads,
            "num_key_value_heads": self.value("attention.head_count_kv", COUNT, heads), "head_dim": head,
            "intermediate_size": self.value("feed_forward_length", COUNT), "hidden_act": "silu",
            "rms_norm_eps": self.value("attention.layer_norm_rms_epsilon", POSITIVE),
            "rope_theta": self.value("rope.freq_base", POSITIVE, 10000.0),
            "max_position_embeddings": self.value("context_length", COUNT),
            "num_local_experts": self.value("expert_count", COUNT, 0) or None, "sliding_window": window,
            "sliding_window_pattern": self.value("attention.sliding_window_pattern", COUNT, None),
            "rope_local_base_freq": self.value("rope.freq_base_swa", POSITIVE, None),
            "attention_bias": self.kind == "llama" and "blk.0.attn_q.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors, **self._rope_scaling()}
        if rotated != head:
            config["partial_rotary_factor"] = rotated / head
        if self.kind == "phi3":  # which transformers reads here alone
            config["original_max_position_embeddings"] = self.value("rope.scaling.original_context_length", COUNT, None)
        if self.kind == "gemma3":  # the 27B, of 62 layers, has a scale of its own, which a file does not say
            config["query_pre_attn_scalar"] = dim // heads if config["num_hidden_layers"] == 62 else head
        return {key: value for key, value in config.items() if value is not None}

    def _rope_scaling(self) -> dict:
        factor, attention = (self.value(f"rope.scaling.{key}", POSITIVE, None) for key in ("factor", "attn_factor"))
        kind = self.value("rope.scaling.type", TEXT, "none" if factor is None else "linear")
        listed = any(name.startswith("rope_f") for name in self.tensors)
        if kind not in ("none", "longrope") if listed else attention not in (None, 1.0):
            raise UserError(f"rope.scaling.type {shown(kind)} and attn_factor {attention} are not supported "
                            f"{'with' if listed else 'without'} tensors of factors; use the model's own folder")
        original = self.value("rope.scaling.original_context_length", COUNT, None)
        scaling = {"rope_type": kind, "original_max_position_embeddings": original,
                   "factor": factor, "attention_factor": attention if listed else None,
                   "beta_fast": self.value("rope.scaling.yarn_beta_fast", POSITIVE, None),
                   "beta_slow": self.value("rope.scaling.yarn_beta_slow", POSITIVE, None)}
        if (short := self.tensors.get("rope_factors_short.weight")) is not None:
            long = self._tensor("rope_factors_long.weight")
        elif (short := self.tensors.get("rope_freqs.weight")) is not None:
            # Llama 3's scaling, already a factor for each pair: what longrope calls its factors, for all lengths.
            long = short
            scaling.update(attention_factor=1.0, original_max_position_embeddings=self.value("context_length", COUNT))
        elif kind == "none":
            return {}
        if short is not None:
            scaling.update(rope_type="longrope", factor=None, short_factor=short.data.tolist(),
                           long_factor=long.data.tolist())
        return {"rope_scaling": {key: value for key, value in scaling.items() if value is not None}}

    # -- weights -------------------------------------------------------------------------------------------------------

    def _tensor(self, name: str):
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}; download it again")
        return self.tensors[name]

    @property
    def dtype(self) -> torch.dtype:
        """That keeps the most of the file's numbers: bfloat16's range only where the file has it."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        return torch.bfloat16 if "BF16" in kinds or self.kind == "gemma3" else torch.float16

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face's name, tensor in float32), one in memory at a time."""
        architecture = next(one for one, name in self.package.MODEL_ARCH_NAMES.items() if name == self.kind)
        names, table = self.package.get_tensor_name_map(architecture, self.model.n_layer), places(self.model)
        if self.kind == "phi3":  # which stores the weights of several layers as one
            table = [name.replace(part, fused) for fused, parts in FUSED.items() for part in parts for name in table]
        theirs = {names.get_name(name, (".weight", ".bias")): name for name in table}
        for name, tensor in self.tensors.items():
            if name.startswith(("rope_freqs.", "rope_factors_")):
                continue
            if name not in theirs:
                raise UserError(f"{self.path} has a tensor {name}, which has no place in a {self.kind} model; use "
                                "the model's own folder")
            with guarded(f"{self.path}: tensor {name} cannot be widened from {tensor.tensor_type.name}"):
                wide = self.package.dequantize(tensor.data, tensor.tensor_type)
            # Shapes are listed from the fastest dimension on.
            found = torch.from_numpy(wide.copy()).view(*map(int, reversed(tensor.shape)))
            if self.kind == "llama" and (".attn_q." in name or ".attn_k." in name):  # the two of a pair lie together
                found = found.unflatten(0, (-1, self.model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            yield theirs[name], found - 1 if self.model.shifted_norms and "norm" in name else found

    # -- tokenizer -----------------------------------------------------------------------------------------------------

    def _field(self, name: str, kind: tuple, *default):
        return self.fields.get(f"tokenizer.ggml.{name}", kind, *default)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The token of each id."""
        return self._field("tokens", several(TEXT))

    @cached_property
    def types(self) -> tuple[int, ...]:
        """The type of each id."""
        return self._field("token_type", IDS, (NORMAL,) * len(self.names))

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Ids, without those that only fill up the vocabulary."""
        return {name: i for i, (name, kind) in enumerate(zip(self.names, self.types, strict=True)) if kind != UNUSED}

    def special(self) -> dict[str, str]:
        """Named special tokens."""
        keys, an_id = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}, whole(0, len(self.names) - 1)
        ids = {name: self._field(f"{key}_token_id", an_id, None) for name, key in keys.items()}
        return {f"{name}_token": self.names[i] for name, i in ids.items() if i is not None}

    def eos_ids(self) -> list[int]:
        """All tokens that end a text: the file names one, chat models have more."""
        own = (self._field(f"{name}_token_id", COUNT, None) for name in ("eos", "eot", "eom"))
        special = set(self._of_type(CONTROL))
        return sorted({i for i in own if i is not None} | {self.tokens[one] for one in ENDS if one in special})

    def _of_type(self, kind: int) -> list[str]:
        return [name for name, its in zip(self.names, self.types, strict=True) if its == kind]

    def tokenizer(self) -> tuple[Tokenizer, dict]:
        """The pipeline for tokenizer.json, and tokenizer_config.json."""
        with about(self.path), guarded("the tokenizer cannot be read"):
            kind, special = self._field("model", TEXT), self.special()
            if kind not in ("gpt2", "llama"):
                raise UserError(f"tokenizer {shown(kind)} is not supported; use BPE: gpt2 (bytes) or llama (pieces)")
            scores = () if self.kind == "gemma3" else self._field("scores", several(number(-1e30, 1e30)), ())
            ranked = dict(sorted(self.tokens.items(), key=lambda one: -scores[one[1]])) if scores else self.tokens
            backend = self._byte_level() if kind == "gpt2" else llama_pipeline(
                self.tokens, merges_of(ranked), {"add_prefix_space": self._field("add_space_prefix", FLAG, True)})
            if phi3 := self.kind == "phi3" and kind == "llama":  # behind a special token, a text begins so, too
                backend.pre_tokenizer, backend.normalizer = None, normalizers.Sequence(
                    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            backend.add_tokens([
                AddedToken(name, special=kinds != OWN, normalized=False, rstrip=phi3 and name not in BARE)
                for kinds in (UNKNOWN, CONTROL, OWN) for name in self._of_type(kinds)])
            begins = self._field("add_bos_token", FLAG, kind == "llama" or self._words == "llama-bpe")
            config = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": begins,
                      "add_eos_token": self._field("add_eos_token", FLAG, False),
                      "chat_template": self.fields.get("tokenizer.chat_template", TEXT, None)}
            surround(backend, special, config)
        return backend, {key: value for key, value in config.items() if value is not None}

    @property
    def _words(self) -> str:
        return self._field("pre", TEXT, "qwen2" if self.kind.startswith("qwen") else "none")

    def _byte_level(self) -> Tokenizer:
        words = self._words
        if words not in (*DIGITS, *GPT2):
            raise UserError(f"the pre-tokenizer, {shown(words)}, is not supported; use {', '.join([*DIGITS, *GPT2])}")
        merges = [tuple(merge.split(" ", 1)) for merge in self._field("merges", several(TEXT))]
        backend = Tokenizer(models.BPE(vocab=self.tokens, merges=merges, ignore_merges=words == "llama-bpe"))
        backend.normalizer = normalizers.NFC() if words == "qwen2" else None
        first = {"smollm": pre_tokenizers.Digits(individual_digits=True)}.get(words)
        if words in DIGITS:
            first = pre_tokenizers.Split(Regex(WORDS % DIGITS[words]), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words in GPT2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*([first] if first else []), bytes_])
        backend.decoder = decoders.ByteLevel()
        return backend
