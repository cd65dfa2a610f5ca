import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from whet.component import Spec
from whet.data.batch import from_sequences
from whet.data.model_info import read_model
from whet.errors import ConfigError, WhetError
from whet_fsdp2.loading import load_model, prepare
from whet_fsdp2.lora import find_linears
from whet_fsdp2.sharding import _keep_layers
from whet_ops.logprobs import MATRIX


def copy_of(folder, tmp_path, weights=None, **config):
    """Copy a model folder with some of its config, or its weights, changed."""
    target = tmp_path / "model"
    shutil.copytree(folder, target)
    document = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**document, **config}))
    if weights is not None:
        file = target / "model.safetensors"
        save_file(weights(load_file(file)), file, metadata={"format": "pt"})
    return target


def test_missing_weights_are_an_error_not_random_numbers(make_worker, folders, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    broken = copy_of(folders(), tmp_path, lambda w: {k: v for k, v in w.items() if k != name})
    with pytest.raises(WhetError, match=f"lack {name}"):
        make_worker(folder=broken)


def test_weights_of_another_shape_are_named(make_worker, folders, tmp_path):
    with pytest.raises(WhetError, match=r"mlp\.(up|gate|down)_proj"):
        make_worker(folder=copy_of(folders(), tmp_path, intermediate_size=100))


def test_weights_that_are_not_finite_are_named(make_worker, folders, tmp_path):
    folder = shutil.copytree(folders(), tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the weight model\.norm\.weight has values that are not finite"):
        make_worker(folder=folder)


def test_a_tied_model_whose_files_have_a_head_of_its_own_is_exported_untied(make_worker, folders, tmp_path):
    folder = shutil.copytree(folders(), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_worker(folder=folder).export(str(tmp_path / "out"))
    assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]
    make_worker().export(str(tmp_path / "tied"))
    assert json.loads((tmp_path / "tied/config.json").read_text())["tie_word_embeddings"]


def coded(code, folder, tmp_path, **quantization):
    """Copy a model folder with its projections in 8 bits and their scales beside them."""

    def weights(found):
        for name in [one for one in found if one.endswith("_proj.weight")]:
            found |= code(name, found[name])
        return found

    return copy_of(folder, tmp_path, weights, quantization_config=quantization)


def test_weights_that_stay_quantised_are_refused(make_worker, folders, tmp_path):
    pytest.importorskip("bitsandbytes")

    def code(name, tensor):
        scale = tensor.abs().amax(1)
        return {name: (tensor / scale[:, None] * 127).round().to(torch.int8), name.replace("weight", "SCB"): scale}

    folder = coded(code, folders(), tmp_path, quant_method="bitsandbytes", load_in_8bit=True)
    for options in ({}, {"lora": {"rank": 2}}):
        with pytest.raises(WhetError, match=r"model\.path: the weights in .* are still quantised .* by bitsandbytes"):
            make_worker(folder=folder, **options)


def test_weights_that_are_no_longer_quantised_when_they_are_loaded_are_trained(folders, tmp_path):
    def code(name, tensor):
        scale = tensor.abs().max() / 448
        return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}

    block = {"weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = load_model(read_model(coded(code, folders(), tmp_path, quant_method="fp8", **block))).state_dict()
    for name, tensor in load_model(read_model(folders())).state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=0.05 * float(tensor.abs().max()), rtol=0)


def test_weights_that_are_left_out_are_told_of(folders, tmp_path, caplog):
    name = "model.layers.0.mlp.further.weight"
    load_model(read_model(copy_of(folders(), tmp_path, lambda w: {**w, name: torch.ones(2)})))
    assert f"1 tensor that Qwen3ForCausalLM has no place for: {name}; left out, also of exports" in caplog.text


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.self_attn.q_proj.weight"])
def test_weights_that_show_another_config_are_refused(make_worker, folders, tmp_path, name):
    with pytest.raises(WhetError, match=f"hold {name}, and config.json describes Qwen3ForCausalLM without"):
        make_worker(folder=copy_of(folders(), tmp_path, lambda w: {**w, name: torch.ones(2)}))


def test_a_head_that_another_replaces_and_further_predicted_tokens_are_no_mistakes(folders, tmp_path, caplog):
    load_model(read_model(folders("llama")), "value")
    assert "no place" not in caplog.text
    further = {f"model.layers.2.{part}.weight": torch.ones(2) for part in ("eh_proj", "self_attn.q_proj")}
    load_model(read_model(copy_of(folders(), tmp_path, lambda w: w | further)))
    assert "2 tensors that Qwen3ForCausalLM has no place for" in caplog.text


def test_a_cut_off_file_is_reported_with_its_folder(make_worker, folders, tmp_path):
    broken = copy_of(folders(), tmp_path)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WhetError, match="cannot be loaded"):
        make_worker(folder=broken)


