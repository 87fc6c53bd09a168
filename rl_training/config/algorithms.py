"""Hyperparameters of the algorithms: the only place where a default, a meaning or a range is written."""

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from rl_training.config.fields import check_fields, option
from rl_training.errors import ConfigError

if TYPE_CHECKING:
    from rl_training.config.schema import TrainConfig


class Schedule(Enum):
    """How a value moves over the training budget: not at all, or in a straight line to zero."""

    constant = "constant"
    linear = "linear"


class Activation(Enum):
    """The nonlinearity between layers."""

    tanh = "tanh"
    relu = "relu"


class Cnn(Enum):
    """The convolutions in front of the hidden layers, for images: those of the Nature DQN, or two of 3x3."""

    nature = "nature"
    small = "small"


class QLoss(Enum):
    """How a temporal-difference error is penalised."""

    huber = "huber"
    mse = "mse"


@dataclass
class AlgoConfig:
    """What every algorithm has; `name` is its key in the registry."""

    compiling_pays_after: ClassVar[int | None] = None
    """Gradient steps from which `device.compile=auto` compiles; None means never."""

    name: str = option("", "The algorithm's name in the registry; set by algo=<name>.")
    gamma: float = option(0.99, "Discount factor.", at_least=0, at_most=1)
    learning_rate: float = option(3e-4, "Adam's step size.", above=0)
    max_grad_norm: float | None = option(None, "Clip the gradient's global norm; null leaves it alone.", above=0)
    activation: Activation = option(Activation.tanh, "Nonlinearity between layers.")
    hidden_sizes: list[int] = option([64, 64], "Width of each hidden layer.", at_least=1)
    cnn: Cnn = option(Cnn.nature, "Convolutions before them, if observations have images; small is for tiny ones.")

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, "algo")

    def check_with(self, config: "TrainConfig") -> None:
        """Check what depends on other sections; called once the whole config is known."""

    def second_update_step(self, num_envs: int) -> int:
        """Return an env step by which the algorithm has updated at least twice."""
        return num_envs

    def planned_gradient_steps(self, config: "TrainConfig") -> int:
        """Return how many gradient steps the whole budget holds, about."""
        return 0


