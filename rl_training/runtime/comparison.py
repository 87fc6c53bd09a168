"""Compares two runs of the same settings, bit for bit: everything but the clock."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.runtime.checkpointing import CheckpointInfo, check_checkpoint, checkpoint_paths, read_checkpoint
from rl_training.runtime.loggers import EVALUATIONS_FILE, METRICS_FILE, TENSORBOARD_DIR, read_rows

# What may differ: wall-clock time, the lengths of files that hold it, and how the journal is cut into segments.
_CLOCK_KEYS = ("/session/seconds", "/session/metrics/time/", "/metric_files/", "/data/segments")


def first_difference(first: Path, second: Path) -> str | None:
    """Return where two runs first differ, earliest step first, or None if they are the same in every bit."""
    for name in (METRICS_FILE, EVALUATIONS_FILE):
        difference = _rows_difference(name, read_rows(first / name), read_rows(second / name))
        if difference is not None:
            return difference
    difference = _rows_difference(
        TENSORBOARD_DIR, _tensorboard_rows(first / TENSORBOARD_DIR), _tensorboard_rows(second / TENSORBOARD_DIR)
    )
    return difference or _checkpoint_difference(checkpoint_paths(first)[-1], checkpoint_paths(second)[-1])


def _rows_difference(name: str, first: list[dict[str, Any]], second: list[dict[str, Any]]) -> str | None:
    for row, other in zip(first, second, strict=False):
        for key in {**row, **other}:
            if not key.startswith("time/") and row.get(key) != other.get(key):
                return f"{name} at step {row['step']:,}: {key} is {row.get(key)} and {other.get(key)}"
    if len(first) != len(second):
        return f"{name} has {len(first)} rows and {len(second)} rows"
    return None


def _tensorboard_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the scalars of all event files, as TensorBoard reads them."""
    files = sorted(directory.glob("events.out.tfevents.*"))
    if not files:
        return []
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [
        {"step": event.step, **{value.tag: value.simple_value for value in event.summary.value}}
        for path in files
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.summary.value
    ]


def _checkpoint_difference(first: Path, second: Path) -> str | None:
    if check_checkpoint(first).global_step != check_checkpoint(second).global_step:
        return f"the last checkpoints are {first.name} and {second.name}"
    leaves, others = dict(_leaves(read_checkpoint(first), "")), dict(_leaves(read_checkpoint(second), ""))
    for path in {**leaves, **others}:
        if path.startswith(_CLOCK_KEYS):
            continue
        if path not in leaves or path not in others:
            return f"{path.strip('/')} of {first.name} exists in one run only"
        if not _equal(leaves[path], others[path]):
            return f"{path.strip('/')} of {first.name} differs{_size_of_difference(leaves[path], others[path])}"
    return _journal_difference(check_checkpoint(first), check_checkpoint(second))


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    else:
        yield path, tree


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.dtype == second.dtype and np.array_equal(first, second)
    return type(first) is type(second) and bool(first == second)


def _size_of_difference(first: Any, second: Any) -> str:
    if isinstance(first, (torch.Tensor, np.ndarray)) and first.shape == second.shape:
        largest = float(abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).max())
        return f" by up to {largest:.3g}"
    return f": {first} and {second}" if isinstance(first, (int, float, str)) else ""


def _journal_difference(first: CheckpointInfo, second: CheckpointInfo) -> str | None:
    """Compare the transitions that both checkpoints hold, by their numbers since the start of the run."""
    rows, others = _journal_bytes(first), _journal_bytes(second)
    if not rows and not others:
        return None
    if rows.keys() != others.keys():
        return f"the replay buffers of {first.path.name} hold other transitions"
    for number, row in rows.items():
        if row != others[number]:
            return f"transition {number:,} of the replay buffer of {first.path.name} differs"
    return None


def _journal_bytes(info: CheckpointInfo) -> dict[int, bytes]:
    """Return the rows that the checkpoint's replay buffer holds, by number."""
    state = read_checkpoint(info.path)["data"]
    if "segments" not in state:
        return {}
    run_dir = info.path.parent.parent
    rows: dict[int, bytes] = {}
    for (name, entry), (first, count, _) in zip(info.journal.items(), state["segments"], strict=True):
        data = (run_dir / name).read_bytes()[: entry["bytes"]]
        row_bytes = len(data) // count
        rows.update({first + i: data[i * row_bytes : (i + 1) * row_bytes] for i in range(count)})
    oldest = state["added"] - state["capacity"]
    return {number: row for number, row in rows.items() if number >= oldest}
