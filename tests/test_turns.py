"""Episodes of several turns, through the real generator, chat template and backend."""

from pathlib import Path

import numpy as np
import pytest
import yaml

import whet
from whet.data.files import read_rows


@pytest.fixture
def config(tmp_path, tiny_model_folder):
    path = tmp_path / "run.yaml"
    document = {
        "run": {"folder": str(tmp_path / "run"), "steps": 30, "seed": 2},
        "model": {"path": str(tiny_model_folder)},
        "algorithm": {"use": "grpo", "prompts_per_step": 8, "group_size": 8},
        "backend": {"use": "fsdp2", "optimizer": {"lr": 3.0e-3}},
        "generator": {"use": "hf"},
        "rollout": {"max_tokens": 8},
        "environments": [{"use": "two-turns"}],
        "plugins": [str(Path(__file__).parent / "two_turns.py")],
        "cluster": {"workers": "inline"},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_replies_of_the_environment_carry_no_loss_and_no_token_is_tokenised_again(config):
    with whet.open(config) as parts:
        batch = parts.rollouts.take(2)
        chat = parts.chat
    starts = np.cumsum(batch["lengths"]) - batch["lengths"]
    again = 0
    for start, length in zip(starts, batch["lengths"], strict=True):
        tokens, mask = (batch[name][start : start + length] for name in ("tokens", "loss_mask"))
        spans = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        (first, first_end), (second, second_end) = spans.reshape(-1, 2)
        reply = chat.decode(tokens[first_end:second], skip_special=False)
        assert "Now 2468 and 0" in reply
        assert reply.endswith("<|im_start|>assistant\n")
        for begin, end in ((first, first_end), (second, second_end)):
            assert 1 <= end - begin <= 8
            text = chat.decode(tokens[begin:end], skip_special=False)
            again += not np.array_equal(chat.encode(text), tokens[begin:end])
        assert np.all(batch["sampler_logprobs"][start : start + length][~mask] == 0)
    # A random model writes tokens that no tokenizer would choose: had they been tokenised again, ids would differ.
    assert again > 0


def test_reward_rises_over_two_turns_from_a_saved_start(config, tmp_path):
    start = tmp_path / "start"
    with whet.open(config, "run.steps=8") as parts:
        parts.algorithm.run(parts)
        parts.backend.export(start)
    chosen = [f"model.path={start}", f"run.folder={tmp_path / 'on'}", "run.save_every=0", "run.export=false"]
    with whet.open(config, *chosen) as parts:
        parts.algorithm.run(parts)
    rewards = [row["reward/mean"] for row in read_rows(tmp_path / "on" / "metrics.jsonl")]
    assert len(rewards) == 30
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
