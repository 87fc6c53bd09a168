"""One run for every kind of observation and action, each to a stated return; and paused ones end with the same bits."""

import pytest
from cli_helpers import differences, run_card
from test_checkpoint_workflows import final_state, train

from rl_training.errors import UserError
from rl_training.experiment.default_manager import DefaultExperimentManager, check_experiment
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.workflows import evaluate_checkpoint, resume_training

# What a step pays does not depend on the steps before, so gamma is 0.
ALGOS = {
    "ppo": {"num_steps": 32, "minibatch_size": 64, "num_epochs": 10, "learning_rate": 5e-3, "initial_log_std": -1.0},
    "dqn": {"learning_starts": 64, "batch_size": 64, "learning_rate": 3e-3, "target_update_every": 200},
    "sac": {"learning_starts": 64, "batch_size": 64, "learning_rate": 3e-3, "train_every": 4, "temperature": 0.1},
}
STEPS = {"ppo": 2_048, "dqn": 2_400, "sac": 2_400}


def learn(tiny_config, run_dir, algo, env, *, algo_settings=None, total_timesteps=None, **env_settings):
    """Train, and return the mean return of 20 episodes of 10 steps."""
    config = tiny_config(
        *(algo, env),
        algo={"hidden_sizes": [32], "cnn": "small", "gamma": 0.0, **ALGOS[algo], **(algo_settings or {})},
        env={"num_envs": 8, **env_settings},
        total_timesteps=total_timesteps or STEPS[algo],
        eval={"episodes": 20},
    )
    result = DefaultExperimentManager().setup(config, run_dir=run_dir).train()
    return result.metrics["eval/return_mean"]


# A state named by chance pays 1 in 4 steps, one bit known 5 in 10; all ten right pay 10.
@pytest.mark.parametrize(
    "shown",
    [
        *("matrix", "bytes", "discrete", "multi discrete", "multi binary", "dict", "tuple"),
        *("image", "image and vector"),
    ],
)
def test_ppo_learns_from_every_kind_of_observation(tiny_config, tmp_path, shown):
    assert learn(tiny_config, tmp_path, "ppo", "toy/Naming-v0", env_kwargs={"shown": shown}) == 10.0


@pytest.mark.parametrize("answered", ["discrete", "multi discrete", "multi binary"])
def test_ppo_learns_every_kind_of_choice(tiny_config, tmp_path, answered):
    kinds = {"shown": "multi binary", "answered": answered}
    assert learn(tiny_config, tmp_path, "ppo", "toy/Naming-v0", env_kwargs=kinds) == 10.0


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_a_matrix_of_real_numbers_is_learned(tiny_config, tmp_path, algo):
    # Doing nothing costs 0.25 for each bit and pays 5; an error of 0.2 in both numbers of every action pays 9.2.
    kinds = {"shown": "multi binary", "answered": "box"}
    assert learn(tiny_config, tmp_path, algo, "toy/Naming-v0", env_kwargs=kinds) > 9.2


@pytest.mark.parametrize("shown", ["image", "image and vector", "tuple"])
def test_dqn_learns_from_images_and_vectors(tiny_config, tmp_path, shown):
    assert learn(tiny_config, tmp_path, "dqn", "toy/Naming-v0", env_kwargs={"shown": shown}) == 10.0


def test_sac_learns_from_images(tiny_config, tmp_path):
    kinds = {"shown": "image", "answered": "box"}
    assert learn(tiny_config, tmp_path, "sac", "toy/Naming-v0", env_kwargs=kinds) > 9.2


# The first picture of an episode does not tell the direction: 9 to 10 of 10 is all there is. Without a memory half of
# the steps are right, about 5.
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_stacked_frames_show_what_one_frame_does_not(tiny_config, tmp_path, algo):
    stacked = learn(tiny_config, tmp_path / "2", algo, "toy/Motion-v0", frame_stack=2, total_timesteps=2_400)
    assert stacked >= 9.0
    single = learn(tiny_config, tmp_path / "1", algo, "toy/Motion-v0", total_timesteps=2_400)
    assert single < 7.0


def test_stacked_vectors_show_what_one_vector_does_not(tiny_config, tmp_path):
    env = {"env_kwargs": {"as_vector": True}, "frame_stack": 2}
    assert learn(tiny_config, tmp_path, "dqn", "toy/Motion-v0", **env, total_timesteps=2_400) >= 9.0


# What does not fit is refused


@pytest.mark.parametrize("algo", ["dqn", "sac"])
@pytest.mark.parametrize("answered", ["multi discrete", "multi binary"])
def test_several_choices_are_refused_by_what_cannot_learn_them(tiny_config, algo, answered):
    config = tiny_config(algo, "toy/Naming-v0", env={"env_kwargs": {"answered": answered}})
    with pytest.raises(UserError) as refusal:
        check_experiment(config)
    assert str(refusal.value) == (
        f"algo={algo} cannot train on toy/Naming-v0, which has 2 discrete choices in each action. Use algo=ppo."
    )


@pytest.mark.parametrize(
    ("algo", "answered", "fitting"), [("dqn", "box", "ppo or algo=sac"), ("sac", "discrete", "dqn")]
)
def test_actions_of_the_other_kind_are_refused(tiny_config, algo, answered, fitting):
    config = tiny_config(algo, "toy/Naming-v0", env={"env_kwargs": {"answered": answered}})
    with pytest.raises(UserError, match=rf"algo={algo} cannot train on toy/Naming-v0, .* Use algo={fitting}"):
        check_experiment(config)


