"""What every trainer needs before and around its loop, once: device, seeds, run directory, run card, checkpoints."""

import logging
import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
import torch
from omegaconf import OmegaConf

from rl_training.config import DeviceKind, TrainConfig
from rl_training.config.conversion import load_yaml, plain
from rl_training.errors import NonFiniteError, UserError
from rl_training.runtime.automatic import settled, thread_count
from rl_training.runtime.checkpointing import clear_the_way, prune, read_checkpoint, write_checkpoint
from rl_training.runtime.exactness import numeric_platform
from rl_training.runtime.loggers import MetricsWriter, cut_back
from rl_training.runtime.run_card import add_resume, new_run_card
from rl_training.runtime.state_tree import split
from rl_training.runtime.system import RunLock, keep_freed_memory, write_durably
from rl_training.runtime.trainer import Journaled, Stateful
from rl_training.seeding import derive_seed

CONFIG_FILE = "config.yaml"

log = logging.getLogger(__name__)


@dataclass
class TrainingRun:
    """An open run directory, and what was decided for the run when it was opened."""

    config: TrainConfig
    run_dir: Path
    device: torch.device
    writer: MetricsWriter
    lock: RunLock
    checkpoint: Path | None = None
    """The checkpoint that the run continues from, and its state."""
    restored: dict[str, Any] | None = None
    saved_compile: bool | str | None = None
    """What the saved config of a resumed run says about compiling."""
    started: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close the metric files and let others have the directory."""
        self.writer.close()
        self.lock.release()


def resolve_device(kind: DeviceKind) -> torch.device:
    """Return the torch device, or say that it is not there."""
    if kind is DeviceKind.auto:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind is DeviceKind.cuda and not torch.cuda.is_available():
        raise UserError("device=cuda: torch sees no CUDA device here. Use device=cpu or device=auto.")
    if kind is DeviceKind.mps and not torch.backends.mps.is_available():
        raise UserError("device=mps: torch sees no Apple GPU here. Use device=cpu or device=auto.")
    return torch.device(kind.name)


def serialize_train_config(config: TrainConfig) -> dict[str, Any]:
    """Return the config as YAML and JSON can hold it; paths become texts, tags a list of texts."""
    data = plain(config)
    assert isinstance(data, dict)
    data["tags"] = [str(tag) for tag in data["tags"]]
    return data


def default_run_dir(config: TrainConfig) -> Path:
    """Return a new directory name; the random part keeps launches of the same second apart."""
    root = Path(os.environ.get("RL_OUTPUTS", "outputs"))
    return root / config.algo.name / config.env.name / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def prepare_process(config: TrainConfig) -> tuple[TrainConfig, torch.device]:
    """Set threads and seed the global generators; returns the config without any `auto`, and the device."""
    device = resolve_device(config.device.kind)
    config = settled(config, device)
    limit_threads(thread_count(config))
    if device.type == "cuda":
        # Without these, sums on a GPU may be added in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keep_freed_memory()
    _seed_global_generators(config.seed)
    return config, device


def limit_threads(threads: int) -> None:
    """Limit the threads of torch and of numpy's BLAS, which would otherwise give other bits on another machine."""
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(limits=threads, user_api="blas")


def agent_options(config: TrainConfig, device: torch.device | None) -> dict[str, Any]:
    """Return what every agent takes besides its own settings and the spaces."""
    return {
        "num_envs": config.env.num_envs,
        "seed": config.seed,
        "device": device,
        "compile_update": config.device.compile is True,
    }


def create_training_run(
    config: TrainConfig, run_dir: Path | None = None, checkpoint: Path | None = None
) -> TrainingRun:
    """Open and lock the run directory, and write the config and the run card.

    With a checkpoint the run continues in its directory, and nothing there changes until `begin_resumed_run`.
    """
    device = resolve_device(config.device.kind)
    config = settled(config, device)
    run_dir = (run_dir or default_run_dir(config)).resolve()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _locked(run_dir)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        restored = None if checkpoint is None else read_checkpoint(checkpoint)
        saved_compile = None if checkpoint is None else _saved_compile(run_dir)
        if checkpoint is None:
            require_no_run(run_dir)
            write_durably(run_dir / CONFIG_FILE, _config_yaml(config))
            new_run_card(run_dir, config, device)
    except OSError as error:
        lock.release()
        raise _unwritable(run_dir, error) from None
    except BaseException:
        lock.release()
        raise
    writer = MetricsWriter(run_dir, metrics_file=config.logging.metrics_file, tensorboard=config.logging.tensorboard)
    log.info("run directory %s, device %s, preset %s", run_dir, device, config.preset)
    return TrainingRun(config, run_dir, device, writer, lock, checkpoint, restored, saved_compile)


def _saved_compile(run_dir: Path) -> Any:
    return load_yaml(saved_config_file(run_dir)).get("device", {}).get("compile")


