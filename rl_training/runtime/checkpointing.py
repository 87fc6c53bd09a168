"""The checkpoint format: a directory per checkpoint, complete or absent, checked by hash, and never a pickle.

    checkpoints/step_000000020000/
        manifest.json   format version, step, labels, and the length and sha256 of every other file
        state.json      counters, generators, settings; names the tensors and arrays below
        tensors.pt      read with torch.load(weights_only=True)
        arrays.npz      read with allow_pickle=False

It is written beside its final name, synced to disk file by file, and renamed. The manifest also lists the journal
files of the run (the replay buffer) that the checkpoint relies on, each with a length and a crc32. Loading a stranger's
checkpoint runs no code, and reads no file outside its run directory.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.errors import UserError
from rl_training.runtime.state_tree import join, split
from rl_training.runtime.system import fsync_directory

FORMAT_VERSION = 1
CHECKPOINTS_DIR, JOURNAL_DIR = "checkpoints", "replay"
MANIFEST, STATE, TENSORS, ARRAYS = "manifest.json", "state.json", "tensors.pt", "arrays.npz"
_STAGING_PREFIX = ".staging-"
_JOURNAL_NAME = re.compile(rf"{JOURNAL_DIR}/rows_\d+\.bin")

log = logging.getLogger(__name__)


class CheckpointError(UserError):
    """A checkpoint that is torn, foreign, or of a newer format."""


class ForeignFormatError(CheckpointError):
    """A checkpoint that another version wrote."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint's manifest says of it."""

    path: Path
    global_step: int
    labels: tuple[str, ...]
    journal: Mapping[str, Mapping[str, int]]


