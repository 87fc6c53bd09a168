"""Which algorithms exist. Adding one means registering an `AlgorithmSpec`; nothing else in the package names them.

Code is referenced as "module:attribute" and imported on first use, so that reading a config never imports torch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_training.config import AlgoConfig, DQNConfig, PPOConfig, SACConfig
from rl_training.errors import ConfigError, UserError, did_you_mean
from rl_training.spaces import ActionSpec, ContinuousActions, DiscreteActions, MultiDiscreteActions

if TYPE_CHECKING:
    from rl_training.runtime.trainer import TrainFunction


@dataclass(frozen=True)
class Capabilities:
    """Which action spaces an algorithm can learn."""

    discrete_actions: bool = False
    continuous_actions: bool = False
    unbounded_actions: bool = False
    several_choices: bool = False


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm: its name, its config class, and where its code is.

    `train` has the signature of `train_ppo`; `build_agent(config, observation_spec, action_spec, device)` makes an
    untrained agent for evaluation.
    """

    name: str
    config_class: type[AlgoConfig]
    train: str
    build_agent: str
    capabilities: Capabilities

    def load_train(self) -> "TrainFunction":
        """Import and return the train function."""
        function: TrainFunction = _load(self.train)
        return function

    def load_build_agent(self) -> Any:
        """Import and return the function that makes an agent."""
        return _load(self.build_agent)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise UserError(f"The registered {reference} does not exist: {module} has no {attribute}.") from None


_SPECS: dict[str, AlgorithmSpec] = {}


def register(spec: AlgorithmSpec) -> None:
    """Add an algorithm. Names must not contain "_", which separates algorithm and environment in preset names."""
    if "_" in spec.name or not spec.name:
        raise ValueError(f"Algorithm name {spec.name!r} must not be empty or contain an underscore.")
    if spec.name in _SPECS and _SPECS[spec.name] != spec:
        raise ValueError(f"Algorithm {spec.name!r} is already registered as {_SPECS[spec.name].train}.")
    if spec.config_class().name != spec.name:
        raise ValueError(f"{spec.config_class.__name__} needs a field name: str = {spec.name!r}.")
    _SPECS[spec.name] = spec


def get(name: str) -> AlgorithmSpec:
    """Return the algorithm with this name, or suggest the closest one."""
    if name not in _SPECS:
        raise ConfigError(f"Unknown algorithm {name!r}.{did_you_mean(name, names())} Choose from {', '.join(names())}.")
    return _SPECS[name]


def names() -> list[str]:
    """Return the names of all registered algorithms."""
    return sorted(_SPECS)


def check_actions(spec: AlgorithmSpec, actions: ActionSpec, env_id: str) -> None:
    """Refuse an algorithm that cannot learn in this action space, and name those that can."""
    if _fits(spec, actions):
        return
    fitting = [other.name for other in _SPECS.values() if _fits(other, actions)]
    raise UserError(
        f"algo={spec.name} cannot train on {env_id}, which has {_kind(actions)}. "
        f"Use algo={' or algo='.join(sorted(fitting))}."
    )


def _kind(actions: ActionSpec) -> str:
    if isinstance(actions, DiscreteActions):
        return f"{actions.count} discrete actions"
    if isinstance(actions, MultiDiscreteActions):
        return f"{len(actions.counts)} discrete choices in each action"
    return f"continuous actions{'' if _bounded(actions) else ' without bounds'}"


def _fits(spec: AlgorithmSpec, actions: ActionSpec) -> bool:
    if isinstance(actions, DiscreteActions):
        return spec.capabilities.discrete_actions
    if isinstance(actions, MultiDiscreteActions):
        return spec.capabilities.several_choices
    return spec.capabilities.continuous_actions and (_bounded(actions) or spec.capabilities.unbounded_actions)


def _bounded(actions: ContinuousActions) -> bool:
    return all(abs(bound) != float("inf") for bound in (*actions.low, *actions.high))


register(
    AlgorithmSpec(
        name="ppo",
        config_class=PPOConfig,
        train="rl_training.runtime.ppo_trainer:train_ppo",
        build_agent="rl_training.runtime.ppo_trainer:build_ppo_agent",
        capabilities=Capabilities(
            discrete_actions=True, continuous_actions=True, unbounded_actions=True, several_choices=True
        ),
    )
)
register(
    AlgorithmSpec(
        name="dqn",
        config_class=DQNConfig,
        train="rl_training.runtime.dqn_trainer:train_dqn",
        build_agent="rl_training.runtime.dqn_trainer:build_dqn_agent",
        capabilities=Capabilities(discrete_actions=True),
    )
)
register(
    AlgorithmSpec(
        name="sac",
        config_class=SACConfig,
        train="rl_training.runtime.sac_trainer:train_sac",
        build_agent="rl_training.runtime.sac_trainer:build_sac_agent",
        capabilities=Capabilities(continuous_actions=True),
    )
)
