"""The manager behind the command line and the Python API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_training.config import TrainConfig
from rl_training.errors import ConfigError
from rl_training.experiment import registry
from rl_training.spaces import ContinuousActions

if TYPE_CHECKING:
    from rl_training.runtime.callbacks import Callback
    from rl_training.runtime.trainer import TrainResult


@dataclass(frozen=True)
class PreparedTrainer:
    """A checked run that starts when `train` is called."""

    start: "Callable[[], TrainResult]"

    def train(self) -> "TrainResult":
        """Train to the end of the budget."""
        return self.start()


class DefaultExperimentManager:
    """Finds the algorithm in the registry and trains it, from the start or from a checkpoint."""

    def setup(
        self, config: TrainConfig, callbacks: "Sequence[Callback]" = (), run_dir: Path | None = None
    ) -> PreparedTrainer:
        """Check that algorithm, environment and device go together, and return a trainer for a new run."""
        check_experiment(config)
        train = registry.get(config.algo.name).load_train()
        return PreparedTrainer(lambda: train(config, run_dir=run_dir, callbacks=callbacks))

    def resume(
        self, checkpoint: Path | str, callbacks: "Sequence[Callback]" = (), config: TrainConfig | None = None
    ) -> PreparedTrainer:
        """Return a trainer that continues a run directory or one of its checkpoints."""
        from rl_training.runtime.workflows import locate_run, resume_training

        locate_run(Path(checkpoint))
        return PreparedTrainer(lambda: resume_training(checkpoint, config=config, callbacks=callbacks))


def check_experiment(config: TrainConfig) -> None:
    """Refuse what no single section of the config can know: algorithm against environment, device against machine."""
    spec = registry.get(config.algo.name)
    if not isinstance(config.algo, spec.config_class):
        raise ConfigError(f"algo.name={config.algo.name} does not match the other algo settings; use algo=<name>.")

    from rl_training.envs.factory import check_vectorization, probe_spaces

    observation, actions = probe_spaces(config.env)
    check_vectorization(config.env)
    registry.check_actions(spec, actions, config.env.id)
    if getattr(config.algo, "state_dependent_noise", False) and not isinstance(actions, ContinuousActions):
        raise ConfigError(
            f"algo.state_dependent_noise=true needs continuous actions, and {config.env.id} has discrete ones. "
            "Leave it at false."
        )

    if config.env.normalize_observation and observation.images:
        raise ConfigError(
            f"env.normalize_observation=true is for vectors, and {config.env.id} has images, which the network scales "
            "itself. Leave it at false."
        )

    from rl_training.runtime.run_utils import resolve_device

    resolve_device(config.device.kind)