def require_free(run_dir: Path) -> None:
    """Refuse a run directory that another process is training in, before looking at what that process may change."""
    holder = RunLock(run_dir / ".lock").holder()
    if holder is not None:
        raise _in_use(run_dir, holder)


def _unwritable(run_dir: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write the run directory {run_dir}: {error.strerror or error}.")


def require_no_run(run_dir: Path) -> None:
    """Refuse a directory for a new run that already has one."""
    if (run_dir / CONFIG_FILE).exists():
        raise UserError(f"{run_dir} already holds a run; resume it, or choose another directory.")


def _locked(run_dir: Path) -> RunLock:
    lock = RunLock(run_dir / ".lock")
    holder = lock.acquire()
    if holder is not None:
        raise _in_use(run_dir, holder)
    return lock


def _in_use(run_dir: Path, holder: int) -> UserError:
    return UserError(f"{run_dir} is in use by process {holder}; wait for it to end, or stop it.")


def _seed_global_generators(seed: int) -> None:
    """Seed what environments and callbacks may draw from; our own code draws from generators of its own."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy"))  # noqa: NPY002 - third-party code uses it
    torch.manual_seed(derive_seed(seed, "torch"))


def _config_yaml(config: TrainConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(serialize_train_config(config)))


def saved_config_file(run_dir: Path) -> Path:
    """Return the config that the run last used: that of its newest resume, or the original one."""
    resumes = sorted((run_dir / "resumes").glob("[0-9]*.yaml"), key=lambda path: int(path.stem))
    return resumes[-1] if resumes else run_dir / CONFIG_FILE


def begin_resumed_run(run: TrainingRun, reasons: Sequence[str]) -> None:
    """Take the directory over from the interrupted run: record the resume and cut back what lies after the checkpoint.

    `reasons` say why the result may differ from that of an uninterrupted run; none means that it will not.
    """
    assert run.restored is not None
    assert run.checkpoint is not None
    try:
        _keep_config(run.config, run.run_dir)
        add_resume(
            run.run_dir,
            from_step=run.restored["session"]["global_step"],
            total_timesteps=run.config.total_timesteps,
            reasons=reasons,
        )
        cut_back(run.run_dir, run.restored["metric_files"])
        clear_the_way(run.checkpoint)
    except OSError as error:
        raise _unwritable(run.run_dir, error) from error


def _keep_config(config: TrainConfig, run_dir: Path) -> None:
    """Keep the config of this resume beside the original one."""
    records = run_dir / "resumes"
    records.mkdir(exist_ok=True)
    number = len(list(records.glob("*.yaml"))) + 1
    write_durably(records / f"{number:03d}.yaml", _config_yaml(config))


def save_training_checkpoint(
    run: TrainingRun, global_step: int, parts: Mapping[str, Stateful], labels: Sequence[str] = ()
) -> Path:
    """Gather the state of every part of the run, write it as one checkpoint, and remove those no longer kept."""
    try:
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        _require_finite_tensors(state["agent"], global_step)
        state["global_generators"] = _global_generator_states()
        state["platform"] = numeric_platform(run.config, run.device, parts["agent"])
        state["metric_files"] = run.writer.lengths()
        journal = {name: entry for part in parts.values() for name, entry in _journal_files(part).items()}
        path = write_checkpoint(run.run_dir, global_step, state, labels, journal)
        prune(run.run_dir, run.config.checkpoint.keep_last)
    except OSError as error:
        raise UserError(
            f"Cannot save step {global_step:,} in {run.run_dir}: {error.strerror or error}. "
            "The checkpoints saved before are intact; make room and resume."
        ) from error
    log.info("checkpoint %s%s", path.name, f" ({', '.join(labels)})" if labels else "")
    return path


def _journal_files(part: Stateful) -> dict[str, dict[str, int]]:
    return part.files() if isinstance(part, Journaled) else {}


def _require_finite_tensors(tree: Any, global_step: int) -> None:
    _, tensors, _ = split(tree)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise NonFiniteError(f"The agent's {name.strip('/')} is NaN or infinite at step {global_step:,}.")


def restore_training_state(run: TrainingRun, parts: Mapping[str, Stateful]) -> None:
    """Hand the restored state back to every part of the run."""
    assert run.restored is not None
    for name, part in parts.items():
        part.load_state_dict(run.restored[name])
    _set_global_generator_states(run.restored["global_generators"])


def _global_generator_states() -> dict[str, Any]:
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state()  # noqa: NPY002 - saved for third parties
    return {
        "python": random.getstate(),
        "numpy": {"name": name, "keys": keys, "rest": (position, has_gauss, cached_gaussian)},
        "torch": torch.get_rng_state(),
    }


def _set_global_generator_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    np.random.set_state((numpy_state["name"], numpy_state["keys"], *numpy_state["rest"]))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
