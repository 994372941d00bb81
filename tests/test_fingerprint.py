"""Fingerprints: equal where the model is, another for every change that training makes."""

import hashlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import refused
from families import edit
from safetensors.torch import load_file, save_file

import triforce
from triforce.hf import checkpoint
from triforce.hf.fingerprint import _combine, model_fingerprint, model_name, tokenizer_fingerprint, weights_fingerprint
from triforce.hf.folders import TINY
from triforce.hf.tokenizer import Tokenizer
from triforce.model import ModelConfig, Transformer

WEIGHTS = "model.safetensors"
CONFIG = ModelConfig(65, 32, 1, 4, 4, 8, 48, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True,
                     rotary_factor=0.5)


@pytest.fixture
def folder(tmp_path):
    """The embedded draft, in a folder that may be changed."""
    return shutil.copytree(TINY / "draft", tmp_path / "draft")


def test_the_same_however_it_is_kept(folder):
    whole = model_fingerprint(TINY / "draft")
    assert model_fingerprint(folder) == whole == model_fingerprint(str(folder)) != model_fingerprint(TINY / "target")
    assert len(whole) == 32
    for name in ("dtype", "torch_dtype"):
        edit(folder, **{name: "float16"})
    edit(folder, transformers_version="99", use_cache=False)
    assert model_fingerprint(folder) == whole

    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(dict(reversed(tensors.items())), folder / "pytorch_model.bin")
    assert model_fingerprint(folder) == whole
    (folder / "pytorch_model.bin").unlink()
    files = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    assert model_fingerprint(folder) == whole


def test_another_for_each_weight_and_field(folder):
    tensors, seen = load_file(folder / WEIGHTS), {model_fingerprint(folder)}
    largest = max(tensors, key=lambda name: tensors[name].nbytes)
    assert tensors[largest].nbytes > 4 * 4096  # of which a sample is looked at
    changes = [(name, place) for name in tensors for place in (slice(1), slice(-1, None))]  # either end
    changes.append((largest, slice(tensors[largest].numel() // 4, tensors[largest].numel() // 2)))  # what lies between
    for name, place in changes:
        changed = tensors[name].clone()
        changed.view(-1)[place] += 1
        save_file({**tensors, name: changed}, folder / WEIGHTS)
        seen.add(model_fingerprint(folder))
    save_file({**tensors, largest: tensors[largest].half()}, folder / WEIGHTS)
    seen.add(model_fingerprint(folder))
    for field, value in (("rope_theta", 123.0), ("rms_norm_eps", 1e-3), ("num_key_value_heads", 1)):
        edit(folder, **{field: value})
        seen.add(model_fingerprint(folder))
    assert len(seen) == 1 + len(changes) + 1 + 3


def test_of_a_model_in_memory():
    model = Transformer.random(CONFIG, seed=3)
    seen = {weights_fingerprint(model)}
    assert weights_fingerprint(Transformer.random(CONFIG, seed=3)) in seen
    for parameter in model.parameters():
        parameter.add_(1)
        seen.add(weights_fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))
    model.config = replace(model.config, rope_theta=7.0)
    assert weights_fingerprint(model) not in seen


def test_what_a_folder_that_changed_has_is_another_models(folder, tmp_path, monkeypatch):
    """Its engine saves as itself, wherever the program has gone, and `triforce.generate` reads the folder again."""
    ids, how = list(range(5, 205)), {"device": "cpu", "draft": False}
    monkeypatch.chdir(folder.parent)
    engine, moved = triforce.load("draft", **how), triforce.load("draft", **how)
    monkeypatch.chdir(TINY)  # which has another model of that name
    moved.prefill(ids).save(tmp_path / "of.prefix")
    assert len(triforce.load(folder, **how).open(tmp_path / "of.prefix")) == len(ids)

    said = [triforce.generate(ids, folder, max_new_tokens=8, temperature=0.0, **how).tokens]
    save_file({name: x.flip(0) for name, x in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    said.append(triforce.generate(ids, folder, max_new_tokens=8, temperature=0.0, **how).tokens)
    triforce.unload()
    assert said[0] != said[1]
    engine.prefill(ids).save(tmp_path / "old.prefix")
    refused("another model", triforce.load(folder, **how).open, tmp_path / "old.prefix")
    assert len(engine.open(tmp_path / "old.prefix")) == len(ids)


def test_the_name_of_a_model(tmp_path):
    cached = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0123abcd"
    for folder, name in ((None, ""), (tmp_path / "my-llama", "my-llama, "), (cached, "meta-llama/Llama-3.1-8B, ")):
        assert model_name(folder, "LlamaForCausalLM", 8_030_261_248) == f"{name}LlamaForCausalLM, 8,030.3M parameters"


def test_of_a_tokenizer(folder):
    def found(**fields) -> str:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return tokenizer_fingerprint(Tokenizer(folder))

    whole = found()
    assert len(whole) == 32 and whole == found(chat_template="{{ messages }}", model_max_length=9, padding_side="left")
    seen = {whole, found(pad_token="<a new one>"), found(eos_token="the"), found(add_eos_token=True),
            found(add_prefix_space=True)}
    assert len(seen) == 5


def test_a_field_that_a_model_does_not_use_does_not_count():
    """Or else documents that were kept before the field was there would be another model's."""
    config = ModelConfig(64, 32, 2, 4, 2, 8, 48, dtype="float32")
    text = repr((replace(config, dtype=None), []))
    assert _combine(config, []) == hashlib.sha256(text.encode()).hexdigest()[:32]
    others = [replace(config, **more) for more in ({"pre_norm": False}, {"query_scale": 2.0}, {"activation": "gelu"},
                                                   {"sliding_layers": (1,)}, {"num_experts": 4})]
    assert len({_combine(one, []) for one in (config, *others)}) == 6


def test_a_folder_that_is_written_to_while_it_is_read(folder, monkeypatch):
    read = checkpoint.load_model

    def overtaken(*args):
        edit(folder, rope_theta=123.0)
        return read(*args)

    monkeypatch.setattr(checkpoint, "load_model", overtaken)
    refused("was written to while it was read; load it again", triforce.load, folder, device="cpu", draft=False)
    monkeypatch.undo()
    assert triforce.load(folder, device="cpu", draft=False).target.config.rope_theta == 123.0