def test_images_are_not_normalised(tiny_config):
    env = {"env_kwargs": {"shown": "image and vector"}, "normalize_observation": True}
    with pytest.raises(UserError, match=r"^env\.normalize_observation=true is for vectors.* Leave it at false\.$"):
        check_experiment(tiny_config("ppo", "toy/Naming-v0", env=env))


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_a_replay_buffer_that_cannot_hold_a_stack_is_refused(tiny_config, algo):
    # 4 frames of 3 environments; with 12 there is one vector step left to sample.
    env, sizes = {"num_envs": 3, "frame_stack": 4}, {"learning_starts": 3}
    with pytest.raises(UserError, match=r"algo\.buffer_size=11 cannot hold env\.frame_stack=4 .*buffer_size=1200\.$"):
        tiny_config(algo, "toy/Motion-v0", algo={"buffer_size": 11, **sizes}, env=env)
    tiny_config(algo, "toy/Motion-v0", algo={"buffer_size": 12, **sizes}, env=env)


def test_the_smallest_replay_buffer_that_holds_a_stack_trains(tiny_config, tmp_path):
    sizes = {"buffer_size": 12, "learning_starts": 3, "n_step": 3, "prioritized": True, "cnn": "small"}
    config = tiny_config("dqn", "toy/Motion-v0", algo=sizes, env={"num_envs": 3, "frame_stack": 4}, total_timesteps=90)
    assert train(config, tmp_path / "run").checkpoint_path.name == "step_000000000090"


@pytest.mark.parametrize("frames", [0, 256])
def test_a_stack_has_1_to_255_frames(tiny_config, frames):
    with pytest.raises(UserError, match=r"env\.frame_stack"):
        tiny_config("dqn", "toy/Motion-v0", env={"frame_stack": frames})


# Exactness

IMAGE_AND_VECTOR = {"id": "toy/Naming-v0", "env_kwargs": {"shown": "image and vector"}}
MOTION = {"id": "toy/Motion-v0", "env_kwargs": {"fatal": True}}
BUFFER = {"buffer_size": 100, "train_every": 4, "batch_size": 8, "learning_starts": 20}  # the ring comes round
EXACT = {
    "ppo, image and vector": ("ppo", IMAGE_AND_VECTOR, {}),
    "ppo, stacked images": ("ppo", {**MOTION, "frame_stack": 3}, {}),
    "ppo, several choices": (
        *("ppo", {"id": "toy/Naming-v0", "env_kwargs": {"shown": "tuple", "answered": "multi discrete"}}, {}),
    ),
    "dqn, image and vector": ("dqn", IMAGE_AND_VECTOR, BUFFER),
    "dqn, stacked images, three steps, priorities, dueling": (
        *("dqn", {**MOTION, "frame_stack": 3}),
        {**BUFFER, "n_step": 3, "prioritized": True, "dueling": True},
    ),
    "dqn, stacked images": ("dqn", {**MOTION, "frame_stack": 4}, BUFFER),
    "dqn, stacked vectors": (
        "dqn",
        {"id": "toy/Motion-v0", "env_kwargs": {"as_vector": True}, "frame_stack": 3},
        BUFFER,
    ),
    "sac, image": ("sac", {"id": "toy/Naming-v0", "env_kwargs": {"shown": "image", "answered": "box"}}, BUFFER),
    "sac, two critic steps for one of the policy": (
        *("sac", {"id": "toy/Naming-v0", "env_kwargs": {"answered": "box"}}),
        {**BUFFER, "gradient_steps": 4, "policy_every": 2},
    ),
}


def exact_config(tiny_config, kind, **settings):
    algo, env, algo_settings = EXACT[kind]
    return tiny_config(
        algo,
        env["id"],
        algo={"hidden_sizes": [8], "cnn": "small", **algo_settings},
        env={**env, "num_envs": 2},
        **{"total_timesteps": 192, "eval": {"episodes": 1, "every": 64}, "logging": {"every": 16}, **settings},
    )


@pytest.mark.parametrize("kind", EXACT)
def test_a_paused_run_ends_with_the_bits_of_one_that_was_not(tiny_config, tmp_path, kind):
    # 22 is just after learning starts; at 106 the ring has come round, in the middle of an episode and of a rollout.
    whole = train(exact_config(tiny_config, kind), tmp_path / "whole").run_dir
    for stop in (22, 106):
        run_dir = tmp_path / f"paused at {stop}"
        paused = train(exact_config(tiny_config, kind, stop_at_step=stop), run_dir)
        assert paused.checkpoint_path.name == f"step_{stop:012d}"
        assert resume_training(run_dir).checkpoint_path.name == "step_000000000192"
        assert run_card(run_dir)["status"] == "finished"
        assert differences(final_state(run_dir), final_state(whole)) == []
        assert first_difference(run_dir, whole) is None


def test_a_checkpoint_of_images_plays_the_episodes_again_that_it_was_evaluated_on(tiny_config, tmp_path):
    config = exact_config(tiny_config, "dqn, stacked images")
    result = train(config, tmp_path / "run")
    again = evaluate_checkpoint(result.run_dir, checkpoint="last", episodes=1, seed=config.eval.seed)
    assert again.summary.mean == result.metrics["eval/return_mean"]
