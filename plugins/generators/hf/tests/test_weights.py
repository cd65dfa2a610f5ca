"""New weights are taken as a whole, and the decoder is checked against the model."""

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

from whet.errors import WeightSyncError, WhetError
from whet_hf import loading
from whet_hf.fused import FusedDecoder, unsupported
from whet_hf.loading import choose_decoder, decoding_error, load_model, take_weights
from whet_hf.plain import PlainDecoder


def weights_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.clone()) for name, parameter in model.named_parameters()]


def test_new_weights_are_seen_by_model_and_decoder(load: Any) -> None:
    for shape in ("qwen3", "qwen2", "llama-gqa-untied"):
        ours, other = load(shape), load(shape, fused=False)
        for parameter in other.model.parameters():
            parameter.mul_(1.1).add_(0.01)
        assert decoding_error(ours.decoder, other.model) > 1e-3
        take_weights(ours.model, weights_of(other.model))
        ours.decoder.refresh()
        assert decoding_error(ours.decoder, other.model) < 1e-5


def test_other_dtypes_are_cast(load: Any) -> None:
    model = load("llama").model
    take_weights(model, [(name, tensor.bfloat16()) for name, tensor in weights_of(model)])
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_tied_weights_may_come_under_either_name_or_both(load: Any) -> None:
    model = load("qwen3").model
    weights = dict(weights_of(model))
    embedding = weights.pop("model.embed_tokens.weight") + 1
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        take_weights(model, [*weights.items(), *((name, embedding) for name in names)])
        assert torch.equal(model.lm_head.weight, embedding)
        assert torch.equal(model.model.embed_tokens.weight, embedding)


def test_what_is_missing_unknown_double_or_of_another_shape_is_named(load: Any) -> None:
    model = load("qwen2").model
    weights = weights_of(model)
    with pytest.raises(WeightSyncError, match=r"1 parameters were not sent: model\.norm\.weight"):
        take_weights(model, [(n, t) for n, t in weights if n != "model.norm.weight"])
    with pytest.raises(WeightSyncError, match="and 21 more"):
        take_weights(model, weights[:0])
    with pytest.raises(WeightSyncError, match=r"has no parameter model\.extra"):
        take_weights(model, [("model.extra", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="was sent twice"):
        take_weights(model, [weights[0], weights[0]])
    with pytest.raises(WeightSyncError, match=r"shape \(64,\), wanted \(384, 64\)"):
        take_weights(model, [(weights[0][0], torch.zeros(64))])


def make_folder(tmp_path: Path, config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def test_a_model_of_another_family_is_decoded_by_its_own_code(tmp_path: Path, caplog: Any) -> None:
    model = make_folder(tmp_path, GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    assert isinstance(choose_decoder(model, fused=True), PlainDecoder)
    assert "models of type gpt2" in caplog.text
    assert "prefix_caching" not in caplog.text
    choose_decoder(model, fused=True, cache_bytes=1 << 20)
    assert "keeps no ended sequences, so generator.prefix_caching does nothing" in caplog.text


def test_sliding_windows_are_left_to_the_model(tmp_path: Path, caplog: Any) -> None:
    options = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    assert unsupported(MistralConfig(**options, sliding_window=4)) == "sliding-window attention"
    assert isinstance(
        choose_decoder(make_folder(tmp_path, MistralConfig(**options, sliding_window=4)), fused=True), PlainDecoder
    )
    full = make_folder(tmp_path, MistralConfig(**options, sliding_window=None))
    assert isinstance(choose_decoder(full, fused=True), FusedDecoder)


def test_a_fused_decoder_that_disagrees_is_not_used(load: Any, monkeypatch: Any, caplog: Any) -> None:
    refresh = FusedDecoder.refresh

    def forgetful(self: FusedDecoder) -> None:
        refresh(self)
        self.layers = [layer._replace(mlp_norm=1.01 * layer.mlp_norm) for layer in self.layers]

    monkeypatch.setattr(FusedDecoder, "refresh", forgetful)
    assert isinstance(load("qwen3").decoder, PlainDecoder)
    assert "its logits differ by" in caplog.text


def test_a_model_that_no_decoder_agrees_with_is_refused(load: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "decoding_error", lambda decoder, model: 0.5)
    with pytest.raises(WhetError, match=r"other logits with a cache than without, by 5\.0e-01 of the largest"):
        load("qwen3")


@pytest.mark.parametrize("fused", [True, False])
def test_logits_that_are_not_finite_agree_with_nothing(load: Any, fused: bool) -> None:
    one = load("qwen3")
    one.model.model.norm.weight.fill_(torch.nan)
    assert math.isnan(decoding_error(one.decoder, one.model))
    with pytest.raises(WhetError, match=r"logits that are not finite: its weights have diverged"):
        choose_decoder(one.model, fused=fused)


def test_sessions_that_begin_together_have_the_positions_of_the_longest(load: Any, monkeypatch: Any) -> None:
    decoder, rotary, longest = load("qwen3").decoder, FusedDecoder.reserve, threading.Event()
    real = decoder.model.model.rotary_emb.forward

    def slow(like: torch.Tensor, positions: torch.Tensor) -> Any:
        if positions.shape[1] < 1024:
            began.set()
            longest.wait(0.5)  # were both let in, the longer would be through in this time
        return real(like, positions)

    def reserve_more() -> None:
        began.wait(60)
        rotary(decoder, 600)
        longest.set()

    began = threading.Event()
    monkeypatch.setattr(decoder.model.model.rotary_emb, "forward", slow)
    other = threading.Thread(target=reserve_more)
    other.start()
    rotary(decoder, 500)
    other.join(60)
    assert len(decoder._tables) == 1024


def test_weights_that_lack_a_layer_are_refused(tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WhetError, match=r"the weights in .*model lack model\.layers\.2\.input_layernorm\.weight"):
        load_model(str(folder), "float32", "cpu", False)
