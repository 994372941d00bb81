"""The memory plan: its parts for batches, what it says when they do not fit, and what there is to be had."""

import resource

import pytest
import torch
from conftest import refused

from triforce.config import Settings
from triforce.decode.batch import Sizes
from triforce.engine import memory
from triforce.engine.memory import Part, check, layer_bytes, plan_memory
from triforce.model import ModelConfig
from triforce.runtime import free_memory

TARGET, DRAFT = ModelConfig(64, 32, 4, 4, 2, 8, 48), ModelConfig(64, 16, 1, 2, 2, 8, 32)
TOKEN = 2 * 2 * 8 * 4  # bytes of a token's K and V in one layer of the target: two heads of 8 in float32
CPU = torch.device("cpu")
GIB = 2**30


def parts(settings=None, draft=DRAFT, **more) -> dict[str, int]:
    sizes = Sizes(**{"batch": 1, "capacity": 4096, "budget": 256, "vocab_size": 64, **more})
    settings = (settings or Settings(gamma=6)).resolve(has_model=draft is not None)
    plan = plan_memory(TARGET, draft, settings, sizes, torch.float32, CPU)
    return {part.name: part.bytes for part in plan.parts}


def test_parts_by_their_definitions():
    planned = parts()
    assert planned["KV cache"] == 4 * TOKEN * 4096 == 4 * layer_bytes(TARGET, 1, 4096, torch.float32)
    assert parts(batch=3)["KV cache"] == 3 * planned["KV cache"]
    assert planned["chunk keys"] == 4 * TOKEN // 2 * 4096 // 8  # of each 8 tokens one mean key
    # Logits, laws, sorted, summed up; and a law for each level that drafts. Of 8 rows, 64 words, 4 bytes each.
    assert [parts(draft=draft)["logits and probabilities"] / (8 * 64 * 4) for draft in (DRAFT, None)] == [6, 5]
    coupled = parts(Settings(gamma=6, sampling="coupled"))["logits and probabilities"]
    assert coupled == (4 + 20) * 8 * 64 * 4  # no laws are passed, and noise is made of ten numbers of 64 bits a word
    # Of the newest 8 queries of 4 heads, with 512 chunks: products, scores, and their shares, of a layer.
    assert planned["choice of the view"] == 4 * 8 * 512 * (4 + 8)
    # Of what 4 rows share, by 8 queries of each; or of what is a row's own, which is copied.
    snapkv = Settings(gamma=6, draft_cache="snapkv")
    shared, own = (parts(snapkv, batch=4, shared=base)["choice of the view"] for base in (3072, 128))
    assert shared == 3 * 4 * 4 * (4 * 8) * 3072 and parts(snapkv)["choice of the view"] == 3 * 4 * 4 * 8 * 4096
    assert own == 3 * 4 * 4 * 8 * (4096 - 128) + 2 * 8 * 4 * (4096 - 128)
    # 64 rows with paths of 8: products of 4 heads, and keys and values of 2 as they are and widened.
    tree = parts(Settings(gamma=6, sampling="coupled", tree_size=64))
    assert tree["attention along the paths of a tree"] == 64 * 8 * (4 + 3 * 2) * 8 * 4
    # The view's tokens, and which chunks they are of: 256 tokens, without a sink and a window of 128.
    assert planned["retrieval view"] == 4 * TOKEN * 256 + 4 * 2 * (256 - 8 - 128) // 8 * 8 + 8


