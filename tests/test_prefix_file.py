"""Prefix files: what is written comes back to the bit, on any number of ranks, or is refused with one line."""

import errno
import itertools
import json
import os
import random
import shutil
import signal
import struct
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from conftest import refused
from safetensors import safe_open
from safetensors.torch import save_file

from triforce.engine.prompt_cache_file import DTYPES, MAGIC, Layout, PrefixReader, write
from triforce.errors import UserError
from triforce.parallel import Group

CPU = torch.device("cpu")
LAYERS, HEADS, LENGTH, DIM = 3, 4, 37, 8
ABOUT = {"model": "feed", "dtype": "float32", "note": "Ünïcode"}
TOKENS = [5, 2**31 - 1, 0, *range(100)]
ALL = range(HEADS)


def layers(seed: int = 0, dtype=torch.float32, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, length, DIM, generator=generator).to(dtype) for _ in range(LAYERS)]


def save(path, kv, *, tokens=TOKENS, about=ABOUT, heads=ALL, group=None, source=None) -> None:
    length, dtype = kv[0].shape[2], {dtype: name for name, dtype in DTYPES.items()}[kv[0].dtype]
    write(path, Layout(len(tokens), LAYERS, HEADS, length, DIM, dtype), about, tokens,
          source or (lambda i: kv[i][:, heads.start : heads.stop]), heads, group)


def load(path, heads=ALL, group=None, dtype=None) -> list[torch.Tensor]:
    with PrefixReader(path) as file:
        shape = (2, len(heads), file.layout.length, DIM)
        kv = [torch.full(shape, 7, dtype=dtype or DTYPES[file.layout.dtype]) for _ in range(LAYERS)]
        file.fill(lambda i: (kv[i][0], kv[i][1]), heads, CPU, group)
    return kv


def same(a, b) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp") and path.stat().st_size]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "moby-dick.prefix"
    save(path, layers())
    return path


@pytest.mark.parametrize("dtype, length", [(torch.float32, LENGTH), (torch.float16, 32), (torch.bfloat16, 1),
                                           (torch.float32, 0)])
def test_bits_come_back(tmp_path, dtype, length):
    path, kv = tmp_path / "a.prefix", layers(dtype=dtype, length=length)
    save(path, kv)
    assert same(load(path), kv)
    assert same(load(path, range(1, 3)), [layer[:, 1:3] for layer in kv])
    with PrefixReader(path) as file:
        assert (file.about, file.tokens, DTYPES[file.layout.dtype]) == (ABOUT, TOKENS, dtype)
        assert file.layout == Layout(len(TOKENS), LAYERS, HEADS, length, DIM, file.layout.dtype)
    assert os.listdir(tmp_path) == ["a.prefix"]


def test_others_read_it_as_safetensors(saved):
    with safe_open(saved, framework="pt") as file:
        assert len(file.keys()) == 2 + 2 * LAYERS * HEADS
        assert json.loads(file.metadata()["about"]) == ABOUT and file.metadata()["version"] == "3"
        assert file.get_tensor("tokens").dtype == torch.int32 and file.get_tensor("tokens").tolist() == TOKENS
        found = [torch.stack([torch.stack([file.get_tensor(f"{half}.{i}.{head}") for head in ALL]) for half in "kv"])
                 for i in range(LAYERS)]
    assert same(found, layers())


def test_tensors_of_any_strides_and_dtype(saved):
    kv = layers()
    with PrefixReader(saved) as file:
        beside = [torch.full((2, LENGTH + 3, HEADS, DIM), 7.0) for _ in range(LAYERS)]  # as offloaded layers lie
        file.fill(lambda i: tuple(beside[i].transpose(1, 2)), ALL, CPU)
    apart = [x.transpose(1, 2)[:, :, :LENGTH] for x in beside]
    assert same(apart, kv) and all((x[:, LENGTH:] == 7).all() for x in beside)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert same(load(saved, dtype=dtype), [x.to(dtype) for x in kv])
    save(saved, kv, source=lambda i: apart[i].double())
    assert same(load(saved), kv)


def test_a_reader_keeps_what_it_opened(saved):
    new = layers(seed=1)
    with PrefixReader(saved) as file:
        save(saved, new)
        old = [torch.empty(2, HEADS, LENGTH, DIM) for _ in range(LAYERS)]
        file.fill(lambda i: (old[i][0], old[i][1]), ALL, CPU)
    assert same(old, layers()) and same(load(saved), new)


