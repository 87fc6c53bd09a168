"""What one does with a run directory: evaluate a checkpoint of it, or go on training."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_training.config import EnvConfig, TrainConfig, Vectorization
from rl_training.config.conversion import load_yaml, typed_config
from rl_training.envs.factory import probe_spaces
from rl_training.envs.normalization import Normalizer
from rl_training.errors import ConfigError, UserError
from rl_training.experiment import registry
from rl_training.runtime.automatic import AUTO, thread_count
from rl_training.runtime.checkpointing import CHECKPOINTS_DIR, check_checkpoint, find_checkpoint, read_checkpoint
from rl_training.runtime.evaluation import evaluate_agent
from rl_training.runtime.loggers import read_evaluations
from rl_training.runtime.run_card import read_run_card
from rl_training.runtime.run_utils import (
    limit_threads,
    require_free,
    resolve_device,
    saved_config_file,
    serialize_train_config,
)
from rl_training.runtime.trainer import EvalResult, TrainResult

if TYPE_CHECKING:
    from rl_training.runtime.callbacks import Callback

# What may change when a run is resumed: none of it, except the budget's schedules, touches what is learned.
RESUMABLE_CHANGES = (
    *("total_timesteps", "stop_at_step", "logging", "eval", "checkpoint", "device", "tags"),
    *("resume_strict", "resume"),
)
# Environments in turn and in processes give the same bits and the same snapshots.
SAME_BITS = ("sync", "async")


# Training chooses its best checkpoint by the episodes from eval.seed on; an honest evaluation plays others.
FRESH_SEEDS = 100_000


def locate_run(path: Path) -> Path:
    """Return the run directory of a run directory or of one of its checkpoints."""
    path = path.expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"{path} does not exist; name a run directory such as outputs/ppo/cartpole/<time>-<id>.")
    # checkpoints/step_…, or checkpoints/superseded/step_…
    run_dir = next((parent.parent for parent in [*path.parents][:2] if parent.name == CHECKPOINTS_DIR), path)
    if not saved_config_file(run_dir).is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    return run_dir


def load_run_config(run_dir: Path) -> TrainConfig:
    """Return the config that a run last used."""
    data = load_yaml(saved_config_file(run_dir))
    name = data.get("algo", {}).get("name", "")
    return typed_config(data, registry.get(name).config_class)


def evaluate_checkpoint(
    path: Path | str,
    *,
    checkpoint: str = "best",
    episodes: int = 20,
    seed: int | None = None,
    on_episode: Callable[[int], None] | None = None,
) -> EvalResult:
    """Play seeded deterministic episodes with a checkpoint of a run ("best", "last", a step), or with `path` itself.

    By default these are not the episodes that training evaluates on, since those have chosen the best checkpoint.
    """
    run_dir = locate_run(Path(path))
    return _play(run_dir, find_checkpoint(Path(path), checkpoint), episodes, seed, on_episode)


def repeat_evaluation(
    path: Path | str, *, checkpoint: str = "best", on_episode: Callable[[int], None] | None = None
) -> tuple[EvalResult, list[float]]:
    """Play the episodes again that training played at a checkpoint; returns them and the returns logged then."""
    run_dir = locate_run(Path(path))
    chosen = find_checkpoint(Path(path), checkpoint)
    step = check_checkpoint(chosen).global_step
    recorded = {row["step"]: row for row in read_evaluations(run_dir)}
    if step not in recorded:
        steps = ", ".join(map(str, recorded)) or "none"
        raise UserError(
            f"Training did not evaluate at step {step}; it did at: {steps}. Leave out episodes_from=recorded."
        )
    row = recorded[step]
    return _play(run_dir, chosen, len(row["seeds"]), row["seeds"][0], on_episode), row["returns"]


def _play(
    run_dir: Path, checkpoint: Path, episodes: int, seed: int | None, on_episode: Callable[[int], None] | None
) -> EvalResult:
    config = load_run_config(run_dir)
    limit_threads(thread_count(config))
    state = read_checkpoint(checkpoint)
    observation, actions = probe_spaces(config.env)
    build_agent = registry.get(config.algo.name).load_build_agent()
    agent = build_agent(config, observation, actions, _device_for_evaluation(config))
    normalizer = Normalizer(config.env, observation.size, config.algo.gamma)
    agent.load_state_dict(state["agent"])
    normalizer.load_state_dict(state["normalizer"])
    return evaluate_agent(
        agent,
        config,
        normalizer,
        episodes=episodes,
        seed=config.eval.seed + FRESH_SEEDS if seed is None else seed,
        global_step=state["session"]["global_step"],
        on_episode=on_episode,
    )


def _device_for_evaluation(config: TrainConfig) -> torch.device:
    """Return the run's device, or the CPU where this machine does not have it."""
    try:
        return resolve_device(config.device.kind)
    except UserError:
        return torch.device("cpu")


