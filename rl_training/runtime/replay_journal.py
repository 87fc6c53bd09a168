"""Keeps a replay buffer on disk as an append-only journal, so that a checkpoint costs only what is new in it.

    replay/rows_<number of the first transition>.bin     transitions as packed rows, in segments

Each checkpoint appends the transitions since the last one, and records how long each segment was and its crc32. A
resumed run reads back exactly that much: what was appended later is overwritten, so no transition from the future is
ever seen. A segment is removed when no kept checkpoint needs it, so the journal never holds more than one buffer's
capacity and one segment (a sixteenth of it) for each kept checkpoint, and usually, since these overlap, little more
than one capacity in all.
"""

import contextlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.runtime.checkpointing import JOURNAL_DIR, CheckpointError
from rl_training.runtime.system import fsync_directory

SEGMENTS_PER_BUFFER = 16
MIN_SEGMENT_ROWS = 4096


@dataclass
class Segment:
    """A file of consecutive transitions, and what is in it so far."""

    first: int
    rows: int = 0
    crc32: int = 0

    @property
    def name(self) -> str:
        """Return the file's path in the run directory."""
        return f"{JOURNAL_DIR}/rows_{self.first:015d}.bin"

    @property
    def end(self) -> int:
        """Return the number of the transition after the last one."""
        return self.first + self.rows


class ReplayJournal:
    """The checkpointed form of a `ReplayBuffer`."""

    def __init__(self, replay: ReplayBuffer, run_dir: Path) -> None:
        self._replay, self._run_dir = replay, run_dir
        self._segment_rows = max(MIN_SEGMENT_ROWS, replay.capacity // SEGMENTS_PER_BUFFER)
        self._segments: list[Segment] = []

    def state_dict(self) -> dict[str, Any]:
        """Append what is new to the journal and return where it stands."""
        self._append_new_rows()
        return {
            **self._replay.counters(),
            "segments": [[segment.first, segment.rows, segment.crc32] for segment in self._segments],
        }

    def check_finite(self, since: int) -> None:
        """Refuse NaN and infinity in the transitions added since env step `since`."""
        self._replay.check_finite(since)

    def files(self) -> dict[str, dict[str, int]]:
        """Return the files that the last `state_dict` relies on: how many bytes of each, and their crc32."""
        row_bytes = self._replay.row_dtype.itemsize
        return {segment.name: {"bytes": segment.rows * row_bytes, "crc32": segment.crc32} for segment in self._segments}

    def _append_new_rows(self) -> None:
        replay = self._replay
        oldest = max(0, replay.added - replay.capacity)
        journaled = self._segments[-1].end if self._segments else 0
        segments = [Segment(s.first, s.rows, s.crc32) for s in self._segments if s.end > oldest]
        first = max(journaled, oldest)  # rows that came and went between two checkpoints are never written
        while first < replay.added:
            if not segments or segments[-1].rows >= self._segment_rows or segments[-1].end != first:
                segments.append(Segment(first))
            segment = segments[-1]
            end = min(replay.added, segment.first + self._segment_rows)
            self._append(segment, replay.packed(first, end).tobytes())
            segment.rows += end - first
            first = end
        self._segments = segments

    def _append(self, segment: Segment, data: bytes) -> None:
        path = self._run_dir / segment.name
        path.parent.mkdir(exist_ok=True)
        length = segment.rows * self._replay.row_dtype.itemsize
        with path.open("r+b" if segment.rows else "wb") as file:
            try:
                file.seek(length)
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # leave nothing of a failed write behind
                    file.truncate(length)
                raise
        if not segment.rows:
            fsync_directory(path.parent)
        segment.crc32 = zlib.crc32(data, segment.crc32)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the buffer from the journal as it was; the checkpoint's files have been checked already."""
        self._segments = [Segment(*values) for values in state["segments"]]
        self._replay.set_counters(state)
        dtype = self._replay.row_dtype
        for segment in self._segments:
            rows = np.fromfile(self._run_dir / segment.name, dtype, count=segment.rows)
            if len(rows) != segment.rows:
                raise CheckpointError(f"{segment.name} holds {len(rows)} transitions instead of {segment.rows}.")
            self._replay.unpack(segment.first, rows)
