"""The loop: what it asks of policy and critic, in which order, and what each is trained on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from whet.config.build import build, to_spec
from whet.config.sections import RolloutSection
from whet.config.structure import structure
from whet.plugins.registry import load_plugins
from whet_ppo.config import PpoConfig
from whet_ppo.ppo import Ppo, name_of
from whet_testing.steps import Watch, WatchedBackend, WatchedRollouts, WatchedSteps, watched_sync


class Named(WatchedBackend):
    """Says its name with each call."""

    def __init__(self, watch, name):
        super().__init__(Watch())
        self._all, self.name = watch, name

    def train(self, batch, loss, count_over=None):
        self._all.note(f"{self.name} train", batch, loss)
        self.counted = (*getattr(self, "counted", ()), count_over)
        return super().train(batch, loss, count_over)

    def score(self, batch, outputs, weights="policy"):
        self._all.note(f"{self.name} {' '.join(outputs)} {weights}", batch)
        return super().score(batch, outputs, weights)


@pytest.fixture
def run():
    def run(steps=1, staleness=0, **changes):
        config = structure({"prompts_per_step": 8, "minibatches": 2, **changes}, PpoConfig, load_plugins())
        watch = Watch()
        numbers = WatchedSteps(watch, steps)
        parts = SimpleNamespace(
            config=SimpleNamespace(rollout=RolloutSection(max_tokens=8, max_staleness=staleness), roles={}),
            rollouts=WatchedRollouts(watch, config.group_size),
            backend=Named(watch, "policy"),
            roles={"critic": Named(watch, "critic")},
            loss=to_spec(config.loss),
            steps=numbers,
            sync_weights=watched_sync(watch),
        )
        Ppo(config).run(parts)
        names = [event.name for event in watch.events]
        trained = {"policy": parts.backend, "critic": parts.roles["critic"]}
        return SimpleNamespace(watch=watch, names=names, metrics=numbers.metrics, trained=trained)

    return run


def test_the_order_of_a_step(run):
    trained = ["critic train"] * 2 + ["policy train"] * 2 + ["sync_weights", "finish"]
    assert run().names == ["take", "policy logprobs policy", "critic values policy", *trained]


@pytest.mark.parametrize(
    ("changes", "scored"),
    [
        ({"minibatches": 1}, []),
        ({"old_logprobs": "sampler"}, []),
        ({"staleness": 1}, []),
        ({"staleness": 1, "correction": {"weights": "token"}}, ["policy logprobs policy"]),
        ({"staleness": 1, "minibatches": 1, "correction": {"weights": "token"}}, []),
        ({"minibatches": 1, "correction": {"max_token_gap": 1.0}}, ["policy logprobs policy"]),
        ({"epochs": 2}, ["policy logprobs policy"]),
        ({"minibatches": 1, "covariance": {"method": "clip-cov"}}, ["policy logprobs policy"]),
        ({"minibatches": 1, "kl_reward": {"weight": 0.1}}, ["policy logprobs reference"]),
    ],
)
def test_logprobs_are_scored_where_they_are_needed(run, changes, scored):
    assert [name for name in run(**changes).names if "logprobs" in name] == scored


def test_each_learns_for_its_own_number_of_epochs(run):
    names = run(epochs=2, critic_epochs=3).names
    assert (names.count("critic train"), names.count("policy train")) == (6, 4)
    assert names.index("policy train") > len(names) - 1 - names[::-1].index("critic train")
    assert run(epochs=2).names.count("critic train") == 4


def test_first_the_critic_learns_alone_and_the_weights_are_handed_over_all_the_same(run):
    watch = run(steps=3, critic_warmup=2).watch
    assert {event.step for event in watch.named("policy train")} == {3}
    assert {event.step for event in watch.named("critic train")} == {1, 2, 3}
    assert [event.value for event in watch.named("sync_weights")] == [1, 2, 3]


def test_critic_and_policy_are_trained_on_the_same_targets_with_their_own_losses(run):
    watch = run(minibatches=1).watch
    (critic,), (policy,) = watch.named("critic train"), watch.named("policy train")
    assert critic.value.target == "whet_ppo.losses:ValueClip"
    assert policy.value.target == "whet_ppo.losses:PpoClip"
    mask = policy.batch["loss_mask"]
    assert policy.batch["advantages"][mask].mean() == pytest.approx(0, abs=1e-6)
    assert policy.batch["advantages"][mask].std(ddof=1) == pytest.approx(1, rel=1e-5)
    assert np.array_equal(critic.batch["returns"], policy.batch["returns"])
    assert (critic.batch["old_values"][mask] == -1).all()  # as the stand-in scores
    rewards = np.repeat(critic.batch["reward"], critic.batch["lengths"])
    assert critic.batch["returns"][mask] == pytest.approx(rewards[mask], abs=1e-5)


@pytest.mark.parametrize("who", ["policy", "critic"])
def test_a_minibatch_is_divided_by_the_tokens_of_the_whole_batch_as_in_trl(run, who):
    """TRL divides by num_items_in_batch / steps_per_generation."""
    done = run(minibatches=3, count_over="batch")
    events, wholes = done.watch.named(f"{who} train"), done.trained[who].counted
    (whole,) = {id(one): one for one in wholes}.values()
    assert sum(event.batch["loss_mask"].sum() for event in events) == whole["loss_mask"].sum()
    for event in events:
        counts = build(event.value).counts(whole.map(torch.as_tensor))
        assert [float(n) for n in counts.values()] == pytest.approx([whole["loss_mask"].sum() / 3] * len(counts))
    assert set(run(minibatches=3).trained[who].counted) == {None}


def test_responses_that_were_cut_are_left_out_of_both(run):
    watch = run(minibatches=1, overlong={"mask": True}).watch
    for name in ("critic train", "policy train"):
        (event,) = watch.named(name)
        cut = np.repeat(~event.batch["stopped"], event.batch["lengths"])
        assert cut.any()
        assert not event.batch["loss_mask"][cut].any()


def test_metrics_of_the_critic_have_its_name(run):
    (metrics,) = run().metrics
    assert {"critic/loss", "critic/grad_norm", "critic/lr", "critic/explained_variance", "loss"} <= set(metrics)
    assert (name_of("loss"), name_of("seconds/backend.forward")) == ("critic/loss", "seconds/critic.forward")
    assert name_of("memory/backend.train") == "memory/critic.train"
    assert {"returns/mean", "values/mean", "advantages/mean", "advantages/std"} <= set(metrics)
