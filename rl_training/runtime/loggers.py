"""Where metric rows go: metrics.jsonl and TensorBoard.

A checkpoint records how long each file was; a resumed run cuts them back to that, so that no row stands twice.
"""

import json
import math
import time
from pathlib import Path
from typing import Any, BinaryIO, Protocol

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class MetricSink(Protocol):
    """A file of metric rows."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row."""
        ...

    def lengths(self) -> dict[str, int]:
        """Return the length of each file written so far, flushed to the system."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class JsonLines:
    """One JSON object per row."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / METRICS_FILE).open("ab")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row and hand it to the system, so that it can be followed while training."""
        row = {"step": step, **{key: value if math.isfinite(value) else None for key, value in metrics.items()}}
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def lengths(self) -> dict[str, int]:
        """Return the file's length."""
        return {METRICS_FILE: self._file.tell()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard scalars, written record by record: the usual writer's threads and buffers cannot be cut back."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._file: BinaryIO | None = None
        self._path = run_dir / TENSORBOARD_DIR

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one event that holds all scalars of the row."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._append(step=step, summary=Summary(value=values))

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            self._open()
        assert self._file is not None
        RecordWriter(self._file).write(Event(wall_time=time.time(), **event).SerializeToString())
        self._file.flush()

    def _open(self) -> None:
        """Start a file of this process; TensorBoard reads the event files of a directory in order of name."""
        self._path.mkdir(exist_ok=True)
        part = len(list(self._path.glob("events.out.tfevents.*")))
        self._file = (self._path / f"events.out.tfevents.{part:04d}").open("xb")
        self._append(file_version="brain.Event:2")

    def lengths(self) -> dict[str, int]:
        """Return the length of every event file of the run."""
        files = sorted(self._path.glob("events.out.tfevents.*"))
        return {path.relative_to(self._run_dir).as_posix(): path.stat().st_size for path in files}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class MetricsWriter:
    """Writes each row to every sink that the config asks for."""

    def __init__(self, run_dir: Path, *, metrics_file: bool, tensorboard: bool) -> None:
        self._run_dir = run_dir
        self._sinks: list[MetricSink] = []
        if metrics_file:
            self._sinks.append(JsonLines(run_dir))
        if tensorboard:
            self._sinks.append(TensorBoard(run_dir))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row everywhere."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def lengths(self) -> dict[str, int]:
        """Return the length of every file, by its path in the run directory."""
        return {name: length for sink in self._sinks for name, length in sink.lengths().items()}

    def close(self) -> None:
        """Close every file."""
        for sink in self._sinks:
            sink.close()


def cut_back(run_dir: Path, lengths: dict[str, int]) -> None:
    """Cut a run's metric files to the lengths that a checkpoint recorded, and remove those that it did not know."""
    files = [run_dir / METRICS_FILE, *(run_dir / TENSORBOARD_DIR).glob("events.out.tfevents.*")]
    for path in files:
        length = lengths.get(path.relative_to(run_dir).as_posix(), 0)
        if not path.is_file() or path.stat().st_size == length:
            continue
        if length == 0:
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(length)
