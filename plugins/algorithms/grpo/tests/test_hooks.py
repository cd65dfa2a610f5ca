"""What `whet check` says of combinations that make no sense, and of numbers that do not go together."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.errors import ConfigError
from whet.plan.prepare import prepare

LOSS = {"use": "clipped-pg"}


def summed(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"use": "weighted-sum", "terms": [{"use": "cispo"}, *terms]}


@pytest.fixture
def problems(tmp_path: Path, tiny_model_folder: Path) -> Any:
    """Return a function that checks a run of GRPO with these keys, and returns its problems."""

    def check(
        backend: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, own_size: int = 0,
        **algorithm: Any,
    ) -> list[str]:  # fmt: skip
        document = {
            "run": {"folder": str(tmp_path / "run"), "steps": 1},
            "model": {"path": str(tiny_model_folder)},
            "algorithm": {"use": "grpo", "prompts_per_step": 2, "group_size": 4, **algorithm},
            "backend": {"use": "fsdp2", **(backend or {})},
            "generator": {"use": "hf"},
            "rollout": {"max_tokens": 16},
            "environments": [{"use": "arithmetic", "sampling": sampling or {}, "group_size": own_size}],
        }
        (tmp_path / "it.yaml").write_text(yaml.safe_dump(document))
        try:
            prepare(tmp_path / "it.yaml")
        except ConfigError as error:
            return [problem.partition(": ")[2] for problem in error.problems]  # without the place
        return []

    return check


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"advantages": "reinforce-plus-plus", "group_size": 1},
        {"advantages": "pass-at-k"},
        {"advantages": {"use": "pass-at-k", "k": 3, "baseline": "mean"}},
        {"advantages": "reinforce-plus-plus", "loss": {"use": "gspo", "level": "token"}},
        {"advantages": "reinforce-plus-plus", "loss": summed({"use": "nll", "weight": 0.1})},
        {"loss": {**LOSS, "off_policy": {"since": "old", "threshold": 0.1}}, "minibatches": 2},
        {"loss": {**LOSS, "off_policy": {"since": "old", "threshold": 0.1}}, "old_logprobs": "sampler"},
        {"loss": {**LOSS, "kl_old": {"weight": 0.1, "to": "old"}}, "epochs": 2},
        {"loss": {**LOSS, "kl_old": {"weight": 0.1, "to": "sampler"}}},
        {"advantages": {"use": "reinforce-plus-plus", "per_token": False}, "loss": "gspo"},
        {"correction": {"weights": "sequence", "max_token_gap": 3.0}, "loss": "gspo"},
        {"correction": {"mask": "token", "count_masked": False}, "loss": "gspo"},
        {"loss": {"use": "clipped-pg", "aggregation": "constant", "max_length": 16, "count_empty": True}},
        {"overlong": {"penalty": 1.0, "buffer": 8, "bounded": False}},
        {"overlong": {"penalty": 1.0, "buffer": 8}, "sampling": {"max_tokens": 16}},
        {"overlong": {"penalty": 1.0, "buffer": 8, "length": 50}, "sampling": {"max_tokens": 50}},
        {"correction": {"mask": "worst", "measure": "k3", "high": 0.01, "max_mean_error": 2.0}},
        {"correction": {"weights": "sequence", "normalise": True}, "loss": "gspo"},
        {"advantages": {"use": "group-mean", "singleton": "reward"}, "group_size": 1},
        {"advantages": {"use": "reinforce-plus-plus", "baseline": True, "singleton": "reward"}, "group_size": 1},
        {"loss": "sapo", "top_entropy": {"share": 0.2}},
        {"loss": {"use": "gspo", "level": "token"}, "top_entropy": {"share": 0.2}},
        {"advantages": "remax", "group_size": 1},
        {"advantages": {"use": "remax", "per_token": False}, "loss": "gmpo"},
        {"advantages": {"use": "opo", "singleton": "reward"}, "group_size": 1},
        {"loss": {**LOSS, "likelihood": {"weight": 0.1}, "off_policy": {"threshold": 0.1}, "clamp_log_ratio": 0}},
        {"loss": {**LOSS, "aggregation": "sequence", "count_empty": True, "count_masked": False}},
        {"loss": {**LOSS, "likelihood": {"weight": 0.1, "at_least": -math.inf}}},
        {"advantages": {"use": "gdpo", "over": "tokens", "centre": True, "epsilon_at": "variance"}},
        {"minibatches": 9, "own_size": 8},
        {"loss": summed(LOSS), "minibatches": 2, "covariance": {"method": "kl-cov"}},
        {"covariance": {"method": "clip-cov", "share": 0.01, "low": 0.5, "high": 2.0}},
        {"covariance": {"method": "kl-cov", "weight": 0.5}, "minibatches": 2},
        {"covariance": {"method": "kl-cov"}, "old_logprobs": "sampler", "loss": "gspo"},
        {"covariance": {"method": "clip-cov"}, "loss": "dppo", "old_logprobs": "sampler", "overlong": {"factor": 0.0}},
    ],
)
def test_what_makes_sense_is_let_through(problems: Any, algorithm: dict[str, Any]) -> None:
    assert problems(**algorithm) == []


@pytest.mark.parametrize(
    ("algorithm", "path", "message"),
    [
        ({"loss": "nll"}, "algorithm.loss", "reads no 'advantages', so nothing that grpo finds out would reach it"),
        ({"advantages": "reinforce-plus-plus", "loss": "gspo"}, "algorithm.loss", "advantages gives each token its"),
        ({"correction": {"weights": "token"}, "loss": "gspo"}, "algorithm.loss", "wants one advantage for each"),
        ({"group_size": 1}, "algorithm.advantages", "compares at least 2 samples of one task, and"),
        (
            {"group_size": 1, "advantages": "reinforce-plus-plus", "filters": ["unequal-rewards"]},
            "algorithm.filters.0", "compares at least 2 samples",
        ),
        (
            {"group_size": 1, "advantages": {"use": "reinforce-plus-plus", "baseline": True}},
            "algorithm.advantages", "compares at least 2",
        ),
        ({"kl_reward": {"weight": 0.1}}, "backend.reference", "grpo scores with the weights 'reference'"),
        ({"loss": {**LOSS, "kl": {"weight": 0.1}}}, "backend.reference", "holds no such copy; set it to true"),
        ({"old_logprobs": "sampler", "correction": {"mask": "token"}}, "algorithm.correction", "choose `auto` or"),
        ({"loss": {**LOSS, "count_empty": True}}, "algorithm.loss.count_empty", "which counts tokens"),
        ({"loss": {**LOSS, "count_masked": True}}, "algorithm.loss.count_masked", "which counts tokens"),
        ({"loss": "gmpo", "top_entropy": {"share": 0.2}}, "algorithm.loss", "wants one advantage for each"),
        ({"loss": "gspo", "top_entropy": {"share": 0.2}}, "algorithm.loss", "wants one advantage for each"),
        ({"loss": "gmpo", "advantages": "remax"}, "algorithm.loss", "advantages gives each token its"),
        ({"advantages": "opo", "group_size": 1}, "algorithm.advantages", "compares at least 2 samples"),
        ({"top_entropy": {"share": 0.0}}, "algorithm.top_entropy.share", "must be > 0"),
        ({"kl_reward": {"adaptive": {"target": 6.0}}}, "algorithm.kl_reward.adaptive.target", "on a weight of 0"),
        (
            {"kl_reward": {"weight": 0.1, "adaptive": {"target": 6.0, "horizon": 1.6}}},
            "algorithm.kl_reward.adaptive.horizon", "is 1.6, and a step has 2 x 4 episodes: one of 8 or more can turn",
        ),
        ({"loss": {**LOSS, "off_policy": {"since": "old"}}}, "algorithm.loss.off_policy.since", "without a threshold"),
        (
            {"loss": {**LOSS, "off_policy": {"since": "old", "threshold": 0.1}}},
            "algorithm.loss.off_policy.since", "no effect with one optimizer step",
        ),
        (
            {"loss": {**LOSS, "kl_old": {"weight": 0.1, "to": "old"}}},
            "algorithm.loss.kl_old.to", "no effect with one optimizer step",
        ),
        (
            {"advantages": {"use": "reinforce-plus-plus", "baseline_of": "reward"}},
            "algorithm.advantages.baseline_of", "no effect without a baseline",
        ),
        ({"overlong": {"bounded": False}}, "algorithm.overlong.bounded", "a penalty that rises over a buffer"),
        ({"correction": {"normalise": True}}, "algorithm.correction.normalise", "no effect without weights"),
        ({"correction": {"measure": "k3"}}, "algorithm.correction.measure", "no effect without a mask"),
        ({"correction": {"max_mean_error": 0.5}}, "algorithm.correction.max_mean_error", "no mean factor is below 1"),
        (
            {"advantages": {"use": "reinforce-plus-plus", "per_token": False, "gamma": 0.9}},
            "algorithm.advantages.gamma", "no effect without per_token",
        ),
        (
            {"advantages": {"use": "gdpo", "scale": "none", "std_over": "others"}},
            "algorithm.advantages.std_over", "which divides by nothing",
        ),
        ({"advantages": "gdpo", "overlong": {"factor": 0.5}}, "algorithm.overlong.factor", "`gdpo` has normalised"),
        ({"advantages": {"use": "pass-at-k", "k": 5}}, "algorithm.advantages.k", "is 5, more than the 4 samples of a"),
        (
            {"advantages": {"use": "pass-at-k", "k": 4}, "own_size": 2},
            "algorithm.advantages.k", "is 4, more than the 2 samples of a",
        ),
        (
            {"advantages": {"use": "pass-at-k", "baseline": "mean"}},
            "algorithm.advantages.k", "is null: all 4 samples of a group, whose",
        ),
        ({"advantages": "gdpo", "clip_reward": [-1, 1]}, "algorithm.clip_reward", "no effect on `gdpo`"),
        ({"clip_reward": [1, 1]}, "algorithm.clip_reward", "is [1.0, 1.0], wanted the lower bound, then the upper"),
        ({"covariance": {"share": 0.1}}, "algorithm.covariance.share", "has no effect with method: none"),
        (
            {"covariance": {"method": "clip-cov", "weight": 2.0}},
            "algorithm.covariance.weight", "has no effect with method: clip-cov",
        ),
        (
            {"covariance": {"method": "kl-cov", "low": 2.0}, "minibatches": 2},
            "algorithm.covariance.low", "has no effect with method: kl-cov",
        ),
        ({"covariance": {"method": "clip-cov", "low": 6.0}}, "algorithm.covariance.low", "not below `high`, which is"),
        ({"covariance": {"method": "kl-cov"}}, "algorithm.covariance.method", "no effect with one optimizer step"),
        (
            {"covariance": {"method": "kl-cov"}, "minibatches": 2, "loss": "teacher-pg"},
            "algorithm.covariance.method", "this loss has no penalty for the distance to the old policy",
        ),
        ({"covariance": {"method": "clip-cov"}, "loss": "gspo"}, "algorithm.loss", "wants one advantage for each"),
        ({"loss": "vespo", "top_entropy": {"share": 0.2}}, "algorithm.loss", "wants one advantage for each"),
        ({"count_over": "batch"}, "algorithm.count_over", "no effect on a single minibatch; set algorithm.minibatches"),
        ({"minibatches": 9}, "algorithm.minibatches", "is 9, more than the 2 x 4 responses of a step"),
        (
            {"minibatches": 5, "own_size": 2},
            "algorithm.minibatches", "the 2 x 2 responses of a step; an environment has a group_size of its own",
        ),
        (
            {"kl_reward": {"weight": 0.1, "adaptive": {"target": 6.0, "horizon": 3.2}}, "own_size": 8,
             "backend": {"reference": True}},
            "algorithm.kl_reward.adaptive.horizon", "is 3.2, and a step has 2 x 8 episodes",
        ),
        ({"overlong": {"penalty": 1.0, "buffer": 17}}, "algorithm.overlong.buffer", "more than the 16 tokens"),
        ({"overlong": {"buffer": 4}}, "algorithm.overlong.buffer", "no effect without a penalty"),
        ({"overlong": {"penalty": 1.0}}, "algorithm.overlong.penalty", "longer than the 16 tokens of rollout.max_tok"),
        ({"correction": {"weights": "token", "floor": 3.0}}, "algorithm.correction.floor", "above the cap of 2"),
        ({"correction": {"mask": "token", "low": 6.0}}, "algorithm.correction.low", "above `high`, which is 5"),
        ({"loss": {**LOSS, "aggregation": "constant"}}, "algorithm.loss.max_length", "rollout.max_tokens, which is 16"),
        (
            {"loss": summed({**LOSS, "aggregation": "constant"})},
            "algorithm.loss.terms.1.max_length", "rollout.max_tokens, which is 16",
        ),
        ({"loss": summed({**LOSS, "clip_dual": 1.1})}, "algorithm.loss.terms.1.clip_dual", "wanted more than 1 +"),
        (
            {"loss": summed({**LOSS, "kl": {"estimator": "k2", "importance": "ratio"}})},
            "algorithm.loss.terms.1.kl.importance", "the gradient of k2 is right without",
        ),
        (
            {"loss": summed({**LOSS, "kl_old": {"weight": 0.1, "to": "old"}})},
            "algorithm.loss.terms.1.kl_old.to", "no effect with one optimizer step",
        ),
        (
            {"loss": summed({**LOSS, "off_policy": {"threshold": 1.0}}),
             "top_entropy": {"share": 0.2, "count_rest": False}},
            "algorithm.top_entropy.count_rest", "algorithm.loss.terms.1.off_policy is a mean over",
        ),
        ({"loss": {**LOSS, "max_length": 16}}, "algorithm.loss.max_length", "no effect on the aggregation `token`"),
        (
            {"overlong": {"penalty": 1.0, "buffer": 4}, "sampling": {"max_tokens": 50}},
            "algorithm.overlong.length", "an environment has a sampling.max_tokens of 50; set the length",
        ),
        ({"loss": {**LOSS, "clip_dual": 1.1}}, "algorithm.loss.clip_dual", "wanted more than 1 + clip_high"),
        ({"loss": {"use": "reinforce", "max_weight": 0.0}}, "algorithm.loss.max_weight", "must be > 0"),
        (
            {"loss": {**LOSS, "kl": {"estimator": "k1", "straight_through": True, "importance": "score"}}},
            "algorithm.loss.kl.straight_through", "kl.importance: score counts it twice",
        ),
        (
            {"loss": {**LOSS, "kl": {"estimator": "k2", "importance": "ratio"}}},
            "algorithm.loss.kl.importance", "the gradient of k2 is right without",
        ),
        (
            {"loss": {**LOSS, "off_policy": {"threshold": 1.0}}, "top_entropy": {"share": 0.2, "count_rest": False}},
            "algorithm.top_entropy.count_rest", "algorithm.loss.off_policy is a mean over a response's tokens",
        ),
        (
            {"loss": {"use": "gspo", "level": "token"}, "top_entropy": {"share": 0.2, "count_rest": False}},
            "algorithm.top_entropy.count_rest", "the ratio of a sequence is a mean",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(
    problems: Any, algorithm: dict[str, Any], path: str, message: str
) -> None:
    (problem,) = problems(**algorithm)
    assert problem.startswith(f"{path}: ")
    assert message in problem


@pytest.mark.parametrize("algorithm", [{"kl_reward": {"weight": 0.1}}, {"loss": {**LOSS, "kl": {"weight": 0.1}}}])
def test_a_backend_that_holds_the_reference_will_do(problems: Any, algorithm: dict[str, Any]) -> None:
    assert problems({"reference": True}, **algorithm) == []
