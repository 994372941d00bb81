"""JSON and values of strangers: read or refused, by kind and range."""

import os

import pytest
from conftest import refused

from triforce.hf.checkpoint import generation_defaults
from triforce.hf.files import FLAG, LFS, TEXT, Fields, number, read_json, several, whole


@pytest.mark.parametrize("text, words", [
    ("[" * 100_000, "cannot be read"), ('{"a": ' + "9" * 5000 + "}", "cannot"), ("[1]", "no JSON object"),
    ("\ufeff{}", "cannot be read"), (LFS.decode() + "v1\noid sha256:0\nsize 9\n", "pointer of Git LFS")])
def test_broken_json(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert str(path) in refused(words, read_json, path)


def test_what_is_no_file_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for name in ("pipe", "device", "nowhere", "."):
        refused("no regular file", read_json, tmp_path / name)


@pytest.mark.parametrize("kind, wrong", [
    (whole(1, 9), (0, 10, 1.5, "5", True, [], float("nan"), float("inf"), 10**400)),
    (number(0.5, 9), (0, 10, "5", True, {}, float("nan"), float("-inf"), -10**400)),
    (FLAG, (2, "true", [])), (TEXT, (1, ["a"], True)), (several(TEXT), ("ab", [1], {})),
    (several(number(1, 9)), ("ab", [1, "2"], {}, [0], [float("nan")]))])
def test_kinds_and_ranges(kind, wrong):
    for value in wrong:
        refused("x is .*, and must be", Fields({"x": value}).get, "x", kind)
    refused("x is missing, and must be", Fields({"x": None}).get, "x", kind)
    assert Fields({"x": None}).get("x", kind, 7) == Fields({}).get("x", kind, 7) == 7


@pytest.mark.parametrize("text, found", [
    ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}', {"temperature": 0.6, "top_p": 0.9}),
    ('{"temperature": 1, "top_k": 20, "min_p": 0.0, "top_p": null}', {"temperature": 1.0, "top_k": 20, "min_p": 0.0}),
    ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}), ("{}", {}),
    ('{"do_sample": true, "top_k": 64}', {"temperature": 1.0, "top_p": 1.0, "top_k": 64}),
    *((text, None) for text in ('{"temperature": -1}', '{"temperature": NaN}', '{"top_p": 1.1}',
                                '{"top_k": 1.5}', '{"min_p": 1}', '{"do_sample": "no", "top_p": 0.5}'))])
def test_sampling_values_of_a_checkpoint(tmp_path, text, found):
    assert generation_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(text)
    if found is None:
        refused("generation_config.json: .* must be", generation_defaults, tmp_path)
    else:
        assert generation_defaults(tmp_path) == found


def test_what_a_checkpoint_asks_for_in_vain_is_told(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text(
        '{"repetition_penalty": 1.05, "no_repeat_ngram_size": 0, "num_beams": 1, "guidance_scale": 1.0, '
        '"max_time": 2.5, "suppress_tokens": [7], "min_new_tokens": 1}')
    assert generation_defaults(tmp_path) == {}
    said = "asks for repetition_penalty 1.05, max_time 2.5, min_new_tokens 1, suppress_tokens [7], which no text"
    assert said in caplog.text