def resume_training(
    path: Path | str, *, config: TrainConfig | None = None, callbacks: Sequence["Callback"] = ()
) -> TrainResult:
    """Go on with a run in its own directory, from its newest intact checkpoint or from the one that `path` names.

    `config` may differ from the saved one only in `RESUMABLE_CHANGES`; without it, the run goes on to the end of its
    budget with the settings it has.
    """
    path = Path(path)
    run_dir = locate_run(path)
    saved = load_run_config(run_dir)
    if config is None:
        config = dataclasses.replace(saved, stop_at_step=None)  # it belongs to one launch
    else:
        check_resumable(saved, config)
        config = _without_choosing_again(saved, config)
    checkpoint = checkpoint_to_continue(path, config)
    if (step := finished_step(path, checkpoint, config)) is not None:
        raise UserError(f"{run_dir} is finished at step {step:,}; a larger total_timesteps goes further.")
    train = registry.get(config.algo.name).load_train()
    return train(config, run_dir=run_dir, callbacks=callbacks, checkpoint=checkpoint)


def _without_choosing_again(saved: TrainConfig, config: TrainConfig) -> TrainConfig:
    """Take what `auto` meant when the run began: a longer budget may mean something else, with other bits."""
    chosen = {key: getattr(saved.device, key) for key in ("threads", "compile") if getattr(config.device, key) == AUTO}
    device = dataclasses.replace(config.device, **chosen)
    return dataclasses.replace(config, device=device, env=_env_without_choosing_again(saved, config))


def _env_without_choosing_again(saved: TrainConfig, config: TrainConfig) -> EnvConfig:
    if config.env.vectorization is not Vectorization.auto:
        return config.env
    return dataclasses.replace(config.env, vectorization=saved.env.vectorization)


def checkpoint_to_continue(path: Path, config: TrainConfig, *, warn: bool = True) -> Path:
    """Return the checkpoint from which a run can go on, or say why it cannot."""
    run_dir = locate_run(path)
    require_free(run_dir)
    if path.expanduser().resolve().parent not in (run_dir.parent, run_dir / CHECKPOINTS_DIR):
        raise UserError(f"{path} was put aside, and its replay buffer may be gone. Resume {run_dir} instead.")
    checkpoint = find_checkpoint(path, to_train=True, warn=warn)
    reached = check_checkpoint(checkpoint).global_step
    if config.total_timesteps < min(reached, load_run_config(run_dir).total_timesteps):
        raise UserError(f"total_timesteps={config.total_timesteps} lies before step {reached}, where the run stands.")
    return checkpoint


def finished_step(path: Path, checkpoint: Path, config: TrainConfig) -> int | None:
    """Return the step at which a run came to its end, or None if it has more to do from this checkpoint."""
    run_dir = locate_run(path)
    card = read_run_card(run_dir)
    if card.get("status") != "finished" or path.expanduser().resolve() != run_dir:
        return None
    at_the_end = check_checkpoint(checkpoint).global_step == card["global_step"]
    more = config.total_timesteps > load_run_config(run_dir).total_timesteps
    return int(card["global_step"]) if at_the_end and not more else None


def _same_environments(key: str, before: Any, after: Any) -> bool:
    """Whether a change of an env setting leaves the environments what they are."""
    if key == "env.vectorization":
        return {before, after} <= {"auto", *SAME_BITS}
    return key in ("env.workers", "env.worker_timeout")


def check_resumable(saved: TrainConfig, config: TrainConfig) -> None:
    """Refuse changes that would make the resumed run another run."""
    config = dataclasses.replace(config, env=_env_without_choosing_again(saved, config))
    differences = [
        f"{key}: {before} -> {after}"
        for key, before, after in _differences(serialize_train_config(saved), serialize_train_config(config))
        if key.split(".")[0] not in RESUMABLE_CHANGES and not _same_environments(key, before, after)
    ]
    if differences:
        raise ConfigError(
            f"A resumed run cannot change {'; '.join(differences)}. "
            f"It may change {', '.join(RESUMABLE_CHANGES[:-1])}; for the rest start a new run."
        )


def _differences(before: Any, after: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            difference
            for key in keys
            for difference in _differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
        ]
    return [] if before == after else [(prefix, before, after)]
