"""Configurations and tokenizers of strangers, drawn from a seed: read, or refused in one line, at once and in little
memory."""

import copy
import json
import random
import resource
import shutil
import time

from families import FAMILIES, config_json
from tokenizer_folders import LLAMA3_TEMPLATE, byte_level_folder, llama_json_folder, sentencepiece_folder, write_json

from triforce.errors import UserError
from triforce.hf.checkpoint import eos_token_ids, generation_defaults, read_config
from triforce.hf.names import places
from triforce.hf.tokenizer import Tokenizer
from triforce.model import RotaryEmbedding

ODD = [None, True, False, 0, 1, -1, 2, 7, 10**9, 10**12, 10**400, 0.0, 0.5, -0.5, 1e-300, 1e300, float("nan"),
       float("inf"), "", "x", "64", "\ud800", "\x1b[2J\n", "../x", "<s>", [], [0], ["a"], [[]], {}, {"a": 1},
       {"content": "<s>"}, {"type": "yarn"}, "yarn", "longrope", "llama3", ["full_attention"], [1e9] * 8]
MORE = ["rope_scaling", "rope_parameters", "quantization_config", "head_dim", "layer_types", "sliding_window", "dtype",
        "partial_rotary_factor", "dual_chunk_attention_config", "original_max_position_embeddings", "num_experts"]


def spots(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for key, child in children:
        yield from spots(child, (*path, key))


def mutated(rng, content, more=()):
    """A copy with one to three values replaced, removed, or added."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.randint(1, 3)):
        if more and rng.random() < 0.3:
            content[rng.choice(more)] = copy.deepcopy(rng.choice(ODD))
            continue
        *way, last = rng.choice([path for path in spots(content) if path])
        inner = content
        for key in way:
            inner = inner[key]
        if rng.random() < 0.2:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(ODD))
        if not content:
            break
    return content


def survives(attempt) -> bool:
    """Whether it is done; a refusal is one line."""
    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        attempt()
        done = True
    except UserError as error:
        assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 2000
        str(error).encode()
        done = False
    assert time.process_time() - begun < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    return done


def test_300_configurations(tmp_path):
    rng, done = random.Random(0), 0
    for i in range(300):
        config = mutated(rng, config_json(rng.choice(list(FAMILIES))), MORE)
        if i % 3 == 0:
            config["rope_scaling"] = mutated(rng, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32,
                                                   "original_max_position_embeddings": 32})
        (tmp_path / "config.json").write_text(json.dumps(config))
        sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True, "eos_token_id": [1, 2]}
        (tmp_path / "generation_config.json").write_text(json.dumps(mutated(rng, sampling)))

        def read():
            config = read_config(tmp_path)
            places(config)
            RotaryEmbedding(config)

        done += survives(read)
        survives(lambda: (generation_defaults(tmp_path), eos_token_ids(tmp_path)))
    assert 15 < done < 285


def test_60_tokenizers(tmp_path):
    llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>",
             "legacy": True, "chat_template": LLAMA3_TEMPLATE, "extra_special_tokens": {"image_token": "<i>"}}
    by_id = {"480": {"content": "<extra>", "special": False}}
    sources = [sentencepiece_folder(tmp_path / "sp", {**llama, "added_tokens_decoder": by_id}),
               llama_json_folder(tmp_path / "json", sentencepiece_folder(tmp_path / "again", llama), llama),
               byte_level_folder(tmp_path / "bytes", None, ["<|a|>"], "llama", {
                   "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|a|>",
                   "chat_template": [{"name": "default", "template": LLAMA3_TEMPLATE}]})]
    rng, done = random.Random(0), 0
    for i in range(60):
        folder = tmp_path / str(i)
        shutil.copytree(rng.choice(sources), folder)
        write_json(folder / "special_tokens_map.json", {"bos_token": "<s>", "pad_token": {"content": "<p>"}})
        write_json(folder / "added_tokens.json", {"<p>": 481})
        path = rng.choice([path for path in sorted(folder.iterdir()) if path.name != "config.json"])
        if path.suffix == ".model":
            content = bytearray(path.read_bytes())
            for _ in range(rng.randint(1, 20)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            path.write_bytes(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        else:
            path.write_text(json.dumps(mutated(rng, json.loads(path.read_text()))))

        def use(folder=folder):
            tokenizer = Tokenizer(folder)
            ids = tokenizer.encode("Hello <s> 日本 world\n") + tokenizer.apply_chat_template(
                [{"role": "user", "content": "hi"}])
            tokenizer.decode(ids)
            assert tokenizer.same_as(tokenizer) is None
            tokenizer.decode(range(300))

        done += survives(use)
    assert 10 < done < 55
