"""FP8: what the plan refuses, and Megatron's fields that it becomes. No GPU has computed it."""

from types import SimpleNamespace

import pytest
import torch

from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, WorkerError
from whet_megatron import checks
from whet_megatron.architecture import read
from whet_megatron.config import MegatronConfig, facts, problems
from whet_megatron.fp8 import CAPABILITY, DelayedConfig, Fp8Config, options, refuse_device
from whet_megatron.parallel import ParallelConfig

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 384, "vocab_size": 375,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MIXED = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
NAMES = {"tensorwise", "blockwise", "delayed", "mxfp8"}


def found(fp8, dtype="bfloat16", sizes=None, **changes):
    parallel = ParallelConfig(**(sizes or {}))
    config = MegatronConfig(fp8=fp8, parallel=parallel)
    model = ModelInfo("model", {**QWEN3, **changes}, dtype)
    return {one.path: one.message for one in problems(config, model, parallel.least_ranks)}


def of_section(gpus=8, **config):
    return {one.path: one.message for one in checks.problems(MegatronConfig(**config), "backend", gpus, "bfloat16")}


@pytest.mark.parametrize("recipe", sorted(NAMES))
def test_a_model_whose_sides_divide_is_accepted_by_each_recipe(recipe):
    assert not found(Fp8Config(recipe=recipe))
    assert not of_section(fp8=Fp8Config(recipe=recipe))


