"""Trains PPO: collect a rollout with the current policy, learn from it for a few epochs, forget it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.ppo import PPOAgent, explained_variance
from rl_training.algorithms.schedules import scheduled
from rl_training.config import PPOConfig, TrainConfig
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.envs.normalization import Normalizer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.run_utils import agent_options, create_training_run, prepare_process
from rl_training.runtime.session import TrainingSession
from rl_training.runtime.trainer import TrainResult
from rl_training.seeding import derive_seed
from rl_training.spaces import ActionSpec, ObservationSpec


def build_ppo_agent(
    config: TrainConfig, observation: ObservationSpec, actions: ActionSpec, device: torch.device | None = None
) -> PPOAgent:
    """Make the agent that this config describes."""
    assert isinstance(config.algo, PPOConfig)
    return PPOAgent(config.algo, observation, actions, **agent_options(config, device))


def train_ppo(
    config: TrainConfig,
    *,
    run_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | None = None,
) -> TrainResult:
    """Train PPO to the end of the budget, rounded up to whole rollouts; with a checkpoint, go on from it."""
    algo = config.algo
    assert isinstance(algo, PPOConfig)

    # Set up
    config, device = prepare_process(config)
    envs = TrainingEnvs(config)
    normalizer = Normalizer(config.env, envs.observation_spec.size, algo.gamma)
    agent = build_ppo_agent(config, envs.observation_spec, envs.action_spec, device)
    rollout = RolloutBuffer(
        algo.num_steps,
        envs.num_envs,
        envs.observation_spec,
        envs.action_spec,
        seed=derive_seed(config.seed, "minibatches"),
        device=device,
        masked=envs.late_resets,
    )
    run = create_training_run(config, run_dir, checkpoint)

    # Restore
    with TrainingSession(
        run, agent=agent, envs=envs, normalizer=normalizer, data=rollout, callbacks=callbacks
    ) as session:
        if not session.resumed:
            normalizer.update(envs.reset())
        normalizer.end_episodes(envs.restarted)
        rollout.end_episodes(envs.restarted, normalizer.observations(envs.abandoned_observations))
        observations = normalizer.observations(envs.observations)

        while session.running:
            while not rollout.full and not session.leaving:
                # Act
                actions = agent.explore(observations, session.vector_step)

                # Step
                step = envs.step(agent.env_actions(actions))
                normalizer.update(step.observations, step.rewards, step.terminated, step.truncated, valid=step.valid)

                # Store
                rollout.add(
                    observations,
                    actions,
                    normalizer.rewards(step.rewards),
                    step.terminated,
                    step.truncated,
                    normalizer.observations(step.next_observations),
                    step.valid,
                )
                observations = normalizer.observations(step.observations)
                session.record_step(step)
                if not rollout.full:
                    session.save_if_asked()
            if not rollout.full:
                break  # leaving early: the part that is collected goes into the checkpoint
            session.end_collect()

            # Update
            clip_range = scheduled(algo.clip_range, algo.clip_range_schedule, session.progress_before)
            learning_rate = scheduled(algo.learning_rate, algo.learning_rate_schedule, session.progress_before)
            metrics = update_epochs(
                agent, rollout, torch.from_numpy(observations), clip_range=clip_range, learning_rate=learning_rate
            )
            session.end_update(metrics, clip_range=clip_range, learning_rate=learning_rate)
            rollout.reset()

            # Events
            session.end_iteration()

        # Finish
        return session.finish()


def estimate_advantages(agent: PPOAgent, rollout: RolloutBuffer, next_observations: Tensor) -> None:
    """Value every step of the rollout in one pass, and weigh its actions by it."""
    observations = rollout.obs.flatten(0, 1)
    everything = torch.cat([observations, next_observations, rollout.truncated_observations()])
    values, last_values, truncated_values = torch.tensor_split(
        agent.values(everything), [len(observations), len(observations) + len(next_observations)]
    )
    rollout.values = values.view_as(rollout.values)
    rollout.compute_returns_and_advantages(
        last_values=last_values,
        truncated_values=truncated_values,
        gamma=agent.config.gamma,
        gae_lambda=agent.config.gae_lambda,
    )


def update_epochs(
    agent: PPOAgent, rollout: RolloutBuffer, next_observations: Tensor, *, clip_range: float, learning_rate: float
) -> list[dict[str, Tensor]]:
    """Go over the rollout `num_epochs` times in minibatches; a large change of the policy ends it early."""
    algo = agent.config
    # The policy was frozen while it collected: what it thought of each action can be asked now, in one pass.
    log_probs = agent.log_probs(rollout.obs.flatten(0, 1), rollout.actions.flatten(0, 1))
    rollout.logprobs = log_probs.view_as(rollout.logprobs)
    estimate_advantages(agent, rollout, next_observations)
    variance_explained = explained_variance(*rollout.valued())
    metrics = []
    for number in range(algo.num_epochs):
        if number and algo.recompute_advantages:
            estimate_advantages(agent, rollout, next_observations)
        epoch = [
            agent.update(batch, clip_range=clip_range, learning_rate=learning_rate)
            for batch in rollout.iter_minibatches(algo.minibatch_size)
        ]
        metrics += [{**entry, "policy/explained_variance": variance_explained} for entry in epoch]
        if (
            algo.target_kl is not None
            and np.mean([float(entry["policy/kl"]) for entry in epoch]) > 1.5 * algo.target_kl
        ):
            break
    return metrics
