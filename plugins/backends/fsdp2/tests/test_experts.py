"""Mixtures of experts: the balance loss of `transformers`, the same numbers in any layout, and replayed routing."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.errors import ConfigError, WhetError
from whet_training.layout import shared_prompts, used_lengths

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")
WEIGHTED = Spec("whet_testing.losses:Weighted")
SKIPPING = Spec("whet_testing.losses:Weighted", config={"skip_dead": True})
K, LAYERS, EXPERTS = 2, 2, 8


def model_of(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_router_logits=True, **options
    )


def entering(batch):
    """Return the tokens of each sequence that enter a forward pass, in padded rows, and the mask of padding."""
    used = used_lengths(batch)
    rows = [row[:n] for row, n in zip(np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1]), used, strict=True)]
    width = max(used)
    ids = torch.tensor(np.array([[*row, *[0] * (width - len(row))] for row in rows]))
    return ids, (torch.arange(width) < torch.tensor(used)[:, None]).long()


def their_balance_loss(model, batch):
    """Compute the auxiliary loss of `transformers` over the tokens that enter the forward pass."""
    ids, mask = entering(batch)
    return model(input_ids=ids, attention_mask=mask).aux_loss


def recorded(batch, seed=0, missing=0.0):
    """Draw distinct experts for each token and layer, as a sampler would record them."""
    draw = np.random.default_rng(seed)
    chosen = np.argsort(draw.random((batch.tokens, LAYERS, EXPERTS)), -1)[:, :, :K]
    chosen[draw.random(batch.tokens) < missing] = -1
    return batch.with_columns(routed_experts=chosen.reshape(batch.tokens, LAYERS * K).astype(np.int16))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_of_the_model_is_that_of_transformers(make_worker, folders, batch, gradients, family):
    model = model_of(folders(family))
    their_balance_loss(model, batch).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    plain, balanced = (
        make_worker(family, layout="padded", experts={"balance": weight, "balance_of": "model"}) for weight in (0, 0.5)
    )
    without, with_it = gradients(plain, batch), gradients(balanced, batch)
    for name, gradient in theirs.items():
        torch.testing.assert_close((with_it[name] - without[name]) / 0.5, gradient, atol=2e-6, rtol=1e-3)
    losses = [worker.evaluate(batch, LIKELIHOOD)["loss"].number() for worker in (plain, balanced)]
    assert losses[0] == losses[1]
    difference = balanced.train(batch, LIKELIHOOD)["loss"].number() - losses[0]
    assert difference == pytest.approx(0.5 * their_balance_loss(model, batch).item(), rel=1e-5)
    for weight in (0.0, 0.5):  # the metric is that loss, whether it is trained or not
        worker = make_worker(family, micro_batch_tokens=60, experts={"balance": weight, "balance_of": "model"})
        found = worker.train(batch, LIKELIHOOD)["experts/balance_loss"].number()
        assert found == pytest.approx(their_balance_loss(model, batch).item(), rel=1e-5)


def test_over_micro_batches_the_balance_loss_is_the_mean_of_theirs(make_worker, folders, batch, gradients):
    options = {"layout": "padded", "micro_batch_tokens": 60}
    worker = make_worker(
        "mixtral", experts={"balance": 1.0, "balance_of": "model", "balance_over": "micro-batch"}, **options
    )
    parts = [batch.take(chosen) for chosen in worker._plan(batch)]
    assert len(parts) > 2
    model = model_of(folders("mixtral"))
    expected = sum(their_balance_loss(model, part) for part in parts) / len(parts)
    expected.backward()
    without = gradients(make_worker("mixtral", **options), batch)
    found = gradients(worker, batch)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name] - without[name], p.grad, atol=2e-6, rtol=1e-3)
    metric = worker.train(batch, LIKELIHOOD)["experts/balance_loss"].number()
    assert metric == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_layers_is_their_mean_and_the_z_loss_the_mean_of_squares(make_worker, folders, batch):
    model = model_of(folders("qwen3_moe"))
    ids, mask = entering(batch)
    counted = mask.flatten().bool()
    balance, squares = [], []
    for logits in model(input_ids=ids, attention_mask=mask).router_logits:
        logits = logits[counted]
        chances = logits.softmax(-1)
        share = torch.nn.functional.one_hot(chances.topk(K).indices, EXPERTS).float().sum(1).mean(0)
        balance.append(EXPERTS * (share * chances.mean(0)).sum().item())
        squares.append(logits.logsumexp(-1).square().mean().item())
    worker = make_worker("qwen3_moe", experts={"balance": 0.3, "z_loss": 0.2})
    before = worker.evaluate(batch, LIKELIHOOD)["loss"].number()
    found = worker.train(batch, LIKELIHOOD)
    assert found["experts/balance_loss"].number() == pytest.approx(np.mean(balance), rel=1e-5)
    assert found["experts/z_loss"].number() == pytest.approx(np.mean(squares), rel=1e-5)
    expected = before + 0.3 * np.mean(balance) + 0.2 * np.mean(squares)
    assert found["loss"].number() == pytest.approx(expected, rel=1e-5)


def deepseek(folder):
    """Return a folder of a model whose router scores experts by a sigmoid and chooses groups of them first."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=EXPERTS, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=4, topk_group=2,
        num_experts_per_tok=K, first_k_dense_replace=0, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def gemma(folder):
    """Return a folder of a model whose routers return probabilities in place of logits."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, global_head_dim=16, num_experts=EXPERTS,
        top_k_experts=K, enable_moe_block=True, sliding_window=64, max_position_embeddings=256, initializer_range=0.5,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    Gemma4ForCausalLM(config).save_pretrained(folder)
    return folder


def all_learned():
    """Return sequences of which all tokens but the first are trained."""
    draw = np.random.default_rng(0)
    rows = [{"tokens": draw.integers(3, 200, n), "loss_mask": np.arange(n) > 0} for n in (14, 23, 9)]
    return from_sequences(rows, prompt_lengths=[1, 1, 1])


@pytest.mark.parametrize("make", [deepseek, gemma])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_probabilities_are_those_of_the_models_own_scores(make_worker, tmp_path, gradients, make, checkpointing):
    """For DeepSeek-V3, P is s / sum of s with s = sigmoid(logits): arXiv:2412.19437, equations 17 to 20."""
    folder, batch, logits = make(tmp_path / "model"), all_learned(), []
    options = {"folder": folder, "gradient_checkpointing": checkpointing, "micro_batch_tokens": 30}
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "router.proj")):
            module.register_forward_hook(lambda m, given, out: logits.append(out if make is gemma else out[0]))
    ids, mask = entering(batch)
    model(input_ids=ids, attention_mask=mask)
    balance, squares, entropies = 0.0, 0.0, []
    for one in logits:
        one = one[mask.flatten().bool()]
        scores = one.sigmoid() if make is deepseek else one.exp()
        chances = scores / scores.sum(-1, keepdim=True)
        best = chances.topk(K).indices if make is gemma else _in_groups(scores)
        share = torch.nn.functional.one_hot(best, EXPERTS).float().sum(1).mean(0)
        balance = balance + EXPERTS * (share * chances.mean(0)).sum() / LAYERS
        squares = squares + one.logsumexp(-1).square().mean() / LAYERS
        entropies.append(-(chances * chances.log()).sum(-1).mean().item())
    (0.3 * balance + 0.2 * squares).backward()
    worker = make_worker(**options, experts={"balance": 0.3, "z_loss": 0.2})
    without, found = (gradients(one, batch, LIKELIHOOD) for one in (make_worker(**options), worker))
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name] - without[name], p.grad, atol=3e-6, rtol=1e-3)
    metrics = worker.train(batch, LIKELIHOOD)
    assert metrics["experts/balance_loss"].number() == pytest.approx(balance.item(), rel=1e-5)
    assert metrics["experts/z_loss"].number() == pytest.approx(squares.item(), rel=1e-5)
    assert metrics["experts/entropy"].number() == pytest.approx(np.mean(entropies), rel=1e-5)


def _in_groups(scores):
    """Return the best experts of the two of four groups whose two best experts have the largest sum of scores."""
    groups = scores.view(len(scores), 4, EXPERTS // 4)
    sums = groups.sum(-1)  # a group has two experts
    kept = torch.zeros_like(sums).scatter(1, sums.topk(2).indices, 1.0).bool()
    return groups.masked_fill(~kept[:, :, None], -1.0).flatten(1).topk(K).indices


def test_a_last_layer_with_experts_beside_its_network_is_computed_at_all_places(make_worker, tmp_path, batch):
    """Its router counts all tokens that enter, not those alone whose outputs are read."""
    folder, logits = gemma(tmp_path / "model"), []
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("router.proj"):
            module.register_forward_hook(lambda m, given, out: logits.append(out))
    ids, mask = entering(batch)
    model(input_ids=ids, attention_mask=mask)
    squares = [one[mask.flatten().bool()].logsumexp(-1).square().mean().item() for one in logits]
    found = make_worker(folder=folder).train(batch, LIKELIHOOD)
    assert found["experts/z_loss"].number() == pytest.approx(np.mean(squares), rel=1e-5)


def test_a_replay_leaves_the_choice_of_groups_to_the_router(make_worker, tmp_path, batch):
    worker = make_worker(folder=deepseek(tmp_path / "model"), layout="padded", experts={"replay": True})
    found = worker.train(recorded(batch), LIKELIHOOD)
    assert found["routing/disagreement"].number() == 0
    assert found["routing/overruled"].number() > 0.5


def test_loads_and_entropy_are_those_of_the_tokens_that_enter(make_worker, folders, batch):
    model = model_of(folders("qwen3_moe"))
    ids, mask = entering(batch)
    loads, entropies = [], []
    for logits in model(input_ids=ids, attention_mask=mask).router_logits:
        chances = logits[mask.flatten().bool()].softmax(-1)
        counts = np.bincount(chances.topk(K).indices.flatten(), minlength=EXPERTS)
        loads.append(counts / counts.sum() * EXPERTS)
        entropies.append(-(chances * chances.log()).sum(-1).mean().item())
    found = make_worker("qwen3_moe", micro_batch_tokens=30).train(batch, LIKELIHOOD)
    assert found["experts/load_max"].number() == pytest.approx(np.max(loads, 1).mean())
    assert found["experts/load_min"].number() == pytest.approx(np.min(loads, 1).mean())
    assert found["experts/idle"].number() == np.mean(np.array(loads) == 0)
    assert found["experts/entropy"].number() == pytest.approx(np.mean(entropies), rel=1e-5)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000), budget=st.integers(1, 120), layout=st.sampled_from(["shared", "packed", "padded"]),
    replay=st.booleans(), of=st.sampled_from(["layer", "model"]), missing=st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_no_number_depends_on_micro_batches_layout_or_order(
    make_worker, make_batch, gradients, seed, budget, layout, replay, of, missing
):
    batch = recorded(make_batch(seed), seed, missing)
    if replay:  # one prompt is computed once, so the sampler's experts must be the same for all of its sequences
        batch = batch.with_columns(routed_experts=_alike(batch))
    experts = {"balance": 0.5, "z_loss": 0.1, "replay": replay, "balance_of": of}
    order = np.random.default_rng(seed).permutation(batch.sequences)
    expected = gradients(make_worker("qwen3_moe", layout="padded", experts=experts), batch)
    worker = make_worker("qwen3_moe", layout=layout, micro_batch_tokens=budget, experts=experts)
    found = gradients(worker, batch.take(order))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3)


def _alike(batch):
    """Assign to each token the experts of the first token of the batch at its position and with its value."""
    column, position = batch["routed_experts"].copy(), np.concatenate([np.arange(n) for n in batch["lengths"]])
    group = np.repeat(batch["group"], batch["lengths"])
    first = {}
    for i, key in enumerate(zip(group, position, batch["tokens"], strict=True)):
        column[i] = column[first.setdefault(key, i)]
    return column


@pytest.mark.parametrize("kept", [0, -1])
def test_a_shared_prompt_is_replayed_if_one_of_its_sequences_has_a_record(make_worker, batch, kept):
    whole = recorded(batch)
    whole = whole.with_columns(routed_experts=_alike(whole))
    lost, starts = whole["routed_experts"].copy(), np.cumsum(batch["lengths"]) - batch["lengths"]
    owner = shared_prompts(batch, used_lengths(batch))
    for one in set(owner[owner >= 0]):
        for i in np.delete(np.flatnonzero(owner == one), kept):
            lost[starts[i] : starts[i] + batch["prompt_lengths"][i]] = -1
    worker = make_worker("qwen3_moe", layout="shared", experts={"replay": True})
    expected = worker.score(whole, ("logprobs",))["logprobs"]
    found = worker.score(whole.with_columns(routed_experts=lost), ("logprobs",))["logprobs"]
    np.testing.assert_array_equal(found, expected)


def test_a_mixture_without_options_trains_as_without_them_bitwise(make_worker, batch):
    ends = []
    for experts in ({}, {"record": True}):
        worker = make_worker("qwen3_moe", experts=experts)
        worker.train(recorded(batch), WEIGHTED)
        ends.append({name: w.detach().clone() for name, w in worker._weights.masters.items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_replay_computes_with_the_experts_of_the_sampler(
    make_worker, folders, batch, gradients, family, checkpointing
):
    batch = recorded(batch)
    worker = make_worker(
        family, layout="padded", gradient_checkpointing=checkpointing, experts={"replay": True}, micro_batch_tokens=90
    )
    model, logprobs = _forced(folders(family), batch)
    np.testing.assert_allclose(worker.score(batch, ("logprobs",))["logprobs"], logprobs.detach(), atol=1e-5)
    (-logprobs.sum() / int(batch["loss_mask"].sum())).backward()
    found = gradients(worker, batch, LIKELIHOOD)
    for name, p in model.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(found[name], expected, atol=2e-6, rtol=1e-4)
    metrics = worker.train(batch, LIKELIHOOD)
    assert metrics["routing/disagreement"].number() == 0
    assert metrics["routing/overruled"].number() > 0.5


def _forced(folder, batch):
    """Return a model of `transformers` whose experts are chosen by hand, and its logprobs [N], a sequence at a time."""
    model, found, at = model_of(folder), [], 0
    experts = torch.from_numpy(batch["routed_experts"].astype(np.int64)).view(-1, LAYERS, K)
    here = slice(0, 0)
    for number, layer in enumerate(model.model.layers):

        def forward(hidden, router=layer.mlp.gate, number=number):
            chances = torch.nn.functional.linear(hidden, router.weight).softmax(-1)
            chosen = experts[here, number]
            weights = chances.gather(1, chosen)
            return chances, weights / weights.sum(-1, keepdim=True), chosen

        layer.mlp.gate.forward = forward
    for row in np.split(np.arange(batch.tokens), np.cumsum(batch["lengths"])[:-1]):
        here, tokens = slice(row[0], row[-1]), torch.from_numpy(batch["tokens"][row])
        logits = model.lm_head(model.model(input_ids=tokens[None, :-1], use_cache=False).last_hidden_state[0])
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found += [torch.zeros(1), logprobs]
        at += len(row)
    return model, torch.cat(found) * torch.from_numpy(batch["loss_mask"])


@pytest.mark.parametrize("options", [{"lora": {"rank": 2}}, {"reference": True}], ids=["adapter", "whole"])
def test_the_reference_chooses_its_experts_itself(make_worker, batch, options):
    worker = make_worker("qwen3_moe", experts={"replay": True}, **options)
    found, expected = (worker.score(one, ("logprobs",), "reference") for one in (recorded(batch), batch))
    np.testing.assert_array_equal(found["logprobs"], expected["logprobs"])
    replayed, free = (worker.score(one, ("logprobs",))["logprobs"] for one in (recorded(batch), batch))
    assert np.abs(replayed - free).max() > 0.01


def test_without_a_replay_disagreement_is_the_share_of_other_experts(make_worker, folders, batch):
    model, drawn = model_of(folders("qwen3_moe")), recorded(batch, missing=0.3)
    worker = make_worker("qwen3_moe", experts={"record": True}, micro_batch_tokens=30)
    own, shares = [], []
    for row in np.split(np.arange(batch.tokens), np.cumsum(batch["lengths"])[:-1]):
        logits = model(input_ids=torch.from_numpy(batch["tokens"][row])[None], use_cache=False).router_logits
        own.append(torch.stack([each.topk(K).indices for each in logits], 1))
    own = torch.cat(own).numpy()
    used = np.concatenate([np.arange(n) < u for n, u in zip(batch["lengths"], used_lengths(batch), strict=True)])
    for mine, theirs in zip(own[used], drawn["routed_experts"].reshape(-1, LAYERS, K)[used], strict=True):
        if theirs[0, 0] >= 0:
            shares += [1 - len({*a} & {*b}) / K for a, b in zip(mine, theirs, strict=True)]
    found = worker.train(drawn, LIKELIHOOD)
    assert found["routing/disagreement"].number() == pytest.approx(np.mean(shares), rel=1e-5)
    assert "routing/overruled" not in found
    same = batch.with_columns(routed_experts=own.reshape(len(own), -1).astype(np.int16))
    fresh = make_worker("qwen3_moe", experts={"record": True})
    assert fresh.train(same, LIKELIHOOD)["routing/disagreement"].number() == 0


def test_where_nothing_is_recorded_the_router_chooses(make_worker, batch):
    nothing = recorded(batch, missing=1.1)
    free, replaying = make_worker("mixtral"), make_worker("mixtral", experts={"replay": True})
    expected, found = free.score(batch, ("logprobs",)), replaying.score(nothing, ("logprobs",))
    assert np.array_equal(expected["logprobs"], found["logprobs"])
    assert "routing/disagreement" not in replaying.train(nothing, LIKELIHOOD)


def test_columns_of_layers_without_experts_are_left_out(make_worker, tmp_path, tiny_tokenizer, batch):
    from transformers import AutoConfig, AutoModelForCausalLM

    from whet_start.small_models import make_model

    folder = make_model(tmp_path / "made", tiny_tokenizer, family="qwen3_moe", layers=3)
    config = AutoConfig.from_pretrained(folder)
    config.mlp_only_layers = [1]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    wide = np.zeros((batch.tokens, 3, K), np.int16)
    drawn = recorded(batch)["routed_experts"].reshape(-1, LAYERS, K)
    wide[:, [0, 2]] = drawn
    worker = make_worker(folder=folder, experts={"replay": True})
    scores = [
        worker.score(batch.with_columns(routed_experts=column.reshape(batch.tokens, -1)), ("logprobs",))["logprobs"]
        for column in (drawn, wide)
    ]
    assert np.array_equal(*scores)
    odd = batch.with_columns(routed_experts=np.zeros((batch.tokens, 5), np.int16))
    with pytest.raises(WhetError, match="wanted \\[tokens, 4\\]"):
        worker.score(odd, ("logprobs",))


def test_dense_models_and_batches_without_the_column_are_refused(make_worker, batch):
    with pytest.raises(ConfigError, match=r"backend\.experts: Qwen3ForCausalLM cannot do this: it is dense"):
        make_worker("qwen3", experts={"balance": 0.1})
    with pytest.raises(WhetError, match="has no column 'routed_experts'"):
        make_worker("qwen3_moe", experts={"replay": True}).train(batch, LIKELIHOOD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3"])
def test_weights_are_handed_over_under_the_names_of_the_folder(make_worker, folders, batch, family, dtype):
    worker = make_worker(family, dtype)
    stored = load_file(folders(family) / "model.safetensors")
    found = dict(worker._stored.stored(worker._weights.computing()))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name].to(found[name].dtype)) for name in stored)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_value_head_on_a_mixture_of_experts_is_trained_and_exported(make_worker, batch, tmp_path, family):
    worker = make_worker(family, head="value", experts={"balance": 0.01})
    regression = Spec("whet_testing.losses:Regression")
    losses = [worker.train(batch, regression)["loss"].number() for _ in range(8)]
    assert losses[-1] < losses[0]
    worker.export(str(tmp_path / "model"))
    again = make_worker(folder=tmp_path / "model", head="value")
    expected, found = (one.score(batch, ("values",))["values"] for one in (worker, again))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("layout", ["shared", "padded"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3"])
def test_steps_are_those_of_transformers_and_adamw(make_worker, make_batch, folders, family, layout):
    experts = {"balance": 0.02, "balance_of": "model"} if family != "qwen3" else {}
    options = {"lr": 1e-2, "weight_decay": 0.1}
    worker = make_worker(family, layout=layout, micro_batch_tokens=40, optimizer=options, experts=experts)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders(family), dtype=torch.float32, attn_implementation="eager")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for seed in range(3):
        batch = make_batch(seed)
        assert len(worker._plan(batch)) > 1
        ids, mask = entering(batch)
        more = {"output_router_logits": True} if experts else {}
        out = model(input_ids=ids, attention_mask=mask, **more)
        log_p = out.logits.log_softmax(-1)
        loss = torch.zeros(())
        for row, (tokens, learned) in enumerate(
            zip(
                np.split(batch["tokens"], np.cumsum(batch["lengths"])[:-1]),
                np.split(batch["loss_mask"], np.cumsum(batch["lengths"])[:-1]),
                strict=True,
            )
        ):
            for t in np.flatnonzero(learned):
                loss = loss - log_p[row, t - 1, tokens[t]] / int(batch["loss_mask"].sum())
        if experts:
            loss = loss + 0.02 * out.aux_loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found = worker.train(batch, LIKELIHOOD)
        assert found["loss"].number() == pytest.approx(loss.item(), abs=1e-4)
        assert found["grad_norm"].number() == pytest.approx(norm.item(), rel=1e-4)
    ours = worker.score(batch, ("logprobs",))["logprobs"]
    with torch.no_grad():
        log_p = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    learned = np.flatnonzero(batch["loss_mask"])
    row = np.searchsorted(np.cumsum(batch["lengths"]), learned, side="right")
    at = learned - (np.cumsum(batch["lengths"]) - batch["lengths"])[row] - 1
    np.testing.assert_allclose(ours[learned], log_p[row, at, batch["tokens"][learned]], atol=2e-3)


def test_a_router_that_the_model_keeps_in_float32_stays_so(make_worker, ernie, batch):
    slowly = {"folder": ernie, "optimizer": {"lr": 1e-3}}
    worker, high = make_worker(dtype="bfloat16", **slowly), make_worker(**slowly)
    held = {name: parameter.dtype for name, parameter in worker._root.model.named_parameters()}
    assert held["model.layers.1.mlp.gate.weight"] == torch.float32
    assert held["model.layers.1.mlp.experts.down_proj"] == torch.bfloat16
    for _ in range(3):
        ours, theirs = worker.train(batch, LIKELIHOOD), high.train(batch, LIKELIHOOD)
    assert ours["loss"].number() == pytest.approx(theirs["loss"].number(), rel=2e-2)
    before = dict(high._weights.masters)["model.layers.1.mlp.gate.weight"]
    assert not torch.equal(before, worker._weights.masters["model.layers.1.mlp.gate.weight"])
