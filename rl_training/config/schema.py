"""The one typed configuration of a run; its sections are the Hydra groups."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rl_training.config.algorithms import AlgoConfig
from rl_training.config.fields import check_fields, option


class DeviceKind(Enum):
    """Where the networks live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


# How the environments of a run step together. Made by a call, because "async" is a word of the language.
Vectorization = Enum(
    "Vectorization", {"auto": "auto", "sync": "sync", "async": "async", "vector": "vector", "envpool": "envpool"}
)


@dataclass
class EnvConfig:
    """Which environment, how many of it, and how its numbers are scaled."""

    name: str = option("gym", "The env group's name; names the run directory and the preset.")
    id: str = option("", "The Gymnasium id, such as CartPole-v1.")
    num_envs: int = option(1, "Environments that step together.", at_least=1)
    vectorization: Vectorization = option(
        Vectorization.auto,
        "How they step: sync in turn, async in worker processes, vector by Gymnasium's own vectorised version, envpool "
        "by EnvPool; auto is sync.",
    )
    workers: int | None = option(
        None, "Worker processes of async, threads of envpool; null is one for each core, at most num_envs.", at_least=1
    )
    worker_timeout: float | None = option(
        120.0, "Seconds after which a silent worker counts as hanging; null waits forever.", above=0, at_most=1e6
    )
    env_kwargs: dict[str, Any] = option({}, "Arguments for gymnasium.make: +env.env_kwargs.gravity=9.8.")
    wrappers: list[Any] = option(
        [], "Wrappers, innermost first: '[{name: time_limit, steps: 200}, {name: reward_scale, factor: 0.1}]'."
    )
    import_module: str | None = option(None, "A module to import first because it registers environments.")
    extra: str | None = option(None, "The extra of this package that installs the environment.")
    frame_stack: int = option(1, "Successive observations that the agent sees at once.", at_least=1, at_most=255)
    normalize_observation: bool = option(False, "Scale observations by their running mean and deviation.")
    normalize_reward: bool = option(False, "Scale rewards by the running deviation of the discounted return.")
    clip_observation: float = option(10.0, "Limit of a normalised observation.", above=0)
    clip_reward: float = option(10.0, "Limit of a normalised reward.", above=0)

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "env")


@dataclass
class DeviceConfig:
    """What the networks run on."""

    kind: DeviceKind = option(DeviceKind.auto, "auto takes CUDA if there is one, else the CPU.")
    threads: int | str = option(
        "auto", "CPU threads of torch; auto is 1, or 2 for layers of 512 and more.", words=("auto",), at_least=1
    )
    compile: bool | str = option(
        "auto", "Compile updates; auto does in runs long enough to win back the seconds.", words=("auto",)
    )

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "device")


@dataclass
class LoggingConfig:
    """What a run tells while it trains; none of it changes what is learned."""

    every: int = option(1_000, "Env steps between metric rows.", at_least=1)
    progress: bool = option(True, "Show a progress line.")
    metrics_file: bool = option(True, "Write metrics.jsonl.")
    tensorboard: bool = option(True, "Write TensorBoard events.")

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "logging")


@dataclass
class EvalConfig:
    """Evaluation while training: own environments, own seeds, deterministic actions."""

    every: int | None = option(10_000, "Env steps between evaluations; null evaluates only at the end.", at_least=1)
    episodes: int = option(10, "Episodes in an evaluation; 0 turns evaluation off.", at_least=0)
    seed: int = option(100_000, "Episode i resets with this seed plus i.", at_least=0)
    stop_at_return: float | None = option(None, "Stop when the mean return reaches this; null is off.")
    stop_after_no_improvement: int | None = option(
        None, "Stop after so many evaluations in a row without a new best; null is off.", at_least=1
    )

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "eval")


@dataclass
class CheckpointConfig:
    """When a run is saved and what is kept. Saving never changes what is learned."""

    every_seconds: float | None = option(60.0, "Seconds between checkpoints; null is off.", above=0)
    every: int | None = option(None, "Env steps between checkpoints, in addition; null is off.", at_least=1)
    keep_last: int = option(2, "How many of the newest checkpoints are kept.", at_least=1)
    keep_best: bool = option(True, "Also keep the checkpoint with the best evaluation.")

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "checkpoint")


@dataclass
class TrainConfig:
    """All that defines a run."""

    algo: AlgoConfig = field(default_factory=AlgoConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = option(1, "Every random number of the run derives from it.", at_least=0)
    total_timesteps: int = option(100_000, "Budget in env steps, over all environments.", at_least=0)
    tags: list[str] = option([], "Labels for finding the run again.")
    stop_at_step: int | None = option(
        None, "Save and leave at this env step, to go on later with resume=; null trains to the end.", at_least=1
    )
    resume_strict: bool = option(False, "Refuse to resume where the result could differ from an uninterrupted run.")
    resume: str | None = option(None, "A run directory, or one of its checkpoints, to continue.")
    preset: str | None = option(None, "The tuned preset that applied; presets set it themselves.")

    def __post_init__(self) -> None:
        """Check every field, and what depends on several sections."""
        check_fields(self, "")
        self.algo.check_with(self)
