"""What the host still gives this process: the least of what the machine, control groups and its limits have left."""

import resource
from collections.abc import Iterator
from pathlib import Path

# Of a control group, by version: where groups are mounted, the names of limits and of what is used, and the prefix of
# counts in memory.stat that cover the groups below. Above memory.high Linux slows a group down until it hardly moves.
VERSIONS = {"": ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ""),
            "memory": ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")}
# Limits of a process, and columns of /proc/self/statm that count against them, in pages: all of it; data and stack.
LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))


def of_host(root: Path = Path("/")) -> int | None:
    """Bytes; None where the system does not say. root: of the file system that it is asked in."""
    free = [int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    for pages in _lines(root / "proc/self/statm")[:1]:
        limits = ((resource.getrlimit(limit)[0], int(pages.split()[column])) for limit, column in LIMITS)
        free += [most - used * resource.getpagesize() for most, used in limits if most != resource.RLIM_INFINITY]
    free += _of_groups(root)
    return max(min(free), 0) if free else None


def _of_groups(root: Path) -> Iterator[int]:
    """Of each group that this process is in, and of all above it: a limit holds for what lies below. In a container
    the path may be that of the machine, of which only the end is mounted: what is not there is skipped."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for name in VERSIONS.keys() & set(controllers.split(",")):
            mounted, *names = VERSIONS[name]
            group = root / mounted / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root / mounted):
                    yield from _of_group(folder, *names)


def _of_group(folder: Path, limits: tuple[str, ...], used: str, prefix: str) -> Iterator[int]:
    """The page cache that a group holds can be had back."""
    files = (f"{prefix}inactive_file", f"{prefix}active_file")
    counts = [line.split() for line in _lines(folder / "memory.stat")]
    cached = sum(int(count[1]) for count in counts if count[0] in files)
    for limit in limits:
        for granted, taken in zip(_lines(folder / limit), _lines(folder / used), strict=False):
            if granted.isdigit():
                yield int(granted) - int(taken) + cached


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
