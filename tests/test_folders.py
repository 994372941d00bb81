"""Checkpoint folders in corners: spellings of dtypes, half a cache, interrupted conversions and downloads."""

import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import build, config_json, save
from hub import Hub
from safetensors.torch import load_file

from triforce.errors import UserError
from triforce.hf import convert as converting
from triforce.hf import download as downloading
from triforce.hf.checkpoint import load_model, parse_dtype, resolve
from triforce.hf.convert import convert
from triforce.hf.vocabulary import read_sentencepiece

FILES = {"config.json": b"{}", "model.safetensors": b"0123456789"}


@pytest.fixture
def hub(monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Hub({"owner/name": FILES})
    yield server
    server.close()


@pytest.mark.parametrize("spelling", ["bfloat16", "bf16", "torch.bfloat16", torch.bfloat16])
def test_spellings_of_a_dtype(spelling):
    assert parse_dtype(spelling) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_without_a_word_the_files_own_dtype_counts(tmp_path, dtype):
    folder = save(build("Llama 1").to(dtype), {**config_json("Llama 1"), "torch_dtype": None}, tmp_path / "model")
    assert load_model(folder).dtype == dtype


def test_a_cache_that_has_no_weights_is_no_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="download it"):
        resolve("owner/name")


def test_what_a_conversion_writes_of_tied_weights(tmp_path):
    """Once, and the index knows how much it is."""
    model, config = build("Llama 3.2"), config_json("Llama 3.2")
    assert config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "pytorch_model.bin")
    out = convert(tmp_path, tmp_path / "out", max_shard_bytes=40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert "lm_head.weight" not in tensors and tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("limit, last", [(10**9, "model.safetensors"), (40_000, "model.safetensors.index.json")])
def test_what_makes_a_folder_loadable_comes_last(tmp_path, monkeypatch, limit, last):
    source = save(build("llama-68m"), config_json("llama-68m"), tmp_path / "source", "bin")
    moved, replace = [], converting.os.replace

    def note(path, target):
        if Path(target).parent == source:
            moved.append(Path(target).name)
        replace(path, target)

    monkeypatch.setattr(converting.os, "replace", note)
    convert(source, dtype="float16", max_shard_bytes=limit)
    assert moved[-1] == last and "config.json" in moved and len(moved) >= (2 if limit == 10**9 else 4)


def test_room_is_wanted_for_what_is_still_to_come(hub, tmp_path, monkeypatch):
    folder = downloading.download("owner/name", tmp_path / "out", endpoint=hub.url)
    (folder / "config.json").unlink()
    usage = namedtuple("usage", "total used free")
    for free in (1, 2):
        monkeypatch.setattr(downloading.shutil, "disk_usage", lambda path, free=free: usage(100, 100 - free, free))
        if free < len(FILES["config.json"]):
            with pytest.raises(UserError, match="make room"):
                downloading.download("owner/name", folder, endpoint=hub.url)
        else:
            downloading.download("owner/name", folder, endpoint=hub.url)
    assert (folder / "config.json").read_bytes() == FILES["config.json"]


def test_all_files_are_of_the_revision(hub, tmp_path):
    downloading.download("owner/name", tmp_path / "out", revision="v1", endpoint=hub.url)
    assert hub.fetched() == set(FILES)
    assert not any("main" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize("status, words", [(403, "is gated"), (401, "rejects the token"), (404, "does not exist"),
                                           (500, "the hub answers 500"), (None, "cannot reach the hub")])
def test_what_a_refusal_of_a_file_means(status, words, tmp_path):
    """Not each is an error of the client's own kinds: storage behind the hub refuses, too."""
    error = RuntimeError("refused")
    error.response = SimpleNamespace(status_code=status)
    assert words in str(downloading.explain(error, "owner/name", None, tmp_path))


def test_flags_of_the_download_command(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(downloading, "download", lambda *args: asked.append(args) or Path("folder"))
    assert downloading.main(["--repo-id", "a/b", "--out-dir", "c", "--revision", "v1", "--token", "hf_x"]) == 0
    assert downloading.main(["--repo_id", "a/b"]) == 0
    assert asked == [("a/b", "c", "v1", "hf_x"), ("a/b", None, None, None)]
    assert "--checkpoint folder" in capsys.readouterr().out


@pytest.mark.parametrize("kind, fits", [(1, False), (2, True), (3, False)])
def test_only_bpe_is_read_from_a_sentencepiece_model(tmp_path, kind, fits):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\x0a\x03\x0a\x01a" + b"\x12\x02\x18" + bytes([kind]))  # a piece "a"; the trainer's kind
    if fits:
        assert read_sentencepiece(path) == [("a", 1)]
    else:
        with pytest.raises(UserError, match=f"kind {kind}.*supported is kind 2"):
            read_sentencepiece(path)