@dataclass
class PPOConfig(AlgoConfig):
    """Proximal policy optimisation (Schulman et al., 2017)."""

    # Compiling takes 14 s from a completely cold start (3 s later on) and saves 0.4 ms a step.
    compiling_pays_after: ClassVar[int | None] = 60_000

    name: str = "ppo"
    learning_rate_schedule: Schedule = option(Schedule.constant, "How the learning rate moves over the budget.")
    num_steps: int = option(2048, "Vector steps in a rollout; it holds num_steps x num_envs transitions.", at_least=1)
    minibatch_size: int = option(64, "Transitions in a gradient step.", at_least=1)
    num_epochs: int = option(10, "Passes over each rollout.", at_least=1)
    gae_lambda: float = option(
        0.95, "Generalised advantage estimation: 0 is one-step, 1 is Monte Carlo.", at_least=0, at_most=1
    )
    clip_range: float = option(0.2, "How far the probability ratio may move from 1.", above=0)
    clip_range_schedule: Schedule = option(Schedule.constant, "How the clip range moves over the budget.")
    value_clip_range: float | None = option(None, "Clip the change of the value prediction; null is off.", above=0)
    normalize_advantage: bool = option(True, "Give each minibatch's advantages mean 0 and deviation 1.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", at_least=0)
    value_coef: float = option(0.5, "Weight of the value loss.", at_least=0)
    target_kl: float | None = option(
        None, "End an iteration's epochs beyond 1.5 x this divergence; null is off.", above=0
    )
    recompute_advantages: bool = option(False, "Estimate the advantages anew before each epoch.")
    share_network: bool = option(False, "Actor and critic share their hidden layers.")
    critic_hidden_sizes: list[int] | None = option(
        None, "Hidden layers of the critic; null is as in the actor.", at_least=1
    )
    critic_activation: Activation | None = option(None, "Nonlinearity of the critic; null is as in the actor.")
    orthogonal_init: bool = option(True, "Orthogonal weights, with a small last layer in the actor.")
    initial_log_std: float = option(
        0.0, "Logarithm of the first action deviation, or with state-dependent noise of that of its weights."
    )
    state_dependent_noise: bool = option(False, "Explore with noise that is a function of the state (gSDE).")
    noise_hold: int = option(8, "Vector steps for which that function is kept.", at_least=1)
    max_grad_norm: float | None = option(0.5, "Clip the gradient's global norm; null leaves it alone.", above=0)

    def second_update_step(self, num_envs: int) -> int:
        """Return the end of the second rollout."""
        return 2 * self.num_steps * num_envs

    def planned_gradient_steps(self, config: "TrainConfig") -> int:
        """Return rollouts x epochs x minibatches."""
        rollout = self.num_steps * config.env.num_envs
        return -(-config.total_timesteps // rollout) * self.num_epochs * -(-rollout // self.minibatch_size)

    def check_with(self, config: "TrainConfig") -> None:
        """Refuse a minibatch that no rollout can fill, and a critic that cannot share the actor's layers."""
        if self.share_network and (self.critic_hidden_sizes is not None or self.critic_activation is not None):
            raise ConfigError(
                "algo.share_network=true gives the critic the actor's hidden layers: leave algo.critic_hidden_sizes "
                "and algo.critic_activation at null."
            )
        rollout = self.num_steps * config.env.num_envs
        if self.minibatch_size > rollout:
            raise ConfigError(
                f"algo.minibatch_size={self.minibatch_size} is larger than a rollout of algo.num_steps x env.num_envs "
                f"= {self.num_steps} x {config.env.num_envs} = {rollout} transitions. "
                f"Try algo.minibatch_size={rollout}."
            )


@dataclass
class OffPolicyConfig(AlgoConfig):
    """What the algorithms that learn from a replay buffer share."""

    buffer_size: int = option(1_000_000, "Transitions that the replay buffer holds.", at_least=1)
    learning_starts: int = option(100, "Env steps of random actions before the first update.", at_least=0)
    batch_size: int = option(256, "Transitions in a gradient step.", at_least=1)
    train_every: int = option(1, "Env steps between updates; counts over all environments.", at_least=1)
    gradient_steps: int = option(1, "Gradient steps in an update.", at_least=1)

    def second_update_step(self, num_envs: int) -> int:
        """Return two training intervals after learning starts."""
        return self.learning_starts + 2 * max(self.train_every, num_envs)

    def planned_gradient_steps(self, config: "TrainConfig") -> int:
        """Return the updates after the learning start x their gradient steps."""
        return max(0, config.total_timesteps - self.learning_starts) // self.train_every * self.gradient_steps

    def check_with(self, config: "TrainConfig") -> None:
        """Refuse a replay buffer that cannot hold one vector step with all the frames it is stacked from."""
        if self.buffer_size < config.env.num_envs:
            raise ConfigError(
                f"algo.buffer_size={self.buffer_size} cannot hold one step of env.num_envs={config.env.num_envs} "
                f"environments. Try algo.buffer_size=1_000_000."
            )
        needed = config.env.frame_stack * config.env.num_envs
        if self.buffer_size < needed:
            raise ConfigError(
                f"algo.buffer_size={self.buffer_size} cannot hold env.frame_stack={config.env.frame_stack} frames of "
                f"env.num_envs={config.env.num_envs} environments. Try algo.buffer_size={100 * needed}."
            )


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-learning (Mnih et al., 2015) with double Q (van Hasselt et al., 2016) and further parts of Rainbow."""

    # Compiling takes 14 s from a completely cold start (3 s later on) and saves 0.16 ms a step.
    compiling_pays_after: ClassVar[int | None] = 150_000

    name: str = "dqn"
    learning_rate: float = option(1e-4, "Adam's step size.", above=0)
    batch_size: int = option(32, "Transitions in a gradient step.", at_least=1)
    train_every: int = option(4, "Env steps between updates; counts over all environments.", at_least=1)
    target_update_every: int = option(10_000, "Env steps between updates of the target network.", at_least=1)
    target_update_rate: float = option(1.0, "1 copies the network to its target; less blends them.", above=0, at_most=1)
    initial_epsilon: float = option(1.0, "Share of random actions at the start.", at_least=0, at_most=1)
    final_epsilon: float = option(0.05, "Share of random actions after the exploration phase.", at_least=0, at_most=1)
    exploration_fraction: float = option(0.1, "Share of the budget over which epsilon falls.", at_least=0, at_most=1)
    double_q: bool = option(True, "Choose the next action by the online network, value it by the target.")
    dueling: bool = option(False, "Split the action values into a state value and advantages (Wang et al., 2016).")
    n_step: int = option(1, "Rewards summed up in a target before it looks at the next value.", at_least=1)
    prioritized: bool = option(False, "Draw transitions by their error (Schaul et al., 2016).")
    priority_exponent: float = option(0.6, "How much the error decides: 0 not at all.", at_least=0, at_most=1)
    importance_exponent: float = option(
        0.4, "How far weights undo the preference at first; rises to 1 over the budget.", at_least=0, at_most=1
    )
    loss: QLoss = option(QLoss.huber, "Penalty on the temporal-difference error.")
    max_grad_norm: float | None = option(10.0, "Clip the gradient's global norm; null leaves it alone.", above=0)
    activation: Activation = option(Activation.relu, "Nonlinearity between layers.")

    def check_with(self, config: "TrainConfig") -> None:
        """Refuse a replay buffer that cannot hold the steps of an n-step return."""
        super().check_with(config)
        needed = self.n_step * config.env.num_envs
        if self.buffer_size < needed:
            raise ConfigError(
                f"algo.buffer_size={self.buffer_size} cannot hold algo.n_step={self.n_step} steps of "
                f"env.num_envs={config.env.num_envs} environments. Try algo.buffer_size={100 * needed}."
            )


@dataclass
class SACConfig(OffPolicyConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al., 2018)."""

    # Compiling takes 15 s from a completely cold start (3 s later on) and saves 1.5 ms a step at 256x256.
    compiling_pays_after: ClassVar[int | None] = 30_000

    name: str = "sac"
    policy_every: int = option(
        1, "Gradient steps on the critics for one on the policy; divides gradient_steps.", at_least=1
    )
    target_update_rate: float = option(0.005, "How far the target critics move per gradient step.", above=0, at_most=1)
    learn_temperature: bool = option(True, "Adjust the temperature so that the policy keeps its target entropy.")
    temperature: float = option(1.0, "Weight of the entropy: the first value if learned, else fixed.", above=0)
    target_entropy: float | None = option(
        None, "Entropy to keep, in nats; null is minus the number of action dimensions."
    )
    critic_layer_norm: bool = option(False, "Normalise the critics' hidden layers, which many gradient steps need.")
    state_dependent_noise: bool = option(False, "Explore with noise that is a function of the state (gSDE).")
    noise_hold: int = option(8, "Vector steps for which that function is kept.", at_least=1)
    initial_log_std: float = option(-3.0, "Logarithm of its first deviation (state-dependent noise).")
    activation: Activation = option(Activation.relu, "Nonlinearity between layers.")
    hidden_sizes: list[int] = option([256, 256], "Width of each hidden layer.", at_least=1)

    def check_with(self, config: "TrainConfig") -> None:
        """Refuse a policy that would not learn in every update."""
        super().check_with(config)
        if self.gradient_steps % self.policy_every:
            raise ConfigError(
                f"algo.policy_every={self.policy_every} must divide algo.gradient_steps={self.gradient_steps}. "
                f"Try algo.gradient_steps={self.policy_every}."
            )
