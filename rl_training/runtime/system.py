"""What depends on the system, each with a fallback: memory, versions, durable writes, locks, threads, signals."""

import contextlib
import ctypes
import errno
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import IO

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def launcher() -> str:
    """Return what the user typed to train, so that a hint can be pasted."""
    if "RL_LAUNCHER" in os.environ:
        return os.environ["RL_LAUNCHER"]
    return "rl-train" if Path(sys.argv[0]).stem == "rl-train" else "python -m rl_training.train"


def pin_threads(threads: int) -> None:
    """Limit the math libraries' threads; they read this once, so call it before numpy and torch are imported."""
    os.environ.update(thread_variables(threads))


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that limit the math libraries' threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks instead of returning them: a SAC update otherwise faults in 600 pages each time."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # the numbers of M_MMAP_THRESHOLD and so on in malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in ((mmap_threshold, 1 << 25), (trim_threshold, 1 << 30), (top_pad, 1 << 26)):
            mallopt(parameter, value)


def available_memory() -> int | None:
    """Return the bytes of memory that can be used without swapping, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def cpu_vendor_and_flags() -> tuple[str, frozenset[str]]:
    """Return the processor's vendor and instruction sets, empty where the system does not say."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    return fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split())


def write_durably(path: Path, text: str) -> None:
    """Replace a small file so that a reader finds the old or the new text, also after a power cut."""
    staging = path.with_name(f".{path.name}.staging")
    with staging.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunLock:
    """One owner per run directory, held by the operating system: a killed owner leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def acquire(self) -> int | None:
        """Take the lock and return None, or return the process id of whoever holds it."""
        file = self._path.open("a+")
        holder = _try_lock(file)
        if holder is not None:
            file.close()
            return holder
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._file = file
        return None

    def holder(self) -> int | None:
        """Return the process id of whoever holds the lock, or None; changes nothing."""
        if not self._path.exists():
            return None
        with self._path.open("a+") as file:
            return _try_lock(file)

    def release(self) -> None:
        """Give the lock back; closing the file does it."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _try_lock(file: IO[str]) -> int | None:
    """Lock an open file and return None, or return the process id that its owner wrote into it."""
    try:
        _lock_file(file)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            raise  # this file system has no locks
        file.seek(0)
        text = file.read().strip()
        return int(text) if text.isdigit() else 0
    return None


def _lock_file(file: IO[str]) -> None:
    """Lock an open file without waiting; raises OSError if another process holds it."""
    if os.name == "nt":
        import msvcrt

        file.seek(1 << 20)  # far behind the process id, which others must be able to read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Signals:
    """Remembers signals so that a trainer can act between two steps.

    SIGINT and SIGTERM ask to save and leave; a second one ends the process at once. SIGUSR1, which schedulers send as a
    warning, asks to save and go on.
    """

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self.save_requested = False

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop is not None:
            raise KeyboardInterrupt(f"second {signal.Signals(number).name}: left at once, without saving")
        self.stop = signal.Signals(number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self.save_requested = True

    @contextlib.contextmanager
    def caught(self) -> Iterator["Signals"]:
        """Catch the signals inside the block; outside the main thread Python cannot, and the block runs as it is."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._on_stop,
            signal.SIGTERM: self._on_stop,
        }
        if hasattr(signal, "SIGUSR1"):
            handlers[signal.SIGUSR1] = self._on_save
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
