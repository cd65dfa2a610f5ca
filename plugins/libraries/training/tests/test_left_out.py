"""Stored weights for which a model has no place: which are told of, and which show that config.json is wrong."""

import pytest

from whet.errors import WhetError
from whet_training.left_out import check_left_out

KNOWN = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)]


def check(*names, aloud=True, **config):
    check_left_out("folder", set(names), KNOWN, config, "Model", aloud=aloud)


def test_what_has_no_place_is_told_of_with_three_names_and_the_count(caplog):
    check()
    check("a", aloud=False)
    assert not caplog.records
    check("d", "b", "a", "c")
    assert "the weights in folder have 4 tensors that Model has no place for: a, b, c, ...; left out" in caplog.text
    check("score.weight")
    assert "have 1 tensor that Model has no place for: score.weight; left out" in caplog.text


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.bias", "model.layers.2.mlp.up_proj.weight", "model.layers.9.a"]
)
def test_biases_and_layers_that_the_config_lacks_are_refused(name):
    with pytest.raises(WhetError, match=rf"model.path: the weights in folder hold {name}, and config.json .* Model"):
        check(name, "a", aloud=False)


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (["model.layers.2.eh_proj.weight", "model.layers.2.mlp.up_proj.weight"], {}),
        (["model.layers.2.mlp.up_proj.weight"], {"num_nextn_predict_layers": 1}),
        (["vision.layers.7.mlp.up_proj.bias", "model.mtp_layers.3.norm.weight"], {}),
        (["model.layers.1.mlp.experts.7.bias"], {}),
    ],
)
def test_layers_that_predict_further_tokens_and_parts_that_a_model_lacks_are_only_told_of(caplog, names, config):
    check(*names, **config)
    assert f"{len(names)} tensor" in caplog.text
