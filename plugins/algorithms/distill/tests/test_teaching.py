"""What teachers are asked, and which models can be teachers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from whet.component import Component, Selection
from whet.config.build import build, to_spec
from whet.config.sections import ModelSection, RolloutSection
from whet.data.model_info import read_model
from whet.errors import ConfigError, WhetError
from whet_distill import losses
from whet_distill.config import DistillConfig, TopkKlConfig
from whet_distill.distill import Distill, with_advantages
from whet_distill.hooks import whet_losses
from whet_distill.teaching import Teaching
from whet_start.small_models import make_model, make_tokenizer
from whet_testing.batches import random_batch
from whet_testing.fakes import FakeBackend
from whet_testing.steps import Watch, WatchedRollouts, WatchedSteps, watched_sync

LOSSES: dict[str, Component] = {component.name: component for component in whet_losses()}


def parts(folder, **teachers):
    roles = {name: FakeBackend(lambda output, batch, n=n: np.full(batch.tokens, -n, np.float32))
             for name, n in teachers.items()}  # fmt: skip
    return SimpleNamespace(
        backend=FakeBackend(), roles=roles, chat=SimpleNamespace(folder=folder),
        config=SimpleNamespace(roles={}, backend=SimpleNamespace(config=SimpleNamespace(teacher=""))),
    )  # fmt: skip


def config(loss="topk-kl", **options):
    made = LOSSES[loss]
    return DistillConfig(loss=Selection("losses", made, made.config(), "whet-distill"), **options)


def test_each_environment_is_taught_by_its_own_teacher(tiny_model_folder):
    batch = random_batch(0, columns=["env"])
    env = np.arange(batch.sequences) % 3
    batch = batch.with_columns(env=env)
    object.__setattr__(batch, "info", {"environments": ("math", "code", "chat")})
    chosen = {"math": "strong", "code": "coder"}
    made = config(topk=4, teachers=chosen)
    teach = Teaching(
        made, parts(tiny_model_folder, strong=1, coder=2, teacher=3), read_model(tiny_model_folder), chosen
    )
    found = teach(batch)
    assert found["teacher_topk_logprobs"].shape == (batch.tokens, 4)
    expected = np.where(batch["loss_mask"], -np.array([1.0, 2.0, 3.0])[np.repeat(env, batch["lengths"])], 0)
    np.testing.assert_array_equal(found["teacher_topk_logprobs"][:, 0], expected)
    assert found["topk_ids"].dtype == np.int32


def test_the_students_own_likeliest_tokens_are_asked_of_the_teacher(tiny_model_folder):
    batch = random_batch(1)
    teach = Teaching(
        config(topk=5, topk_of="student"), parts(tiny_model_folder, teacher=2), read_model(tiny_model_folder)
    )
    found = teach(batch)
    assert found["topk_ids"].shape == found["teacher_topk_logprobs"].shape == (batch.tokens, 5)


def test_advantages_are_by_how_much_the_teacher_likes_a_token_more(tiny_model_folder):
    batch = random_batch(2, columns=["sampler_logprobs"])
    teach = Teaching(config("teacher-pg"), parts(tiny_model_folder, teacher=2), read_model(tiny_model_folder))
    found = with_advantages(teach(batch), moves=False)
    expected = np.where(batch["loss_mask"], -2.0 - batch["sampler_logprobs"], 0)
    np.testing.assert_allclose(np.where(batch["loss_mask"], found["advantages"], 0), expected, rtol=1e-6)
    assert "old_logprobs" not in found
    assert "old_logprobs" in with_advantages(teach(batch), moves=True)
    own = np.where(batch["loss_mask"], -0.25, 0).astype(np.float32)
    found = with_advantages(teach(batch), moves=True, own=own)
    np.testing.assert_array_equal(found["advantages"], found["teacher_logprobs"] - own)
    np.testing.assert_array_equal(found["old_logprobs"], own)
    assert "topk_ids" not in found


@pytest.mark.parametrize("loss", ["topk-kl", "full-kl", "teacher-pg"])
@pytest.mark.parametrize("moves", [False, True])
def test_the_gap_of_sampler_and_trainer_is_seen(loss, moves):
    made = random_batch(3, columns=["sampler_logprobs"])
    topk = np.zeros((made.tokens, 4), np.float32)
    made = made.with_columns(topk_ids=topk.astype(np.int32), teacher_topk_logprobs=topk)
    off = np.linspace(1, 3, made.tokens, dtype=np.float32)
    made = with_advantages(made.with_columns(teacher_logprobs=made["sampler_logprobs"] + 1), moves)
    batch = made.map(torch.from_numpy)
    logprobs = batch["sampler_logprobs"] + torch.from_numpy(off)
    outputs = {
        "logprobs": logprobs, "logprobs_at": logprobs[:, None].expand(batch["topk_ids"].shape),
        "kl_forward": logprobs, "kl_reverse": logprobs,
    }  # fmt: skip
    config = LOSSES[loss].config()
    metrics = getattr(losses, LOSSES[loss].target.split(":")[1])(config)(outputs, batch).metrics
    expected = off[made["loss_mask"]]
    assert float(metrics["logprob_gap/mean"].number()) == pytest.approx(expected.mean(), rel=1e-5)
    assert float(metrics["logprob_gap/max"].number()) == pytest.approx(expected.max(), rel=1e-5)


@pytest.mark.parametrize("forward", [0.5, 1.0])
def test_a_reverse_divergence_is_reported_only_where_it_is_whole(forward):
    batch = random_batch(4)
    teacher = np.log(np.full((batch.tokens, 2), 0.5, np.float32))
    batch = batch.with_columns(topk_ids=np.zeros((batch.tokens, 2), np.int32), teacher_topk_logprobs=teacher)
    student = torch.full((batch.tokens, 2), np.log(0.05), dtype=torch.float32)
    logprobs = torch.zeros(batch.tokens)
    outputs = {"logprobs": logprobs, "logprobs_at": student, "entropy": logprobs + 3.0}
    loss = losses.TopkKl(TopkKlConfig(outside="zero", forward=forward))
    found = loss({name: outputs[name] for name in loss.outputs}, batch.map(torch.as_tensor))
    number = found.metrics["kl/forward"].number()
    assert number == pytest.approx(np.log(10), rel=1e-5)
    if forward == 1:
        assert "kl/reverse" not in found.metrics
        assert float(found.terms["kl"]) == pytest.approx(np.log(10) * batch["loss_mask"].sum(), rel=1e-5)
    else:
        assert found.metrics["kl/reverse"].number() == pytest.approx(-3 - 0.1 * np.log(0.5) + 0.9 * 100, rel=1e-4)


@pytest.mark.parametrize("loss", ["topk-kl", "teacher-pg"])
def test_a_teacher_with_other_tokens_is_refused_with_the_first_of_them(tmp_path, tiny_model_folder, loss):
    folder = make_model(tmp_path, make_tokenizer(["quite other words 99"], vocab_size=280))
    made = parts(tiny_model_folder, teacher=1)
    made.config.roles = {"teacher": SimpleNamespace(model=ModelSection(str(folder)))}
    with pytest.raises(
        ConfigError,
        match=r"^roles\.teacher\.model: .* has another tokenizer than the policy, .*: \d+ tokens differ, e\.g\. ",
    ):
        Teaching(config(loss), made, read_model(tiny_model_folder))


def test_a_teacher_beside_the_policy_with_other_tokens_is_refused(tmp_path, tiny_model_folder):
    made = parts(tiny_model_folder)
    beside = made.config.backend.config
    beside.teacher = str(make_model(tmp_path, make_tokenizer(["quite other words 99"], vocab_size=280)))
    with pytest.raises(ConfigError, match=r"^backend\.teacher: .* has another tokenizer than the policy"):
        Teaching(config("full-kl"), made, read_model(tiny_model_folder))
    beside.teacher = str(tiny_model_folder)
    Teaching(config("full-kl"), made, read_model(tiny_model_folder))


def test_a_teacher_of_another_size_with_the_same_tokens_is_taken(tmp_path, tiny_model_folder, tiny_tokenizer):
    folder = make_model(tmp_path, tiny_tokenizer, hidden=32, layers=1)
    made = parts(tiny_model_folder, teacher=1)
    made.config.roles = {"teacher": SimpleNamespace(model=ModelSection(str(folder)))}
    Teaching(config(), made, read_model(tiny_model_folder))


@pytest.mark.parametrize("loss", ["topk-kl", "teacher-pg"])
@pytest.mark.parametrize("count_over", ["minibatch", "batch"])
def test_a_minibatch_is_divided_as_configured(tiny_model_folder, loss, count_over):
    made, watch = parts(tiny_model_folder, teacher=1), Watch()
    chosen = config(loss, prompts_per_step=8, topk=4, minibatches=3, count_over=count_over)
    divided = []

    def train(batch, loss, count_over=None):
        (count,) = build(loss).counts((count_over or batch).map(torch.as_tensor)).values()
        divided.append((float(count), int(batch["loss_mask"].sum())))
        return {}

    made.backend.train, made.loss, made.sync_weights = train, to_spec(chosen.loss), watched_sync(watch)
    made.config.rollout = RolloutSection()
    made.rollouts, made.steps = WatchedRollouts(watch, 1), WatchedSteps(watch, 1)
    Distill(chosen).run(made)
    counts, own = zip(*divided, strict=True)
    assert len(set(own)) > 1
    assert counts == pytest.approx(own if count_over == "minibatch" else [sum(own) / 3] * 3)


@pytest.mark.parametrize("source", ["teacher", "student"])
def test_likeliest_tokens_are_those_that_all_models_have(tmp_path, tiny_model_folder, tiny_tokenizer, source):
    folder = make_model(tmp_path, tiny_tokenizer, hidden=32, layers=1)
    student = read_model(tiny_model_folder)
    rows, asked = student.vocab_size, []
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": rows + 128}))

    def likeliest(output, batch):
        asked.append(output)
        k = int(output.rpartition(":")[2]) if ":" in output else 4
        places = np.tile(np.arange(k), (batch.tokens, 1))
        if output.startswith("topk_logprobs"):
            return -places.astype(np.float32)
        return np.where(places % 2, rows + places, places).astype(np.int32)  # every other one is padding

    made = parts(tiny_model_folder, teacher=1, judge=1)
    other = make_model(tmp_path / "judge", make_tokenizer(["quite other words 99"], vocab_size=40))
    folders = {"teacher": folder, "judge": other}  # the judge of an environment reads no tokens of the policy
    made.config.roles = {name: SimpleNamespace(model=ModelSection(str(one))) for name, one in folders.items()}
    made.roles["teacher"] = made.backend = SimpleNamespace(
        score=lambda batch, outputs: {name: likeliest(name, batch) for name in outputs}
    )
    batch = random_batch(0)
    found = Teaching(config(topk=4, topk_of=source), made, student)(batch)
    assert (found["topk_ids"] == [0, 2, 4, 6]).all()
    assert "topk_ids:20" in asked
    if source == "teacher":
        assert (found["teacher_topk_logprobs"] == [0, -2, -4, -6]).all()
    with pytest.raises(WhetError, match="more than 16 are rows of padding"):
        Teaching(config(topk=18, topk_of=source), made, student)(batch)
    with pytest.raises(ConfigError, match=rf"algorithm\.topk: is {rows + 1}, more than the {rows} tokens"):
        Teaching(config(topk=rows + 1, topk_of=source), made, student)


def test_all_tokens_of_the_student_can_be_asked_of_a_teacher_with_more_rows(
    tmp_path, tiny_model_folder, tiny_tokenizer
):
    folder = make_model(tmp_path, tiny_tokenizer, hidden=32, layers=1)
    student = read_model(tiny_model_folder)
    rows = student.vocab_size
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": rows + 16}))
    made = parts(tiny_model_folder, teacher=1)
    made.config.roles = {"teacher": SimpleNamespace(model=ModelSection(str(folder)))}
    order = np.arange(rows + 16)[::-1]  # padding is likeliest
    made.roles["teacher"] = SimpleNamespace(
        score=lambda batch, outputs: {
            name: np.tile(order if name.startswith("topk_ids") else -order, (batch.tokens, 1)) for name in outputs
        }
    )
    found = Teaching(config(topk=rows), made, student)(random_batch(0))
    assert (found["topk_ids"] == np.arange(rows)[::-1]).all()


def test_shares_are_between_0_and_1():
    with pytest.raises(ValueError, match="wanted a share between 0 and 1"):
        TopkKlConfig(forward=1.5)
