"""The checkpoint format: a directory per checkpoint, complete or absent, checked by hash, and never a pickle.

    checkpoints/step_000000020000/
        manifest.json   format version, step, labels, and the length and sha256 of every other file
        state.json      counters, generators, settings; names the tensors and arrays below
        tensors.pt      read with torch.load(weights_only=True)
        arrays.npz      read with allow_pickle=False

It is written beside its final name, synced to disk file by file, and renamed. Loading a stranger's checkpoint runs no
code.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.errors import UserError
from rl_training.runtime.state_tree import join, split
from rl_training.runtime.system import fsync_directory

FORMAT_VERSION = 1
MANIFEST, STATE, TENSORS, ARRAYS = "manifest.json", "state.json", "tensors.pt", "arrays.npz"
_STAGING_PREFIX = ".staging-"

log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that is torn, foreign, or of a newer format."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint's manifest says of it."""

    path: Path
    global_step: int
    labels: tuple[str, ...]


def checkpoints_dir(run_dir: Path) -> Path:
    """Return where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def write_checkpoint(run_dir: Path, global_step: int, state: dict[str, Any], labels: Sequence[str] = ()) -> Path:
    """Write a checkpoint atomically and durably; an intact one of the same step is left as it is."""
    directory = checkpoints_dir(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step_{global_step:012d}"
    if target.exists():
        with contextlib.suppress(CheckpointError):
            check_checkpoint(target)
            return target
        shutil.rmtree(target)
    staging = directory / f"{_STAGING_PREFIX}{target.name}-{secrets.token_hex(3)}"
    try:
        staging.mkdir()
        _write_files(staging, global_step, state, labels)
        fsync_directory(staging)
        staging.rename(target)
        fsync_directory(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def _write_files(staging: Path, global_step: int, state: dict[str, Any], labels: Sequence[str]) -> None:
    tree, tensors, arrays = split(state)
    files: dict[str, Any] = {}
    with _durable(staging / STATE, files) as path:
        path.write_text(json.dumps(tree))
    with _durable(staging / TENSORS, files) as path:
        torch.save(tensors, path)
    with _durable(staging / ARRAYS, files) as path:
        # Paths are no good names inside a zip file; the manifest lists them in this order.
        named: dict[str, Any] = {f"array_{index}": array for index, array in enumerate(arrays.values())}
        np.savez(path, **named)
    manifest = {
        "format_version": FORMAT_VERSION,
        "global_step": global_step,
        "labels": list(labels),
        "array_names": list(arrays),
        "files": files,
    }
    with _durable(staging / MANIFEST, {}) as path:
        path.write_text(json.dumps(manifest, indent=2))


@contextlib.contextmanager
def _durable(path: Path, files: dict[str, Any]) -> Iterator[Path]:
    """Let the block write `path`, then sync it to disk and add its length and hash to `files`."""
    yield path
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_checkpoint(path: Path) -> dict[str, Any]:
    """Return the manifest of an intact checkpoint, or say what is wrong with it."""
    manifest = _read_manifest(path)
    for name in (STATE, TENSORS, ARRAYS):
        file, expected = path / name, manifest["files"].get(name)
        if expected is None or not file.is_file() or file.is_symlink():
            raise CheckpointError(f"Checkpoint {path} is torn: {name} is missing.")
        if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"Checkpoint {path} is torn: {name} is not what was written.")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = manifest["format_version"]
        if not isinstance(manifest["files"], dict) or not isinstance(manifest["global_step"], int):
            raise TypeError("wrong fields")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"Checkpoint {path} is torn: cannot read {MANIFEST} ({error}).") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"Checkpoint {path} has format {version} and this version of rl_training reads {FORMAT_VERSION}. "
            "Use the version that wrote it (metadata.json names it)."
        )
    assert isinstance(manifest, dict)
    return manifest


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Check a checkpoint and return its state."""
    manifest = check_checkpoint(path)
    try:
        tree = json.loads((path / STATE).read_text())
        tensors = torch.load(path / TENSORS, map_location="cpu", weights_only=True)
        with np.load(path / ARRAYS, allow_pickle=False) as file:
            arrays = {name: file[f"array_{index}"] for index, name in enumerate(manifest["array_names"])}
        state = join(tree, tensors, arrays)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"Checkpoint {path} cannot be read: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"Checkpoint {path} does not hold the state of a run.")
    return state


def intact_checkpoints(run_dir: Path) -> list[CheckpointInfo]:
    """Return the intact checkpoints of a run, oldest step first; torn ones are named in the log and left out."""
    found = []
    for path in checkpoints_dir(run_dir).glob("step_*"):
        try:
            manifest = check_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        found.append(CheckpointInfo(path, manifest["global_step"], tuple(manifest["labels"])))
    return sorted(found, key=lambda info: info.global_step)


def find_checkpoint(path: Path, which: str = "last") -> Path:
    """Return a checkpoint of a run: "last", "best" (else last), a step number; or `path`, if it is one itself."""
    if (path / MANIFEST).is_file():
        return path
    if not checkpoints_dir(path).is_dir():
        raise UserError(f"{path} is not a run directory: it has no checkpoints.")
    intact = intact_checkpoints(path)
    if not intact:
        raise CheckpointError(f"{path} has no intact checkpoint; nothing was changed. Start a new run.")
    if which == "last":
        return intact[-1].path
    if which == "best":
        return next((info.path for info in reversed(intact) if "best" in info.labels), intact[-1].path)
    for info in intact:
        if which in (str(info.global_step), info.path.name):
            return info.path
    steps = ", ".join(str(info.global_step) for info in intact)
    raise UserError(f"{path} has no checkpoint {which!r}. Choose best, last or one of the steps {steps}.")


def prune_checkpoints(run_dir: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints and the newest one labelled best, and abandoned staging.

    A new best replaces an old one, so the newest label is the true one. Torn checkpoints are never counted as kept.
    """
    intact = [info for info in map(_info_if_complete, checkpoints_dir(run_dir).glob("step_*")) if info is not None]
    intact.sort(key=lambda info: info.global_step)
    kept = {info.path for info in intact[-keep_last:]}
    kept.update([info.path for info in intact if "best" in info.labels][-1:])
    for info in intact:
        if info.path not in kept:
            shutil.rmtree(info.path)
    for staging in checkpoints_dir(run_dir).glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(staging, ignore_errors=True)


def _info_if_complete(path: Path) -> CheckpointInfo | None:
    try:
        manifest = _read_manifest(path)
    except CheckpointError:
        return None
    complete = all(
        (path / name).is_file() and (path / name).stat().st_size == entry["bytes"]
        for name, entry in manifest["files"].items()
        if name in (STATE, TENSORS, ARRAYS)
    )
    return CheckpointInfo(path, manifest["global_step"], tuple(manifest["labels"])) if complete else None
