"""What `whet check` says of PPO."""

import pytest
import yaml

from whet.errors import ConfigError
from whet.plan.prepare import prepare


@pytest.fixture
def problems(tmp_path, tiny_model_folder):
    def problems(overrides=(), **algorithm):
        document = {
            "run": {"folder": str(tmp_path / "run"), "steps": 4},
            "model": {"path": str(tiny_model_folder)},
            "algorithm": {"use": "ppo", **algorithm},
            "backend": {"use": "fsdp2"},
            "roles": {"critic": {"like": "backend", "head": "value"}},
            "generator": {"use": "hf"},
            "rollout": {"max_tokens": 8},
            "environments": [{"use": "arithmetic"}],
        }
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(document))
        try:
            prepare(path, overrides)
        except ConfigError as error:
            return [problem.partition(": ")[2] for problem in error.problems]  # without the place
        return []

    return problems


def test_it_is_right_as_it_stands(problems):
    assert problems() == []
    assert problems(covariance={"method": "kl-cov"}) == []
    assert problems(covariance={"method": "kl-cov"}, minibatches=1, old_logprobs="sampler") == []
    assert problems(["rollout.max_staleness=1"], covariance={"method": "kl-cov"}, minibatches=1) == []
    assert problems(loss="clipped-pg", filters=["unequal-rewards"], group_size=4) == []


def test_without_a_critic_it_says_what_to_add(problems):
    example = "roles: {critic: {like: backend, head: value}}"
    assert f"roles: has no critic, which ppo trains beside the policy; add `{example}`" in problems(["roles={}"])


def test_a_critic_without_values_is_refused_once(problems):
    (found,) = problems(["roles.critic.head=lm"])
    assert found.startswith("roles.critic: must give the model output 'values'; it gives entropy")


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss": "value-clip"}, "algorithm.loss: reads no 'advantages', so nothing that ppo finds out would reach it"),
        ({"loss": "nll"}, "algorithm.loss: reads no 'advantages', so nothing that ppo finds out would reach it"),
        ({"loss": "gspo"}, "algorithm.loss: wants one advantage for each sequence"),
        ({"value_loss": "ppo-clip"}, "algorithm.value_loss: is no loss of a critic"),
        ({"minibatches": 33}, "algorithm.minibatches: is 33, more than the 32 x 1 responses of a step"),
        (
            {"kl_reward": {"weight": 0.1, "adaptive": {"target": 6.0, "horizon": 6.0}}},
            "algorithm.kl_reward.adaptive.horizon: is 6, and a step has 32 x 1 episodes: one of 30 or more can turn",
        ),
        ({"critic_warmup": 4}, "algorithm.critic_warmup: is 4 of 4 steps, so the policy would never learn"),
        ({"filters": ["unequal-rewards"]}, "algorithm.filters.0: compares at least 2 samples of one task"),
        ({"loss": {"use": "ppo-clip", "kl": {"weight": 0.1}}}, "backend.reference: ppo scores with the weights"),
        (
            {"loss": {"use": "ppo-clip", "kl": {"estimator": "k2", "straight_through": True}}},
            "algorithm.loss.kl.straight_through: changes nothing for k2",
        ),
        ({"kl_reward": {"adaptive": {"target": 6.0}}}, "algorithm.kl_reward.adaptive.target: has no effect on a"),
        ({"loss": {"use": "ppo-clip", "count_masked": True}}, "algorithm.loss.count_masked: has no effect on the"),
        ({"loss": "gmpo"}, "algorithm.loss: wants one advantage for each sequence"),
        ({"kl_reward": {"weight": 0.1}}, "backend.reference: ppo scores with the weights 'reference'"),
        (
            {"loss": {"use": "ppo-clip", "aggregation": "constant"}},
            "algorithm.loss.max_length: is 0, and the aggregation",
        ),
        (
            {"loss": {"use": "weighted-sum", "terms": [{"use": "ppo-clip", "aggregation": "constant"}]}},
            "algorithm.loss.terms.0.max_length: is 0, and the aggregation",
        ),
        ({"value_loss": {"use": "value-clip", "count_empty": True}}, "algorithm.value_loss.count_empty: has no effect"),
        ({"loss": {"use": "ppo-clip", "clip_dual": 1.1}}, "algorithm.loss.clip_dual: is 1.1, wanted more than 1 +"),
        ({"overlong": {"mask": True}, "gae": {"truncated": "bootstrap"}}, "algorithm.gae.truncated: has no effect"),
        ({"old_logprobs": "sampler", "correction": {"mask": "token"}}, "algorithm.correction: compares the trainer's"),
        (
            {"covariance": {"method": "kl-cov"}, "minibatches": 1},
            "algorithm.covariance.method: is kl-cov, which has no",
        ),
        (
            {"loss": {"use": "clipped-pg", "off_policy": {"since": "old", "threshold": 0.5}}, "minibatches": 1},
            "algorithm.loss.off_policy.since: has no effect with one optimizer step",
        ),
        (
            {"loss": {"use": "ppo-clip", "kl_old": {"weight": 0.1, "to": "old"}}, "minibatches": 1},
            "algorithm.loss.kl_old.to: has no effect with one optimizer step",
        ),
        (
            {"loss": {"use": "gspo", "level": "token"}, "top_entropy": {"share": 0.2, "count_rest": False}},
            "algorithm.top_entropy.count_rest: is false, which takes tokens out of the loss mask",
        ),
        ({"covariance": {"weight": 0.5}}, "algorithm.covariance.weight: has no effect with method: none"),
    ],
)
def test_what_does_not_go_together_is_refused(problems, algorithm, message):
    assert any(problem.startswith(message) for problem in problems(**algorithm)), problems(**algorithm)
