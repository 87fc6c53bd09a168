"""Trains SAC: act with the current stochastic policy, remember every transition, learn from random ones."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rl_training.algorithms.sac import SACAgent
from rl_training.config import SACConfig, TrainConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.runtime.run_utils import agent_options, create_training_run, prepare_process
from rl_training.runtime.session import TrainingSession, crossings
from rl_training.runtime.trainer import TrainResult
from rl_training.seeding import derive_seed
from rl_training.spaces import ActionSpec, ContinuousActions, ObservationSpec


def build_sac_agent(
    config: TrainConfig, observation: ObservationSpec, actions: ActionSpec, device: torch.device | None = None
) -> SACAgent:
    """Make the agent that this config describes."""
    assert isinstance(config.algo, SACConfig)
    assert isinstance(actions, ContinuousActions)
    return SACAgent(config.algo, observation, actions, **agent_options(config, device))


def train_sac(
    config: TrainConfig,
    *,
    run_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
) -> TrainResult:
    """Train SAC to the end of the budget; with a checkpoint, go on from it."""
    algo = config.algo
    assert isinstance(algo, SACConfig)

    # Set up
    config, device = prepare_process(config)
    envs = TrainingEnvs(config)
    normalizer = Normalizer(config.env, envs.observation_spec.size, algo.gamma)
    agent = build_sac_agent(config, envs.observation_spec, envs.action_spec, device)
    replay = ReplayBuffer(
        algo.buffer_size,
        envs.num_envs,
        envs.observation_spec,
        envs.action_spec,
        seed=derive_seed(config.seed, "replay sampling"),
        device=device,
        masked=envs.late_resets,
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
            if session.global_step < algo.learning_starts:
                actions = agent.random_actions(session.vector_step)
            else:
                actions = agent.explore(normalizer.observations(observations), session.vector_step)

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
                metrics = []
                for number in range(1, updates_due * algo.gradient_steps + 1):
                    batch = replay.sample(algo.batch_size, normalizer.observations, normalizer.rewards)
                    metrics.append(agent.update(batch, improve_policy=number % algo.policy_every == 0))
                session.end_update(metrics, learning_rate=algo.learning_rate)

            # Events
            session.end_iteration()

        # Finish
        return session.finish()
