"""The contract of an experiment manager: how a config or a checkpoint becomes a trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rl_training.config import TrainConfig

if TYPE_CHECKING:
    from rl_training.runtime.callbacks import Callback
    from rl_training.runtime.trainer import Trainer


@runtime_checkable
class ExperimentManager(Protocol):
    """Sets up new runs and picks up old ones."""

    def setup(
        self, config: TrainConfig, callbacks: "Sequence[Callback]" = (), run_dir: Path | None = None
    ) -> "Trainer":
        """Check the config and return a trainer for a new run."""
        ...

    def resume(
        self, checkpoint: Path | str, callbacks: "Sequence[Callback]" = (), config: TrainConfig | None = None
    ) -> "Trainer":
        """Return a trainer that continues a run directory or one of its checkpoints."""
        ...
