"""Where the commands begin."""

import os

import pytest

from triforce import memory, start
from triforce.start import ALLOCATOR, GROWING


@pytest.mark.parametrize("before,expected", [({}, GROWING), ({ALLOCATOR: "backend:native"}, "backend:native"),
                                             ({"WORLD_SIZE": "2"}, None)])
def test_segments_of_memory_grow(monkeypatch, before, expected):
    """Unless the user says otherwise, or there are several ranks; and whoever runs out of memory is told of it."""
    for name in (ALLOCATOR, "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        start.main(["--version"])
    assert os.environ.get(ALLOCATOR) == expected
    assert (f"set {ALLOCATOR}={GROWING}" in memory.remedy_of_scatter()) == (expected != GROWING)
