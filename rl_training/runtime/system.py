"""What depends on the operating system, each with a fallback: memory, durable writes, threads, signals."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def pin_threads(threads: int) -> None:
    """Limit the math libraries' threads; they read this once, so call it before numpy and torch are imported."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(threads)


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


def fsync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class StopSignals:
    """Remembers SIGINT and SIGTERM so that a trainer can save first; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name})")
        self.received = signal.Signals(number)

    @contextlib.contextmanager
    def caught(self) -> Iterator["StopSignals"]:
        """Catch the signals inside the block; outside the main thread Python cannot, and the block runs as it is."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