def test_a_link_stays_one_and_modes_are_the_users(saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(saved)
    before = os.umask(0o027)
    try:
        save(link, layers(seed=1))
    finally:
        os.umask(before)
    assert link.is_symlink() and same(load(saved), layers(seed=1))
    assert saved.stat().st_mode & 0o777 == 0o640


def rank(index: int, count: int, folder: Path, function) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks{count}", rank=index, world_size=count)
    function(Group(index, count, dist.group.WORLD.group_name), folder)
    dist.destroy_process_group()


def what_ranks_do(group: Group, folder: Path) -> None:
    kv, share = layers(), HEADS // group.size
    heads = range(group.rank * share, (group.rank + 1) * share)
    found = load(folder / "one.prefix", heads, group)
    assert same(found, [x[:, heads.start : heads.stop] for x in kv])
    save(folder / f"{group.size}.prefix", kv if group.rank else layers(), heads=heads, group=group)

    def fails(i):
        if group.rank == group.size - 1 and i == 1:
            raise MemoryError("no memory")
        return kv[i][:, heads.start : heads.stop]

    with pytest.raises(MemoryError if group.rank == group.size - 1 else RuntimeError, match="no memory"):
        save(folder / f"{group.size}.prefix", kv, heads=heads, group=group, source=fails)
    refused("there is no folder", save, folder / "absent" / "a", kv, heads=heads, group=group)
    with pytest.raises(UserError, match=f"k.2.{HEADS - 1} differs"):  # which the last rank reads
        load(folder / "altered.prefix", heads, group)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_share_a_file(tmp_path, count):
    path = tmp_path / "one.prefix"
    save(path, layers())
    altered = bytearray(path.read_bytes())
    altered[len(altered) - 4 * len(TOKENS) - HEADS * LENGTH * DIM * 4 - 1] ^= 1  # the last of the last layer's keys
    (tmp_path / "altered.prefix").write_bytes(altered)
    processes.start_processes(rank, (count, tmp_path, what_ranks_do), nprocs=count, start_method="fork")
    assert (tmp_path / f"{count}.prefix").read_bytes() == path.read_bytes()
    assert leftovers(tmp_path) == []


def unreadable(path, match: str) -> None:
    assert ";" in refused(match, load, path)


def test_a_changed_byte_anywhere_is_noticed(saved):
    whole = saved.read_bytes()
    start, half = 8 + struct.unpack("<Q", whole[:8])[0] + 8 * (2 * LAYERS * HEADS + 2), HEADS * LENGTH * DIM * 4
    places = [*range(0, 8), *range(8, start, 61), start - 1, len(whole) - 4 * len(TOKENS), len(whole) - 1]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        saved.write_bytes(changed)
        unreadable(saved, "altered|version|no prefix file")
    for i, h, at in itertools.product(range(LAYERS), range(2), (0, half - 1)):
        changed = bytearray(whole)
        changed[start + (2 * i + h) * half + at] ^= 1
        saved.write_bytes(changed)
        unreadable(saved, f"altered: {'kv'[h]}.{i}.{at * HEADS // half} differs")


def test_a_truncated_file_is_refused(saved):
    whole = saved.read_bytes()
    for length in (0, 8, *range(9, 80, 7), 100, *range(4000, len(whole), 997), len(whole) - 1):
        saved.write_bytes(whole[:length])
        unreadable(saved, "no prefix file" if length <= 8 else "truncated or altered")
    saved.write_bytes(whole + b"x")
    unreadable(saved, "truncated or altered")


def rewritten(path, change) -> None:
    """Changes (about, header) of a file, and gives it a checksum that is right."""
    whole = path.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:start])
    about = json.loads(header["__metadata__"]["about"])
    header["__metadata__"]["about"] = about = json.dumps(change(about, header) or about)
    metadata = {name: value for name, value in header.pop("__metadata__").items() if name != "format"}
    text = MAGIC + f",{json.dumps(metadata)[1:]},{json.dumps(header)[1:]}".encode()
    text += b" " * (-len(text) % 8)
    checksum = struct.pack("<q", zlib.crc32(about.encode()))
    path.write_bytes(struct.pack("<Q", len(text)) + text + checksum + whole[start + 8 :])


ODD = [-1, 0, 1, 2, 3, 2**31, 2**63, 10**30, 1.5, float("nan"), True, None, "", "x", "F32", [], [1], {}, {"a": 1},
       [[]] * 3, "\ud800"]


