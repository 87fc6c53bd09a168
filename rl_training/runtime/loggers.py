"""Where metric rows go: metrics.jsonl and TensorBoard.

A checkpoint records how long each file was; a resumed run cuts them back to that, so that no row stands twice.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from rl_training.errors import UserError

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
TENSORBOARD_DIR = "tensorboard"


class MetricSink(Protocol):
    """A file of metric rows, opened when the first one is written."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row."""
        ...

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class JsonLines:
    """One JSON object per row, handed to the system at once so that it can be followed while training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one row."""
        if self._file is None:
            self._file = self._path.open("ab")
        self._file.write(json.dumps({"step": step, **metrics}).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        _sync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _sync(file: BinaryIO | None) -> None:
    if file is not None:
        os.fsync(file.fileno())


class TensorBoard:
    """TensorBoard scalars, written record by record: the usual writer's threads and buffers cannot be cut back."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TENSORBOARD_DIR
        self._file: BinaryIO | None = None

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
        parts = [int(path.suffix[1:]) for path in self._path.glob("events.out.tfevents.*")]
        self._file = (self._path / f"events.out.tfevents.{max(parts, default=-1) + 1:04d}").open("xb")
        self._append(file_version="brain.Event:2")

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        _sync(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class MetricsWriter:
    """Writes each row to every sink that the config asks for, and evaluations to a file of their own."""

    def __init__(self, run_dir: Path, *, metrics_file: bool, tensorboard: bool) -> None:
        self._run_dir = run_dir
        self._evaluations = JsonLines(run_dir / EVALUATIONS_FILE)
        self._sinks: list[MetricSink] = []
        if metrics_file:
            self._sinks.append(JsonLines(run_dir / METRICS_FILE))
        if tensorboard:
            self._sinks.append(TensorBoard(run_dir))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one row everywhere."""
        with self._naming_the_directory():
            for sink in self._sinks:
                sink.write(step, metrics)

    def write_evaluation(self, step: int, evaluation: dict[str, Any]) -> None:
        """Append what is needed to play an evaluation again, and what it gave."""
        with self._naming_the_directory():
            self._evaluations.write(step, evaluation)

    @contextlib.contextmanager
    def _naming_the_directory(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"Cannot write metrics in {self._run_dir}: {reason}. Make room and resume.") from error

    def lengths(self) -> dict[str, int]:
        """Return how much of every file is safe on disk, by its path in the run directory."""
        for sink in (*self._sinks, self._evaluations):
            sink.sync()
        return {path.relative_to(self._run_dir).as_posix(): path.stat().st_size for path in _files(self._run_dir)}

    def close(self) -> None:
        """Close every file; what a full disk did not take was reported when it was written."""
        for sink in (*self._sinks, self._evaluations):
            with contextlib.suppress(OSError):
                sink.close()


def _files(run_dir: Path) -> list[Path]:
    """Return the metric files that a run has so far."""
    files = [run_dir / METRICS_FILE, run_dir / EVALUATIONS_FILE]
    return [path for path in files if path.is_file()] + sorted(
        (run_dir / TENSORBOARD_DIR).glob("events.out.tfevents.*")
    )


def cut_back(run_dir: Path, lengths: dict[str, int]) -> None:
    """Cut a run's metric files to the lengths that a checkpoint recorded, and remove those that it did not know."""
    for path in _files(run_dir):
        length = lengths.get(path.relative_to(run_dir).as_posix(), 0)
        if length == 0:
            path.unlink()
        elif path.stat().st_size > length:
            os.truncate(path, length)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics or evaluations file; a row that is still being written is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations that training made, oldest first."""
    return read_rows(run_dir / EVALUATIONS_FILE)
