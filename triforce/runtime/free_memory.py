"""What the host still gives this process: the least of what the machine and control groups have left."""

from collections.abc import Iterator
from pathlib import Path

# What PyTorch takes its allocator's settings from, the first that is set; and the one that the commands choose.
ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROUPS = "sys/fs/cgroup"  # where control groups are mounted (version 2)


def of_host(root: Path = Path("/")) -> int | None:
    """Bytes; None where the system does not say. root: of the file system that it is asked in."""
    free = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    free += _of_groups(root)
    return max(min(free), 0) if free else None


def _of_groups(root: Path) -> Iterator[int]:
    """Of each group that this process is in, and of all above it: a limit holds for what lies below. In a container
    the path may be that of the machine, of which only the end is mounted: what is not there is skipped."""
    for line in _lines(root / "proc/self/cgroup"):
        if line.startswith("0::"):
            group = root / GROUPS / line[3:].lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root / GROUPS):
                    yield from _of_group(folder)


def _of_group(folder: Path) -> Iterator[int]:
    """The page cache that a group holds can be had back. Above memory.high Linux slows a group down until it hardly
    moves."""
    counts = [line.split() for line in _lines(folder / "memory.stat")]
    cached = sum(int(count[1]) for count in counts if count[0] in ("inactive_file", "active_file"))
    for limit in ("memory.max", "memory.high"):
        for granted, taken in zip(_lines(folder / limit), _lines(folder / "memory.current"), strict=False):
            if granted.isdigit():
                yield int(granted) - int(taken) + cached


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