def test_what_does_not_fit_is_named_with_what_helps(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10 * 2**20)
    some = [Part("small", 3 * 2**20, ("--a",)), Part("tiny", 5), Part("large", 6 * 2**20, ("--b", "--batch-size"))]
    check(some[:2], CPU)
    check([Part("just", 10 * 2**20)], CPU)
    told = refused("", check, [*some, Part("more", 2 * 2**20)], CPU, ("--batch-size",))
    assert told == ("this needs 0.01 GiB of memory on cpu and 0.01 GiB are free: large 0.01 GiB (--b), "
                    "small 0.00 GiB (--a), more 0.00 GiB")
    monkeypatch.setattr(memory, "available", lambda device: None)  # where the system does not say
    check(some, CPU)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 64 GiB free: writes files of it, and says what a process has there."""
    monkeypatch.setattr("resource.getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)

    def has(**files) -> int | None:
        for name, text in ({"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n"} | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return free_memory.of_host(tmp_path)

    return has


def group(folder: str, granted, used: int, prefix: str = "", limit: str = "max", current: str = "current") -> dict:
    """Files of a control group that holds 3 GiB of page cache."""
    stat = f"anon 5\n{prefix}inactive_file {2 * GIB}\n{prefix}active_file {GIB}\nshmem 7\n"
    return {f"{folder}/memory.{limit}": f"{granted}\n", f"{folder}/memory.{current}": f"{used * GIB}\n",
            f"{folder}/memory.stat": stat}


@pytest.mark.parametrize("of_process", ["0::/\n", "0::/user.slice/a/b\n", "0::/not/mounted/here\n"])
def test_a_container_has_what_it_is_granted_and_what_files_fill(machine, of_process):
    """Its group is the mounted one, or lies below that. Or its path is the machine's, and is not here."""
    here = {"proc/self/cgroup": of_process}
    assert machine(**here) == 64 * GIB
    assert machine(**group("sys/fs/cgroup", 8 * GIB, 6), **here) == 5 * GIB
    assert machine(**group("sys/fs/cgroup", "max", 6), **here) == 64 * GIB


@pytest.mark.parametrize("limit", ["max", "high"])
def test_the_least_of_all_nested_groups_applies(machine, limit):
    """A group's own limit may be larger than what those above it have left, or there may be none."""
    top, here = "sys/fs/cgroup", {"proc/self/cgroup": "0::/slice/service/pod\n"}
    assert machine(**group(f"{top}/slice/service/pod", "max", 1), **here) == 64 * GIB
    assert machine(**group(f"{top}/slice", 9 * GIB, 7, limit=limit)) == 5 * GIB
    assert machine(**group(f"{top}/slice/service/pod", 6 * GIB, 5, limit=limit)) == 4 * GIB
    assert machine(**group(f"{top}/slice/other", GIB, 1, limit=limit)) == 4 * GIB  # this process is not in it


def test_groups_of_version_1(machine):
    def of(folder, granted, used):
        return group(folder, granted, used, "total_", "limit_in_bytes", "usage_in_bytes")

    top = "sys/fs/cgroup/memory"
    here = {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n"}
    assert machine(**of(top, 9223372036854771712, 6), **here) == 64 * GIB
    assert machine(**of(f"{top}/docker", 30 * GIB, 6)) == 27 * GIB
    assert machine(**of(f"{top}/docker/abc", 8 * GIB, 6)) == 5 * GIB
    assert machine(**of(f"{top}/x", GIB, 1)) == 5 * GIB


@pytest.mark.parametrize("limit, pages", [(resource.RLIMIT_AS, 300), (resource.RLIMIT_DATA, 50)])
def test_limits_of_a_process(machine, monkeypatch, limit, pages):
    granted = {limit: GIB}
    monkeypatch.setattr("resource.getrlimit", lambda one: (granted.get(one, resource.RLIM_INFINITY),) * 2)
    assert machine(**{"proc/self/statm": "300 200 10 1 0 50 0\n"}) == GIB - pages * resource.getpagesize()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_what_a_gpu_has_left_of_this_process_s_share(monkeypatch, device):
    """A device may be named without its number, and a process may be granted less than there is."""
    fractions = {0: 0.5, 1: 1.0}
    for name, answer in (("mem_get_info", (60, 100)), ("memory_reserved", 20), ("memory_allocated", 15),
                         ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: fractions[index])
    assert memory.available(torch.device(device)) == {"cuda": 50 - 15, "cuda:1": 60 + 20 - 15}[device]