def write_checkpoint(
    run_dir: Path,
    global_step: int,
    state: dict[str, Any],
    labels: Sequence[str] = (),
    journal: Mapping[str, Mapping[str, int]] | None = None,
) -> Path:
    """Write a checkpoint atomically and durably."""
    directory = run_dir / CHECKPOINTS_DIR
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"step_{global_step:012d}"
    same_step = len(list(directory.glob(f"{target.name}*")))
    if same_step:  # the newer state of a step stands beside the older one until that is pruned
        target = directory / f"{target.name}.{same_step:02d}"
    staging = directory / f"{_STAGING_PREFIX}{target.name}-{secrets.token_hex(3)}"
    try:
        staging.mkdir()
        _write_files(staging, global_step, state, labels, journal or {})
        fsync_directory(staging)
        staging.rename(target)
        fsync_directory(directory)
        fsync_directory(run_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def _write_files(
    staging: Path,
    global_step: int,
    state: dict[str, Any],
    labels: Sequence[str],
    journal: Mapping[str, Mapping[str, int]],
) -> None:
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
        "journal": journal,
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


def check_checkpoint(path: Path, *, journal: bool = False) -> CheckpointInfo:
    """Say what is wrong with a checkpoint, if anything is; `journal` looks at its part of the replay buffer too."""
    info, files = _read_manifest(path)
    try:
        for name in (STATE, TENSORS, ARRAYS):
            _check_file(path, name, files.get(name))
        if journal:
            _check_journal(info)
    except OSError as error:
        raise CheckpointError(f"Checkpoint {path} is torn: {error}.") from None
    return info


def _check_file(path: Path, name: str, expected: dict[str, Any] | None) -> None:
    file = path / name
    if expected is None or not file.is_file() or file.is_symlink():
        raise CheckpointError(f"Checkpoint {path} is torn: {name} is missing.")
    if file.stat().st_size != expected["bytes"] or _sha256(file) != expected["sha256"]:
        raise CheckpointError(f"Checkpoint {path} is torn: {name} is not what was written.")


def _check_journal(info: CheckpointInfo) -> None:
    run_dir = info.path.parent.parent
    for name, expected in info.journal.items():
        file = run_dir / name
        if not file.is_file() or file.is_symlink():
            raise CheckpointError(f"Checkpoint {info.path} is torn: {name} is missing.")
        if _crc32(file, expected["bytes"]) != expected["crc32"]:
            raise CheckpointError(f"Checkpoint {info.path} is torn: {name} is not what was written.")


def _crc32(path: Path, length: int) -> int | None:
    """Return the crc32 of the first `length` bytes, or None if there are fewer."""
    crc = 0
    with path.open("rb") as file:
        while length:
            chunk = file.read(min(length, 1 << 20))
            if not chunk:
                return None
            crc = zlib.crc32(chunk, crc)
            length -= len(chunk)
    return crc


def _read_manifest(path: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = manifest["format_version"]
        if version == FORMAT_VERSION:
            journal = {
                str(name): {"bytes": int(entry["bytes"]), "crc32": int(entry["crc32"])}
                for name, entry in manifest["journal"].items()
            }
            if not all(_JOURNAL_NAME.fullmatch(name) for name in journal):
                raise ValueError("it names a file outside the run directory")
            files = {
                str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
                for name, entry in manifest["files"].items()
            }
            info = CheckpointInfo(path, int(manifest["global_step"]), tuple(manifest["labels"]), journal)
            return info, files
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"Checkpoint {path} is torn: cannot read {MANIFEST} ({error}).") from None
    raise ForeignFormatError(
        f"Checkpoint {path} has format {version} and this version of rl_training reads {FORMAT_VERSION}. "
        "Use the version that wrote it (metadata.json names it)."
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Check a checkpoint and return its state."""
    check_checkpoint(path)
    try:
        array_names = json.loads((path / MANIFEST).read_text())["array_names"]
        tree = json.loads((path / STATE).read_text())
        tensors = torch.load(path / TENSORS, map_location="cpu", weights_only=True)
        with np.load(path / ARRAYS, allow_pickle=False) as file:
            arrays = {name: file[f"array_{index}"] for index, name in enumerate(array_names)}
        state = join(tree, tensors, arrays)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"Checkpoint {path} cannot be read: {reason}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"Checkpoint {path} does not hold the state of a run.")
    return state


def checkpoint_paths(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, intact or not, oldest step first."""
    return sorted(path for path in (run_dir / CHECKPOINTS_DIR).glob("step_*") if path.is_dir())


def find_checkpoint(path: Path, which: str = "last", *, to_train: bool = False, warn: bool = True) -> Path:
    """Return a checkpoint of a run: "last", "best" (else last), a step number; or `path`, if it is one itself.

    Torn checkpoints are named in a warning and passed over; `to_train` wants the replay buffer intact as well.
    """
    path = path.expanduser()
    if (path / MANIFEST).is_file():
        return check_checkpoint(path, journal=to_train).path
    if not (path / CHECKPOINTS_DIR).is_dir():
        raise UserError(f"{path} has no checkpoint yet: it ended before the first was saved. Start a new run.")
    intact, torn = [], ""
    for candidate in reversed(checkpoint_paths(path)):
        try:
            intact.append(check_checkpoint(candidate, journal=to_train))
        except CheckpointError as error:
            torn = f"{error} "
            if warn:
                log.warning("%s It is passed over.", error)
        if intact and which == "last":
            break
    if not intact:
        raise CheckpointError(f"{torn}{path} has no intact checkpoint, so it cannot go on. Start a new run.")
    return _choose(intact, path, which).path


def _choose(intact: list[CheckpointInfo], run_dir: Path, which: str) -> CheckpointInfo:
    """Choose among intact checkpoints, newest first."""
    if which == "last":
        return intact[0]
    if which == "best":
        return next((info for info in intact if "best" in info.labels), intact[0])
    for info in intact:
        if which in (str(info.global_step), info.path.name):
            return info
    steps = ", ".join(str(info.global_step) for info in reversed(intact))
    raise UserError(f"{run_dir} has no checkpoint {which!r}. Choose best, last or one of the steps {steps}.")


def clear_the_way(chosen: Path) -> None:
    """Put aside the checkpoints that are newer than the one a run goes on from, torn or not."""
    for path in checkpoint_paths(chosen.parent.parent):
        if path.name > chosen.name:
            reason = "torn" if _is_torn(path) else "superseded"
            log.warning("%s is %s; moved to %s", path.name, reason, quarantine(path, reason))


def _is_torn(path: Path) -> bool:
    try:
        check_checkpoint(path, journal=True)
    except ForeignFormatError:
        return False
    except CheckpointError:
        return True
    return False


def quarantine(path: Path, reason: str) -> Path:
    """Move a checkpoint out of the way, keeping its files for whoever wants to look."""
    directory = path.parent / reason
    directory.mkdir(exist_ok=True)
    return path.rename(directory / f"{path.name}-{secrets.token_hex(3)}")


def prune(run_dir: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints and the newest one labelled best, and what nothing needs.

    A new best replaces an old one, so the newest label is the true one. Torn checkpoints are never counted as kept.
    """
    complete = [info for info in map(_info_if_complete, checkpoint_paths(run_dir)) if info is not None]
    newest_best = [info for info in complete if "best" in info.labels][-1:]
    kept = [info for info in complete if info in complete[-keep_last:] or info in newest_best]
    for info in complete:
        if info not in kept:  # renamed first, so that a kill in the middle leaves nothing that looks like a checkpoint
            info.path.rename(info.path.with_name(f"{_STAGING_PREFIX}removed-{info.path.name}"))
    for staging in (run_dir / CHECKPOINTS_DIR).glob(f"{_STAGING_PREFIX}*"):
        shutil.rmtree(staging, ignore_errors=True)
    needed = {name for info in kept for name in info.journal}
    for file in (run_dir / JOURNAL_DIR).glob("rows_*.bin"):
        if f"{JOURNAL_DIR}/{file.name}" not in needed:
            file.unlink()


def _info_if_complete(path: Path) -> CheckpointInfo | None:
    """Return the info of a checkpoint whose files have the right lengths: a look cheap enough for every save."""
    try:
        info, files = _read_manifest(path)
        complete = all((path / name).stat().st_size == files[name]["bytes"] for name in (STATE, TENSORS, ARRAYS))
    except (CheckpointError, OSError, KeyError, TypeError):
        return None
    return info if complete else None
