"""What runners tell of the machine and of files, by name: profiles are kept under it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from pathlib import Path


def of_file(path: Path) -> str:
    """A file by its name, its first 64 KiB, its size and its time; just its name where it cannot be read: loading it
    says what is wrong."""
    try:
        with path.open("rb") as file:
            header = hashlib.sha256(file.read(1 << 16)).hexdigest()[:16]
        stat = path.stat()
        return f"{path.name} {header} {stat.st_size} {stat.st_mtime_ns}"
    except OSError:
        return path.name


def processor() -> str:
    """The processor's name, and how many of its cores this process may use."""
    return f"{_model_name()}, {cores()[1]} of {os.cpu_count()} cores"


def spelled_threads(small: int, large: int) -> str:
    return f"{large}" if small == large else f"{large}, {small} for single tokens"


def thread_counts(physical: int, available: int) -> tuple[int, ...]:
    """Powers of two up to the physical cores, those themselves, and all that are available, which come last;
    the six largest."""
    powers = [1 << exponent for exponent in range(physical.bit_length())]
    return tuple(sorted({*powers, physical, available})[-6:])


@functools.cache
def cores() -> tuple[int, int]:
    """Physical cores and hardware threads that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        count = os.cpu_count() or 1
        return count, count
    usable = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        siblings = {Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text() for number in usable}
        return len(siblings), len(usable)
    return len(usable), len(usable)


@functools.cache
def _model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