def test_a_model_without_a_value_head_gets_one_only_where_it_is_trained(folders, tmp_path):
    info = read_model(folders())
    with pytest.raises(WhetError, match=r"has no value head \(score\.weight\), and nothing trains a new one here"):
        load_model(info, "value", draws=False)
    load_model(info, "value").save_pretrained(tmp_path / "trained")
    load_model(read_model(tmp_path / "trained"), "value", draws=False)


def test_pickled_weights_are_not_read(make_worker, folders, tmp_path):
    broken = copy_of(folders(), tmp_path)
    torch.save(load_file(broken / "model.safetensors"), broken / "pytorch_model.bin")
    (broken / "model.safetensors").unlink()
    with pytest.raises(WhetError, match="cannot be loaded"):
        make_worker(folder=broken)


@pytest.fixture
def softcapped(tmp_path, tiny_tokenizer):
    """Return the folder of a model whose attention has soft-capping, which packed rows do not have."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=len(tiny_tokenizer), hidden_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=24,
        num_key_value_heads=2, intermediate_size=64, final_logit_softcapping=None, attn_logit_softcapping=5.0,
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_layout_that_is_not_exact_is_refused_where_it_was_asked_for(make_worker, softcapped):
    with pytest.raises(ConfigError, match=r"backend\.layout: 'packed' does not work.*softcap.*layout: padded"):
        make_worker(folder=softcapped, layout="packed")


def test_auto_falls_back_to_padded_and_says_so(make_worker, softcapped, batch, caplog):
    worker = make_worker(folder=softcapped)
    assert "layout: padded" in caplog.text
    assert worker._layout == "padded"
    same = make_worker(folder=softcapped, layout="padded")
    ours, theirs = (w.score(batch, ("logprobs",))["logprobs"] for w in (worker, same))
    assert (ours == theirs).all()


def test_auto_shares_prompts_where_the_model_can(make_worker):
    assert make_worker()._layout == "shared"


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("window", [3, 12])
def test_a_model_with_a_window_in_some_layers_is_packed(make_worker, folders, tmp_path, batch, gradients, window, head):
    folder = copy_of(
        folders(), tmp_path, sliding_window=window, use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    loss = Spec(f"whet_testing.losses:{'Weighted' if head == 'lm' else 'Regression'}")
    plain = gradients(make_worker(folder=folder, head=head, layout="padded"), batch, loss)
    whole = gradients(make_worker(head=head, layout="padded"), batch, loss)
    for layout in ("auto", "packed"):
        worker = make_worker(folder=folder, head=head, layout=layout)
        assert worker._layout == ("shared" if layout == "auto" else layout)
        found = gradients(worker, batch, loss)
        for name, gradient in plain.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-3)
    assert not torch.allclose(plain["model.layers.1.self_attn.k_proj.weight"],
                              whole["model.layers.1.self_attn.k_proj.weight"], rtol=1e-2)  # fmt: skip


HEADS = {
    "gemma2": {"final_logit_softcapping": 4.0, "attn_logit_softcapping": None},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "falcon_h1": {"lm_head_multiplier": 0.25, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8},
    "hyperclovax": {"logits_scaling": 3.0},
}
"""Models whose logits are more than a product with a matrix."""


def with_head(name, folder, **more):
    """Return the folder of a random model; its logits have a standard deviation near 8."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 200, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24,
        "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": False, **HEADS[name], **more,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 1.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_do_more_than_multiply_train_as_their_own_code_does(make_worker, tmp_path, batch, name, dtype):
    from transformers import AutoModelForCausalLM

    folder = with_head(name, tmp_path / "model")
    worker = make_worker(folder=folder, dtype=dtype)
    found = worker.score(batch, ("logprobs",))["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    starts = np.cumsum(batch["lengths"]) - batch["lengths"]
    for start, length in zip(starts, batch["lengths"], strict=True):
        tokens = torch.from_numpy(batch["tokens"][start : start + length])
        logits = model(tokens[None]).logits[0, :-1].float()
        expected = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(
            found[start + 1 : start + length], expected * batch["loss_mask"][start + 1 : start + length],
            atol=1e-4 if dtype == "float32" else 0.3, rtol=1e-5 if dtype == "float32" else 0.03,
        )  # fmt: skip


@pytest.mark.parametrize("size", [0.02, 1.0])
@pytest.mark.parametrize(("dtype", "more"), [("float32", {}), ("bfloat16", {"lora": {"rank": 2}})])
def test_a_head_without_a_known_rule_is_refused_also_where_logits_are_small(
    make_worker, tmp_path, monkeypatch, dtype, more, size
):
    """With a bound of 30, logits below 3 differ by less than bfloat16 rounds."""
    folder = with_head("gemma2", tmp_path / "model", final_logit_softcapping=30.0, initializer_range=0.02)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= size / 1.2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    make_worker(folder=folder, dtype=dtype, **more)
    monkeypatch.setattr("whet_fsdp2.loading.logit_rules", lambda config, float32: [MATRIX])
    with pytest.raises(ConfigError, match="more than multiply"):
        make_worker(folder=folder, dtype=dtype, **more)


def test_random_state_of_the_process_is_left_alone(make_worker, batch):
    torch.manual_seed(7)
    expected = torch.random.get_rng_state()
    worker = make_worker()
    worker.train(batch, Spec("whet_testing.losses:Likelihood"))
    assert torch.equal(torch.random.get_rng_state(), expected)


COMMON = {
    "vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    "max_position_embeddings": 128,
}  # fmt: skip
DECODER = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}
RANDOM = {
    "seed_oss": {**DECODER, "head_dim": 8, "residual_dropout": 0.3},
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.3, "layerdrop": 0.3},
    "phimoe": {**DECODER, "num_local_experts": 4, "input_jitter_noise": 0.3, "sliding_window": None,
               "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
"""Models that draw random numbers in training mode."""


def made(folder, family, **config):
    """Write a random model of any family of `transformers`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", [True, "selective"])
@pytest.mark.parametrize("family", RANDOM)
def test_checkpointing_draws_no_random_numbers(make_worker, tmp_path, batch, gradients, family, kind):
    folder = made(tmp_path, family, **RANDOM[family])
    plain, saving = make_worker(folder=folder), make_worker(folder=folder, gradient_checkpointing=kind)
    found, expected = (worker.score(batch, ("logprobs",))["logprobs"] for worker in (saving, plain))
    assert (found == expected).all()
    expected = gradients(plain, batch)
    for name, gradient in gradients(saving, batch).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


def test_dropout_that_cannot_be_switched_off_is_refused(make_worker, tmp_path):
    folder = made(tmp_path, "falcon", **COMMON, hidden_dropout=0.5, multi_query=False, initializer_range=0.2)
    make_worker(folder=folder)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: FalconForCausalLM .* dropout"):
        make_worker(folder=folder, gradient_checkpointing=True)


def test_what_is_for_the_layers_of_a_decoder_leaves_a_vision_tower_alone():
    from transformers import AutoModelForCausalLM, Gemma3Config

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = Gemma3Config(text_config={**DECODER, "head_dim": 8}, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config)
    layers = [f"model.language_model.layers.{number}" for number in range(2)]
    found = find_linears(model, ())
    assert {name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0] for name in found} == set(layers)
    plan = dict.fromkeys([*layers, "model.vision_tower", "model.language_model.norm"], "free_full_weight")
    kept = _keep_layers(lambda model, meshes, plan: plan, model, None, plan)
    assert kept == plan | dict.fromkeys(layers, "keep_full_weight")


EXPERTS = {**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
           "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
OTHERS = {
    "gpt_oss": {**EXPERTS, "sliding_window": 6},
    "phimoe": {**EXPERTS, "sliding_window": None, "lora": True},
    "bloom": {"vocab_size": 200, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
    "persimmon": {**COMMON, "intermediate_size": 48, "initializer_range": 0.2},
}


@pytest.mark.parametrize("family", OTHERS)
def test_models_of_other_forms_are_scored_trained_and_exported(make_worker, tmp_path, batch, family):
    from transformers import AutoModelForCausalLM

    config = dict(OTHERS[family])
    options = {"lora": {"rank": 2}} if config.pop("lora", False) else {}
    folder = made(tmp_path / "model", family, **config)
    worker = make_worker(folder=folder, **options)
    for step in range(2):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        found = worker.score(batch, ("logprobs",))["logprobs"][batch["loss_mask"]]
        learned = split(batch, "loss_mask")
        expected = np.concatenate([row[m[1:]] for row, m in zip(by_itself(model, batch), learned, strict=True)])
        np.testing.assert_allclose(found, expected, atol=2e-5)
        if step == 0:
            assert worker.train(batch, Spec("whet_testing.losses:Weighted"))["grad_norm"].number() > 0
            folder = tmp_path / "exported"
            worker.export(str(folder))


def split(batch, column):
    return np.split(batch[column], np.cumsum(batch["lengths"])[:-1])


def by_itself(model, batch):
    """Yield the logprobs of a model in evaluation mode, of each sequence from its second token on."""
    for row in split(batch, "tokens"):
        with torch.no_grad():
            log_p = model(input_ids=torch.from_numpy(row)[None, :-1]).logits[0].log_softmax(-1)
        yield log_p.gather(1, torch.from_numpy(row)[1:, None])[:, 0].numpy()


def test_a_model_that_does_not_name_its_body_is_refused(make_worker, tmp_path):
    folder = made(tmp_path, "llama4_text", **EXPERTS, intermediate_size_mlp=48)
    with pytest.raises(ConfigError, match="Llama4ForCausalLM does not name the part below its head"):
        make_worker(folder=folder)


HIDDEN = {
    "qwen2_moe": {**DECODER, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
                  "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    "phimoe": {**EXPERTS, "sliding_window": 24},
}  # fmt: skip
"""Models that pass no window to their attention. It is longer than the sequences with which layouts are compared."""


@pytest.mark.parametrize("family", HIDDEN)
def test_a_window_of_which_only_the_mask_knows_is_not_packed(make_worker, tmp_path, caplog, family):
    folder = made(tmp_path, family, **HIDDEN[family])
    assert make_worker(folder=folder)._layout == "padded"
    assert "window of which only the mask knows" in caplog.text


@pytest.mark.parametrize("change", [{"sliding_window": 128}, {"use_sliding_window": False}], ids=str)
def test_a_window_that_hides_nothing_is_packed(make_worker, tmp_path, change):
    folder = made(tmp_path, "qwen2_moe", **{**HIDDEN["qwen2_moe"], **change})
    assert make_worker(folder=folder)._layout == "shared"


@pytest.mark.parametrize(
    ("family", "more"),
    [("lfm2", {"layer_types": ["conv", "full_attention"]}), ("jamba", {
        "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 4})],
    ids=["a convolution", "a state"],
)  # fmt: skip
def test_rows_whose_sequences_reach_each_other_are_not_packed(tmp_path, caplog, family, more):
    folder = made(tmp_path, family, **{**DECODER, **more, "initializer_range": 0.05})
    for dtype, words in ((torch.bfloat16, "depend on the other sequences"), (torch.float32, "differ by")):
        caplog.clear()
        _, layout = prepare(load_model(read_model(folder, "float32"), dtype=dtype), "auto", 0)
        assert layout == "padded"
        assert words in caplog.text


ROTATED = {
    "phi3": {"original_max_position_embeddings": 24, "max_position_embeddings": 192, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24}},
    "llama": {"max_position_embeddings": 24, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
}  # fmt: skip


@pytest.mark.parametrize("family", ROTATED)
def test_sequences_whose_positions_would_depend_on_others_are_refused(make_worker, tmp_path, family):
    worker = make_worker(folder=made(tmp_path, family, **{**DECODER, **ROTATED[family]}))
    for length in (25, 26):
        row = {"tokens": np.arange(length) + 3, "loss_mask": np.arange(length) > 4}
        batch = from_sequences([row], prompt_lengths=[5])
        if length == 25:  # the last token is a target alone
            expected = model_logprobs(worker._info.path, batch)
            np.testing.assert_allclose(worker.score(batch, ("logprobs",))["logprobs"][5:], expected[4:], atol=2e-5)
            continue
        for call in (worker.score, worker.evaluate, worker.train):
            with pytest.raises(WhetError, match=r"25 tokens .* rollout.max_context or data.max_length to 24"):
                call(batch, ("logprobs",) if call == worker.score else Spec("whet_testing.losses:Likelihood"))


def model_logprobs(folder, batch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return next(by_itself(model, batch))