def test_a_header_of_odd_values_is_refused(saved):
    """Whoever has its checksum right, too. The fields of `about` are the caller's: see test_keeping.py."""
    whole, draw = saved.read_bytes(), random.Random(0)

    def change(_, header):
        """One place, at any depth."""
        at = draw.choice([header, *[one for name, one in header.items() if name != "__metadata__"]])
        name = draw.choice(sorted(at.keys() - {"__metadata__"}))
        if draw.random() < 0.2:
            at.pop(name)
        else:
            value = draw.choice([one for one in ODD if one != at[name]])
            at["more" if at is header and draw.random() < 0.2 else name] = value

    def numbers(_, header):
        for name, one in header.items():
            one.update({"dtype": "I32"} if name[1] == "." else {})

    for one in [change] * 300 + [numbers, lambda about, _: [1]]:
        saved.write_bytes(whole)
        rewritten(saved, one)
        unreadable(saved, "altered")
    save(saved, layers(), tokens=[-5, *range(40)])
    unreadable(saved, "a token is negative")


def test_a_file_of_another_version_is_named(saved):
    saved.write_bytes(saved.read_bytes().replace(b'"version": "3"', b'"version": "2"'))
    unreadable(saved, "has version 2, and this library reads 3; make it anew")
    save(saved, layers())  # it may be replaced


def test_what_is_no_prefix_file(tmp_path):
    unreadable(tmp_path / "absent", "is not there; give the name of a file")
    unreadable(tmp_path, "is a folder")
    (tmp_path / "text").write_text("Call me Ishmael. " * 10)
    unreadable(tmp_path / "text", "no prefix file")
    save_file({"tokens": torch.zeros(3)}, tmp_path / "weights")
    unreadable(tmp_path / "weights", "no prefix file")

    os.mkfifo(tmp_path / "pipe")
    unreadable(tmp_path / "pipe", "no regular file")


@contextmanager
def nothing_happens(path):
    """The old file stays as it was, and nothing is left beside it."""
    before, names = path.read_bytes(), os.listdir(path.parent)
    yield
    assert path.read_bytes() == before and os.listdir(path.parent) == names


def test_a_full_disk(saved, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with nothing_happens(saved), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused("cannot write .*, 0.000 GB: No space left on device; make room", save, saved, layers(seed=1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with nothing_happens(saved), pytest.raises(UserError, match=r"needs 0.000 GB, and .* has 0.000 GB free; free some"):
        save(saved, layers(seed=1), source=lambda i: pytest.fail("it was known before"))


def test_no_place_to_write(tmp_path):
    for path, match in ((tmp_path, "is a folder; give the name of a file"), (tmp_path / "a" / "b", "no folder"),
                        (tmp_path / ("a" * 250), "name too long; .*choose another name or folder")):
        refused(match, save, path, layers(), source=lambda i: pytest.fail("it was known before"))


def test_a_killed_writer_leaves_a_whole_file(saved):
    kinds, draw, seen, left = [layers(seed) for seed in (0, 1)], random.Random(0), set(), 0

    def write_on(n):
        try:
            for kv in 100 * [kinds[n % 2], kinds[(n + 1) % 2]]:
                save(saved, kv, source=lambda i, kv=kv: time.sleep(0.001) or kv[i])
        finally:
            os._exit(0)

    for n in range(10):
        before = saved.stat().st_ino
        pid = os.fork()
        if pid == 0:
            write_on(n)
        while saved.stat().st_ino == before:
            time.sleep(0.001)
        time.sleep(0.02 * draw.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = load(saved)
        seen.add(next(n for n, kv in enumerate(kinds) if same(found, kv)))
        left = max(left, len(leftovers(saved.parent)))
    assert seen == {0, 1}
    assert left == 1  # the next writer removes what a dead one left
    notes = saved.with_name(f".{saved.name}.my-notes.tmp")
    notes.write_text("Ahab")
    save(saved, kinds[0])
    assert leftovers(saved.parent) == [notes.name]


def test_a_living_writers_file_is_left_alone(saved):
    """Another one to the same name, in the midst of it."""
    def source(i):
        if i == 1:
            save(saved, layers(seed=2))
            assert same(load(saved), layers(seed=2))
        return layers(seed=1)[i]

    save(saved, layers(), source=source)
    assert same(load(saved), layers(seed=1)) and leftovers(saved.parent) == []


def test_what_a_file_replaces(saved, tmp_path):
    """Another prefix file, whole or not, and an empty file; nothing else."""
    book, empty = tmp_path / "book.txt", tmp_path / "empty.prefix"
    empty.touch()
    for text in ("Call me Ishmael.", "Ahab"):  # longer and shorter than what tells a prefix file
        book.write_text(text)
        refused("book.txt is there, and is no prefix file; give another name, or remove", save, book, layers())
        assert book.read_text() == text
    saved.write_bytes(saved.read_bytes()[:100])
    for path in (empty, saved):
        save(path, layers())
        assert same(load(path), layers())
