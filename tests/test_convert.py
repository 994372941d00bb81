"""convert_hf_checkpoint.py: the same tensors under the same names, in the dtype asked for, whatever the layout."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import build, config_json, save
from safetensors import safe_open

from triforce.errors import UserError
from triforce.hf import convert as module
from triforce.hf.checkpoint import load_model, read_config
from triforce.hf.convert import convert

ROOT = Path(__file__).parents[1]


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


@pytest.mark.parametrize("kind, shards", [("bin", 1), ("bin", 3), ("safetensors", 2)])
@pytest.mark.parametrize("family", ["Qwen2.5", "Llama 3.2"])
def test_same_tensors(tmp_path, family, kind, shards):
    theirs = build(family)
    source = save(theirs, config_json(family), tmp_path / "source", kind, shards)
    if (family, shards) == ("Llama 3.2", 1):  # with the tied output layer beside the embedding
        torch.save({name: one.clone() for name, one in theirs.state_dict().items()}, source / "pytorch_model.bin")
    for name in ("tokenizer.model", "generation_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text("{}")
    out = convert(source, tmp_path / "out", "bfloat16", max_shard_bytes=40_000)
    expected = {name: tensor.bfloat16() for name, tensor in theirs.state_dict().items()
                if not (name == "lm_head.weight" and family == "Llama 3.2")}
    found = tensors_of(out)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((out / "config.json").read_text()) == {**config_json(family), "torch_dtype": "bfloat16"}
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 50_000 for path in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    weight_map = index["weight_map"]
    assert weight_map.keys() == expected.keys() and set(weight_map.values()) == {path.name for path in files}
    assert {path.name for path in out.iterdir()} - set(weight_map.values()) == {
        "config.json", "generation_config.json", "tokenizer.model", "chat_template.jinja",
        "model.safetensors.index.json"}
    pairs = zip(load_model(out).parameters(), load_model(source, dtype="bf16").parameters(), strict=True)
    assert all(torch.equal(loaded, original) for loaded, original in pairs)
    with pytest.raises(UserError, match="holds safetensors already"):
        convert(source, out)


@pytest.mark.slow
def test_the_command_converts_in_place(tmp_path):
    theirs = build("llama-68m")
    source = save(theirs, config_json("llama-68m"), tmp_path / "a model", "bin", 2)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    command = [sys.executable, str(ROOT / "convert_hf_checkpoint.py"), "--checkpoint_dir", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "triforce --checkpoint" in done.stdout, done.stderr
    assert {name: (source / name).read_bytes() for name in before} == before
    assert {path.name for path in source.iterdir()} - before.keys() == {"model.safetensors"}
    found = tensors_of(source)
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "choose another --out-dir" in done.stderr


def test_shared_and_cut_tensors_and_old_buffers(tmp_path):
    """Two names for one memory, views of a larger one, transposed ones; integers keep their dtype."""
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    base = torch.arange(24.0).view(4, 6)
    state = {"a": base, "b": base, "row": base[1], "columns": base[:, :2], "turned": torch.arange(6.0).view(2, 3).T,
             "count": torch.tensor([3]), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for dtype in (None, "float16"):
        found = tensors_of(convert(tmp_path, tmp_path / str(dtype), dtype))
        assert found.keys() == state.keys() - {"model.layers.0.self_attn.rotary_emb.inv_freq"}
        assert all(torch.equal(found[name].to(state[name].dtype), state[name]) for name in found)
        assert found["count"].dtype == torch.int64


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "source", "bin")
    before = {path.name for path in source.iterdir()}

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupt)
    assert module.main(["--checkpoint-dir", str(source), "--dtype", "bf16"]) == 130
    assert {path.name for path in source.iterdir()} == before


def test_faults(tmp_path):
    with pytest.raises(UserError, match="config.json is missing"):
        convert(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        convert(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("broken")
    with pytest.raises(UserError, match="pytorch_model.bin"):
        convert(tmp_path)
    with pytest.raises(UserError, match="'int3' is unknown"):
        convert(tmp_path, dtype="int3")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        convert(tmp_path, tmp_path / "file")


@pytest.mark.parametrize("limit, last", [(10**9, "model.safetensors"), (40_000, "model.safetensors.index.json")])
def test_what_makes_a_folder_loadable_comes_last(tmp_path, monkeypatch, limit, last):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "source", "bin")
    moved, replace = [], module.os.replace

    def note(path, target):
        if Path(target).parent == source:
            moved.append(Path(target).name)
        replace(path, target)

    monkeypatch.setattr(module.os, "replace", note)
    convert(source, dtype="float16", max_shard_bytes=limit)
    assert moved[-1] == last and "config.json" in moved and len(moved) >= (2 if limit == 10**9 else 4)


def test_texts_of_a_folder_are_copied_and_links_that_leave_it_are_not(tmp_path):
    source = save(build("llama-68m"), {**config_json("llama-68m"), "dtype": "float32"}, tmp_path / "source", "bin")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tool_use.jinja").write_text("x")
    (source / "LICENSE").symlink_to("config.json")
    out = convert(source, tmp_path / "out", "float16")
    assert (out / "additional_chat_templates/tool_use.jinja").read_text() == "x" and (out / "LICENSE").is_file()
    assert read_config(out).dtype == "float16"  # both of its spellings
    (tmp_path / "secret").write_text("{}")
    (source / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="tokenizer_config.json is a link to .*secret, outside of the checkpoint"):
        convert(source, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
    (source / "tokenizer_config.json").unlink()
    cached = tmp_path / "cache/models--a--b"  # all of whose files are links, into blobs
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "blobs").mkdir()
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, cached / "blobs" / path.name)
            (cached / "snapshots/abc" / path.name).symlink_to(Path("../../blobs") / path.name)
    assert load_model(convert(cached / "snapshots/abc", tmp_path / "of a cache"))
