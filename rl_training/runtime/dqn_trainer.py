"""Trains DQN: act epsilon-greedily, remember every transition, learn from random ones."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rl_training.algorithms.dqn import DQNAgent
from rl_training.algorithms.schedules import epsilon_at, rising
from rl_training.config import DQNConfig, TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.runtime.run_utils import agent_options, create_training_run, prepare_process
from rl_training.runtime.session import TrainingSession, crossings
from rl_training.runtime.trainer import TrainResult
from rl_training.seeding import derive_seed
from rl_training.spaces import ActionSpec, DiscreteActions, ObservationSpec


def build_dqn_agent(
    config: TrainConfig, observation: ObservationSpec, actions: ActionSpec, device: torch.device | None = None
) -> DQNAgent:
    """Make the agent that this config describes."""
    assert isinstance(config.algo, DQNConfig)
    assert isinstance(actions, DiscreteActions)
    return DQNAgent(config.algo, observation, actions, **agent_options(config, device))


def train_dqn(
    config: TrainConfig,
    *,
    run_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
) -> TrainResult:
    """Train DQN to the end of the budget; with a checkpoint, go on from it."""
    algo = config.algo
    assert isinstance(algo, DQNConfig)

    # Set up
    config, device = prepare_process(config)
    envs = TrainingEnvs(config)
    normalizer = Normalizer(config.env, envs.observation_spec.size, algo.gamma)
    agent = build_dqn_agent(config, envs.observation_spec, envs.action_spec, device)
    replay = ReplayBuffer(
        algo.buffer_size,
        envs.num_envs,
        envs.observation_spec,
        envs.action_spec,
        seed=derive_seed(config.seed, "replay sampling"),
        device=device,
        masked=envs.late_resets,
        n_step=algo.n_step,
        gamma=algo.gamma,
        priority_exponent=algo.priority_exponent if algo.prioritized else None,
    )
    run = create_training_run(config, run_dir, checkpoint)

    # Restore
    with TrainingSession(
        run, agent=agent, envs=envs, normalizer=normalizer, data=ReplayJournal(replay, run.run_dir), callbacks=callbacks
    ) as session:
        if not session.resumed:
            normalizer.update(envs.reset())
        normalizer.end_episodes(envs.restarted)
        replay.end_episodes(envs.restarted)
        observations = envs.observations

        while session.running:
            # Act
            epsilon = 1.0
            if session.global_step >= algo.learning_starts:
                epsilon = epsilon_at(
                    session.state.progress, algo.initial_epsilon, algo.final_epsilon, algo.exploration_fraction
                )
            actions = agent.explore(normalizer.observations(observations), session.vector_step, epsilon)

            # Step
            step = envs.step(agent.env_actions(actions))
            normalizer.update(step.observations, step.rewards, step.terminated, step.truncated, valid=step.valid)

            # Store
            replay.add(
                observations,
                actions,
                step.rewards,
                step.next_observations,
                step.terminated,
                step.truncated,
                step.valid,
            )
            observations = step.observations
            before = session.global_step
            session.record_step(step)

            # Update
            updates_due = crossings(before, session.global_step, algo.train_every)
            if updates_due:
                session.end_collect()
            if updates_due and session.global_step > algo.learning_starts:
                weight_exponent = rising(session.state.progress, algo.importance_exponent, 1.0)
                metrics = [
                    update(agent, replay, normalizer, weight_exponent) for _ in range(updates_due * algo.gradient_steps)
                ]
                session.end_update(metrics, epsilon=epsilon, learning_rate=algo.learning_rate)
            for _ in range(crossings(before, session.global_step, algo.target_update_every)):
                agent.update_target()

            # Events
            session.end_iteration()

        # Finish
        return session.finish()


def update(agent: DQNAgent, replay: ReplayBuffer, normalizer: Normalizer, weight_exponent: float) -> dict[str, Tensor]:
    """Take one gradient step on a fresh sample, and report its errors where they decide what is drawn next."""
    batch = replay.sample(
        agent.config.batch_size, normalizer.observations, normalizer.rewards, weight_exponent=weight_exponent
    )
    metrics = agent.update(batch)
    if agent.td_errors is not None:
        replay.set_errors(agent.td_errors.cpu().numpy())
    return metrics
