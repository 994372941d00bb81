"""Where the commands begin."""

import os

import pytest

from triforce import memory, start
from triforce.start import ALLOCATOR, ALLOCATORS, GROWING


@pytest.mark.parametrize("before,expected,advice", [
    ({}, GROWING, ""), ({"WORLD_SIZE": "2"}, None, f"set {ALLOCATOR}={GROWING} before"),
    ({ALLOCATOR: "backend:native"}, "backend:native", f"set {ALLOCATOR}=backend:native,{GROWING} before"),
    ({ALLOCATOR: "expandable_segments:False"}, "expandable_segments:False", f"set {ALLOCATOR}="),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None, f"set PYTORCH_ALLOC_CONF=max_split_size_mb:64,{GROWING} "),
    ({"PYTORCH_ALLOC_CONF": GROWING}, None, "")])
def test_segments_of_memory_grow(monkeypatch, before, expected, advice):
    """Unless the user says otherwise, or there are several ranks; and whoever runs out of memory is told of it."""
    for name in (*ALLOCATORS, "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        start.main(["--version"])
    assert os.environ.get(ALLOCATOR) == expected
    assert advice in memory.remedy_of_scatter() and bool(advice) == bool(memory.remedy_of_scatter())