@pytest.mark.parametrize(
    ("fp8", "changes", "path", "words"),
    [
        (Fp8Config(), {"dtype": "float32"}, "fp8", "computes in float32; set model.dtype to bfloat16"),
        (Fp8Config(), {"intermediate_size": 392}, "fp8.recipe", "16 divides; a rank has 392 feed-forward values"),
        (Fp8Config(recipe="mxfp8"), {"hidden_size": 144}, "fp8.recipe", "32 divides; a rank has 144 hidden values"),
        (Fp8Config(recipe="mxfp8"), {**MIXED}, "fp8.recipe", "a rank has 48 values of an expert"),
        (Fp8Config(), {"sizes": {"tensor": 4}, "head_dim": 12}, "fp8.recipe", "a rank has 24 values of heads"),
        (Fp8Config(first_bf16=3), {"sizes": {"pipeline": 2}}, "fp8.first_bf16", "a pipeline rank holds 2 of 4 layers"),
        (Fp8Config(first_bf16=2, last_bf16=2), {}, "fp8", "all 4 layers stay in bfloat16"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_model_does_not_allow_is_refused_by_its_key(fp8, changes, path, words):
    assert words in found(fp8, **changes)[path]


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"fp8": Fp8Config(), "gpus": 0}, "backend.fp8", "cluster.gpus gives backend none"),
        ({"layers": "transformer-engine", "gpus": 0}, "backend.layers", "Transformer Engine needs GPUs"),
        ({"fp8": Fp8Config(), "layers": "test"}, "backend.fp8", "layers is test"),
        ({"fp8": Fp8Config(recipe="delayed", last_bf16=1)}, "backend.fp8.last_bf16", "take another recipe"),
        ({"fp8": Fp8Config(delayed=DelayedConfig(history=4))}, "backend.fp8.delayed", "the recipe is blockwise"),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused(config, path, words):
    assert words in of_section(**config)[path]
    assert not of_section(gpus=0)


def test_a_device_that_cannot_compute_a_recipe_is_refused_with_what_can():
    assert CAPABILITY.keys() == NAMES
    refuse_device(Fp8Config(), (9, 0))
    with pytest.raises(ConfigError, match=r"needs GPUs of compute capability 9\.0.*has 8\.9; take tensorwise or delay"):
        refuse_device(Fp8Config(), (8, 9))
    with pytest.raises(ConfigError, match=r"fp8\.recipe: is mxfp8.*has 9\.0; take blockwise or tensorwise or delayed"):
        refuse_device(Fp8Config(recipe="mxfp8"), (9, 0))
    with pytest.raises(ConfigError, match=r"has 8\.0; leave backend\.fp8 out"):
        refuse_device(Fp8Config(), (8, 0))
    with pytest.raises(ConfigError, match="this rank has a CPU"):
        refuse_device(Fp8Config(), None)


def test_a_plan_names_the_gpus_and_the_package_that_it_needs():
    plain, low = (facts(MegatronConfig(fp8=one), ModelInfo("m", QWEN3, "bfloat16")) for one in (None, Fp8Config()))
    assert not plain.packages
    assert [one.module for one in low.packages] == ["transformer_engine"]
    assert "FP8 (blockwise) need GPUs of compute capability 9.0" in low.notes[-1]
    config = structure({"fp8": {"recipe": "delayed", "delayed": {"history": 16}}}, MegatronConfig, None)
    assert config.fp8 == Fp8Config(recipe="delayed", delayed=DelayedConfig(history=16))


class TestMegatronsFields:
    """With the real `TransformerConfig`."""

    @pytest.mark.parametrize(
        ("fp8", "expected"),
        [
            (Fp8Config(), {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
            (Fp8Config(recipe="tensorwise"), {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
            (Fp8Config(recipe="mxfp8", format="hybrid"), {"fp8": "hybrid", "fp8_recipe": "mxfp8"}),
            (
                Fp8Config(recipe="delayed", delayed=DelayedConfig(16, "most_recent", weight_gradients=False)),
                {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16,
                 "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": False},
            ),
            (
                Fp8Config(first_bf16=1, last_bf16=2),
                {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 2},
            ),
        ],
        ids=str,
    )  # fmt: skip
    def test_a_config_becomes_them(self, fp8, expected):
        from megatron.core.transformer import TransformerConfig

        made = TransformerConfig(
            num_layers=4, hidden_size=128, num_attention_heads=8, bf16=True, add_bias_linear=False, **options(fp8)
        )
        assert {key: getattr(made, key) for key in expected} == expected
        assert not made.fp8_param

    @pytest.mark.parametrize("fp8", [None, Fp8Config(recipe="tensorwise", first_bf16=1)], ids=str)
    def test_they_are_part_of_what_a_model_is_built_of(self, fp8):
        import torch

        from whet_megatron.model import transformer_config

        ranks = SimpleNamespace(sizes=ParallelConfig(), device=torch.device("cpu"))
        arch = read(ModelInfo("model", QWEN3))
        made = transformer_config(arch, MegatronConfig(fp8=fp8), ranks, torch.bfloat16, "test")
        assert (made.fp8, made.first_last_layers_bf16) == (("hybrid", True) if fp8 else (None, False))

    def test_every_recipe_is_one_of_megatrons(self):
        from megatron.core.enums import Fp8Recipe

        assert {one.value for one in Fp8Recipe} == NAMES | {"custom"}

    def test_the_multiple_is_that_to_which_megatron_pads(self):
        from megatron.core.fp8_utils import get_fp8_align_size

        for name in NAMES:
            assert Fp8Config(recipe=name).multiple == get_fp8_align_size(name)

    @pytest.mark.parametrize("number", range(4))
    def test_layers_at_both_ends_stay_in_bfloat16(self, number):
        from megatron.core.fp8_utils import is_first_last_bf16_layer
        from megatron.core.transformer import TransformerConfig

        fields = options(Fp8Config(first_bf16=1, last_bf16=2))
        made = TransformerConfig(num_layers=4, hidden_size=128, num_attention_heads=8, bf16=True, **fields)
        assert is_first_last_bf16_layer(made, number) == (number in (0, 2, 3))

    @pytest.mark.parametrize("layout", ["packed", "padded"])
    def test_tokens_of_a_rank_are_a_multiple_of_it(self, make_batch, layout):
        import torch

        from whet.interfaces.axes import RankCoordinates
        from whet_megatron.feed import Feeder

        sizes = ParallelConfig(tensor=2, sequence=True, context=1)
        feeder = Feeder(sizes, layout, torch.device("cpu"), None, RankCoordinates(0), multiple=16)
        for one in (feeder.feed(make_batch(0)), feeder.nothing(make_batch(0).take([]))):
            assert one.tokens.shape[1] % 32 == 0  # the tensor parallel ranks have 16 or more of them each

    def test_a_cpu_is_refused_when_the_workers_start(self, build):
        with pytest.raises(WorkerError, match=r"backend\.fp8: is set, and this rank has a CPU"):
            build("qwen3", dtype="bfloat16", fp8=Fp8Config())


def test_passes_without_a_backward_pass_leave_training_mode_and_come_back_to_it():
    """In training mode Transformer Engine keeps the scales of each pass for a recomputation."""
    from whet_megatron.passes import evaluating

    stages = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).eval()]
    with evaluating(stages):
        assert not stages[0].training
        assert not torch.is_grad_enabled()
    assert [stage.training for stage in stages] == [True, False]
    assert torch.is_grad_enabled()


def test_copies_of_weights_in_fp8_are_freed_in_sleep():
    from whet_megatron.held import _forget_quantised

    layer, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.zeros(4)}
    _forget_quantised(SimpleNamespace(chunks=[torch.nn.Sequential(layer, plain)]))
    assert layer._fp8_workspaces == {}


@pytest.mark.parametrize(
    ("torchs", "keys"), [(True, {"step", "exp_avg", "exp_avg_sq"}), (False, {"exp_avg", "exp_avg_sq"})]
)
def test_each_kind_of_adamw_has_a_state_before_its_first_step(monkeypatch, torchs, keys):
    from whet_megatron import torch_adamw

    monkeypatch.setattr(torch_adamw, "_uses_torch", lambda: torchs)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    torch_adamw.begin([optimizer])
    assert set(optimizer.state[parameter]) == keys
    assert not any(value.any() for value in optimizer.state[parameter].values())
