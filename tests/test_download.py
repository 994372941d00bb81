"""download.py with the real client against a stand-in of the hub: which files come, the token, and every refusal. Needs
no network."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, python, refused
from families import build, config_json, save
from hub import Hub
from huggingface_hub import HfApi

from triforce.hf import checkpoint, download
from triforce.hf.folders import resolve

TEXTS = dict.fromkeys((
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "merges.txt",
    "vocab.json", "LICENSE"), b"{}")
OTHERS = dict.fromkeys((
    ".gitattributes", "README.md", "consolidated.00.pth", "consolidated.safetensors", "original/consolidated.00.pth",
    "original/params.json", "model.Q4_K_M.gguf", "onnx/model.onnx", "onnx/config.json", "modeling_other.py",
    "training_args.bin", "flax_model.msgpack", "tf_model.h5", "model.fp16.safetensors", "optimizer.bin",
    "adapter_model.safetensors", "figure.png"), b"x")
SAFETENSORS = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2",
               "model.safetensors.index.json": b"{}"}
BIN = {"pytorch_model-00001-of-00002.bin": b"1", "pytorch_model-00002-of-00002.bin": b"2",
       "pytorch_model.bin.index.json": b"{}"}
FILES = {"config.json": b"{}", "model.safetensors": b"0123456789"}


@pytest.fixture
def hub(monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Hub({"owner/both": TEXTS | OTHERS | SAFETENSORS | BIN, "owner/bin": TEXTS | OTHERS | BIN,
                  "owner/none": {"README.md": b"x", "model.gguf": b"x"}, "owner/name": FILES})
    yield server
    server.close()


def test_which_files_are_needed():
    both = {"model.safetensors": b"", **SAFETENSORS, **TEXTS}
    assert set(download.needed(both)) == {"model.safetensors", *TEXTS}
    assert set(download.needed({"pytorch_model.bin", "config.json"})) == {"pytorch_model.bin", "config.json"}
    assert download.needed(TEXTS | OTHERS) == []


@pytest.mark.parametrize("repo_id, files", [("owner/both", TEXTS | SAFETENSORS), ("owner/bin", TEXTS | BIN)])
def test_only_needed_files_come(hub, tmp_path, repo_id, files):
    folder = download.download(repo_id, tmp_path / "out", "v1", "hf_right", hub.url)
    assert hub.fetched() == set(files) and hub.tokens(repo_id) == {"hf_right"}
    assert not any("main" in path for _, path, _ in hub.requests)  # all files are of the revision
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {name: content for name, content in found.items() if not name.startswith(".cache")} == files
    hub.requests.clear()
    download.download(repo_id, folder, "v1", endpoint=hub.url)
    assert hub.fetched() == set()  # nothing twice


def test_the_command(hub, tmp_path):
    """As a user runs it: HF_ENDPOINT and HF_TOKEN from the environment, out of reach of this process."""
    theirs = build("llama-68m")
    source = save(theirs, config_json("llama-68m"), tmp_path / "source", "bin")
    hub.repositories["owner/private"] = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.private.add("owner/private")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    ask = [ROOT / "download.py", "--repo_id", "owner/private"]
    done = python(*ask, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: cannot download owner/private: 401")
    done = python(*ask, cwd=tmp_path, env={**environment, "HF_TOKEN": "hf_right"})
    assert done.returncode == 0, done.stderr
    assert "triforce --checkpoint owner/private" in done.stdout
    assert hub.tokens("owner/private") == {None, "hf_right"}
    checkpoint.load_model(tmp_path / "checkpoints/owner/private")


def refusal(hub, folder, repo_id="owner/bin", **options) -> str:
    return refused("", download.download, repo_id, folder, **{"endpoint": hub.url, **options})


def test_refusals(hub, tmp_path):
    for name in ("bin", "../bin", "owner/..", "owner/.", "/owner/bin", "owner/bin/x", "owner/bin\n", "o/" + "x" * 300):
        assert "not of the form owner/name" in refusal(hub, None, name)
    assert "401" in refusal(hub, tmp_path, "owner/absent")
    assert "404" in refusal(hub, tmp_path, "owner/absent", token="hf_right")
    assert "no weights in safetensors or .bin (2 other files)" in refusal(hub, tmp_path, "owner/none")
    assert "--revision" in refusal(hub, tmp_path, revision="v9")
    hub.gated.add("owner/bin")
    assert "accept its terms" in refusal(hub, tmp_path, token="hf_right")
    (tmp_path / "file").write_text("")
    told = refusal(hub, tmp_path / "file", "owner/name")  # as the disk tells it on the way
    assert "File exists" in told and "room on the disk" in told


def test_a_download_is_complete_when_it_was_finished(hub, tmp_path, monkeypatch):
    """One small file fails, and nobody takes what came for a checkpoint."""
    monkeypatch.chdir(tmp_path)
    hub.refused.add("tokenizer_config.json")
    refusal(hub, None, "owner/both")
    assert (tmp_path / "checkpoints/owner/both").is_dir()
    for name in ("owner/both", "checkpoints/owner/both"):
        refused("was not finished; run it again: triforce download --repo-id owner/both", resolve, name)
    hub.refused.clear()
    download.download("owner/both", endpoint=hub.url)
    assert resolve("owner/both").name == "both" and (resolve("owner/both") / "tokenizer_config.json").exists()


def test_a_cache_that_knows_of_a_file_that_did_not_come_is_no_checkpoint(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.repositories["owner/name"] = {**FILES, "tokenizer.json": b"{}", "README.md": b"x"}
    cached = Path(HfApi(endpoint=hub.url).snapshot_download("owner/name", ignore_patterns="README.md"))
    assert resolve("owner/name") == cached  # what is not read need not be there
    (cached / "tokenizer.json").unlink()
    refused("download it: triforce download --repo-id owner/name", resolve, "owner/name")


def test_what_the_client_calls_done_is_looked_at(hub, tmp_path, monkeypatch):
    """Where its network fails it gives back the folder as it is."""
    monkeypatch.setattr("huggingface_hub.HfApi.snapshot_download", lambda *args, **kwargs: None)
    for content in (None, b"half"):
        if content is not None:
            (tmp_path / "config.json").write_bytes(b"{}")
            (tmp_path / "model.safetensors").write_bytes(content)
        assert "did not come whole" in refusal(hub, tmp_path, "owner/name")
        refused("was not finished", resolve, tmp_path)


def test_names_that_are_patterns(hub, tmp_path):
    hub.repositories["owner/odd"] = {**FILES, "*.json": b"1", "[ab].json": b"2", "onnx/config.json": b"3"}
    folder = download.download("owner/odd", tmp_path, endpoint=hub.url)
    assert hub.fetched() == {*FILES, "%2A.json", "%5Bab%5D.json"} and (folder / "[ab].json").read_bytes() == b"2"


def test_an_interrupt_ends_it_within_a_second(hub, tmp_path):
    """While a file comes slowly. Files that came whole stay, and the next try removes the part."""
    hub.slow.add("model.safetensors")
    command = [sys.executable, str(ROOT / "download.py"), "--repo-id", "owner/name", "--out-dir", str(tmp_path / "out")]
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    parts = tmp_path / "out/.cache/huggingface/download"
    begun = time.monotonic()
    while not (list(parts.rglob("*.incomplete")) and (tmp_path / "out/config.json").exists()):
        assert time.monotonic() - begun < 60 and process.poll() is None
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - begun < 1
    assert process.returncode == 130 and "interrupted; run the same command again" in said and "Traceback" not in said
    assert (tmp_path / "out/config.json").exists()
    refused("was not finished", resolve, tmp_path / "out")
    hub.slow.clear()
    folder = download.download("owner/name", tmp_path / "out", endpoint=hub.url)
    assert resolve(folder) == folder and not list(parts.rglob("*.incomplete"))


def test_a_token_is_never_printed(hub, tmp_path):
    hub.private.add("owner/bin")
    download.download("owner/bin", tmp_path, token=" hf_right\r\n", endpoint=hub.url)
    assert hub.tokens("owner/bin") == {"hf_right"}
    for token in ("hf_wrong", "hf_secr\ncret", "hf_se cret", "hf_secr\u00e9t", "hf_se\x00cret"):
        said = refusal(hub, tmp_path, token=token)
        assert "hf_" not in said.replace("HF_TOKEN", "") and "cret" not in said


def test_no_network(hub, tmp_path):
    hub.close()
    assert "check the network" in refusal(hub, tmp_path)
