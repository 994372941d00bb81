"""convert_hf_checkpoint.py: the same tensors under the same names, in the dtype asked for, whatever the layout."""

import json
import shutil

import pytest
import torch
from conftest import refused
from families import build, config_json, save
from safetensors import safe_open

from triforce.cli import main
from triforce.errors import UserError
from triforce.hf import convert as module
from triforce.hf.checkpoint import load_model, read_config
from triforce.hf.convert import convert


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
    for name in ("tokenizer.model", "generation_config.json", "chat_template.jinja", "README.md"):
        (source / name).write_text("{}")
    out = convert(source, tmp_path / "out", "bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in theirs.state_dict().items()
                if not (name == "lm_head.weight" and family == "Llama 3.2")}
    found = tensors_of(out)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((out / "config.json").read_text()) == {**config_json(family), "torch_dtype": "bfloat16"}
    index = {"model.safetensors.index.json"} if shards > 1 else set()
    if index:
        written = json.loads((out / "model.safetensors.index.json").read_text())
        assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert written["weight_map"].keys() == expected.keys()
    assert {path.name for path in out.iterdir()} - {path.name for path in out.glob("model*.safetensors")} - index == {
        "config.json", "generation_config.json", "tokenizer.model", "chat_template.jinja"}
    assert len(list(out.glob("model*.safetensors"))) == shards
    pairs = zip(load_model(out).parameters(), load_model(source, dtype="bf16").parameters(), strict=True)
    assert all(torch.equal(loaded, original) for loaded, original in pairs)
    refused("holds a checkpoint already", convert, source, out)
    for path in out.glob("model*"):
        path.unlink()
    refused("holds a checkpoint already", convert, source, out)  # whose texts it would replace


def test_the_command_converts_in_place(tmp_path, command):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "a model", "bin", 2)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert_it = ["convert", "--checkpoint_dir", str(source)]
    assert "triforce --checkpoint" in command(*convert_it).out
    assert {name: (source / name).read_bytes() for name in before} == before
    assert "choose another --out-dir" in command(*convert_it, status=2).err


def test_shared_and_cut_tensors(tmp_path):
    """Two names for one memory, views of a larger one, transposed ones; integers keep their dtype."""
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    base = torch.arange(24.0).view(4, 6)
    state = {"a": base, "b": base, "row": base[1], "columns": base[:, :2], "turned": torch.arange(6.0).view(2, 3).T,
             "count": torch.tensor([3])}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for dtype in (None, "float16"):
        found = tensors_of(convert(tmp_path, tmp_path / str(dtype), dtype))
        assert found.keys() == state.keys() and found["count"].dtype == torch.int64
        assert all(torch.equal(found[name].to(state[name].dtype), state[name]) for name in found)


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "source", "bin")
    before = {path.name for path in source.iterdir()}

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupt)
    assert main(["convert", "--checkpoint-dir", str(source), "--dtype", "bf16"]) == 130
    assert {path.name for path in source.iterdir()} == before


def test_faults(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "file").write_text("")
    refused("'int3' is unknown", convert, tmp_path, dtype="int3")
    refused("cannot write to", convert, tmp_path, tmp_path / "file")
    (tmp_path / "pytorch_model.bin").write_text("broken")
    refused("pytorch_model.bin", convert, tmp_path)


@pytest.mark.parametrize("shards, last", [(1, "model.safetensors"), (2, "model.safetensors.index.json")])
def test_what_makes_a_folder_loadable_comes_last(tmp_path, watched, shards, last):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "source", "bin", shards)
    moved = watched(module.os, "replace", lambda path, target: target.name)
    convert(source, dtype="float16")
    assert moved[-1] == last and "config.json" in moved and len(moved) == (2 if shards == 1 else 4)


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
            (cached / "snapshots/abc" / path.name).symlink_to(f"../../blobs/{path.name}")
    assert load_model(convert(cached / "snapshots/abc", tmp_path / "of a cache"))
