"""What a plan says and refuses, without torch and without Megatron."""

import json
import subprocess
import sys
from types import SimpleNamespace

import attrs
import pytest
from attrs import evolve

from whet.component import AdapterInfo
from whet.config.structure import structure
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError
from whet_megatron import architecture, layers, memory
from whet_megatron.architecture import Family
from whet_megatron.checks import problems as section_problems
from whet_megatron.config import MegatronConfig, OptimizerConfig, facts, problems
from whet_megatron.hooks import whet_check_config
from whet_megatron.parallel import Grid, ParallelConfig, padded_rows
from whet_training.experts import ExpertsConfig
from whet_training.lora_config import LoraConfig
from whet_training.ranks import members
from whet_training.schedule import ScheduleConfig
from whet_training.weight_groups import WeightGroup

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 384, "vocab_size": 375,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
MIXED = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def model(dtype="float32", **changes):
    return ModelInfo("model", {**QWEN3, **changes}, dtype)


def found(sizes, ranks, of=None, **config):
    made = MegatronConfig(parallel=ParallelConfig(**sizes), **config)
    return {problem.path: problem.message for problem in problems(made, of or model(), ranks)}


@pytest.mark.parametrize(
    ("sizes", "ranks", "path", "words"),
    [
        ({"tensor": 2, "pipeline": 2}, 6, "parallel.pipeline", "6 ranks cannot be split into groups of"),
        ({"tensor": 3}, 3, "parallel.tensor", "does not divide the model's 8 heads and 4 key heads"),
        ({"tensor": 8}, 8, "parallel.tensor", "does not divide the model's 4 key heads"),
        ({"pipeline": 3}, 3, "parallel.pipeline", "the model's 4 layers cannot be split evenly into 3 stages"),
        ({"pipeline": 2, "virtual": 4}, 2, "parallel.virtual", "4 layers cannot be split evenly into 2 ranks x 4"),
        ({"virtual": 2}, 1, "parallel.virtual", "parallel.pipeline is 1"),
        ({"sequence": True}, 1, "parallel.sequence", "parallel.tensor is 1"),
        ({"expert": 2}, 2, "parallel.expert", "the model has no experts"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused_by_its_key(sizes, ranks, path, words):
    assert words in found(sizes, ranks)[path]


@pytest.mark.parametrize(
    ("sizes", "ranks", "path", "words"),
    [
        ({"expert": 3}, 3, "parallel.expert", "does not divide the model's 8 experts"),
        ({"expert": 4}, 2, "parallel.expert", "2 ranks cannot be split into groups of 4 (expert)"),
        ({"tensor": 2, "expert": 2}, 2, "parallel.sequence", "with sequence: true alone"),
        ({"tensor": 2, "sequence": True}, 2, "parallel.expert_tensor", "would not add up the gradients of experts"),
        ({"tensor": 5, "sequence": True, "expert_tensor": 5}, 5, "parallel.expert_tensor", "48 values of an expert"),
    ],
    ids=str,
)
def test_what_experts_do_not_allow_is_refused_by_its_key(sizes, ranks, path, words):
    assert words in found(sizes, ranks, ModelInfo("model", MIXED))[path]


def test_a_reward_model_is_no_language_model():
    scorer = model(architectures=["Qwen3ForSequenceClassification"])
    assert "is a Qwen3ForSequenceClassification" in found({}, 1, scorer)["head"]
    assert not found({}, 1, scorer, head="value")


def test_options_of_experts_are_refused_for_a_dense_model():
    experts, mixed = ExpertsConfig(z_loss=0.1, replay=True), ModelInfo("model", MIXED)
    assert "the model has no experts" in found({}, 1, experts=experts)["experts.z_loss"]
    assert not found({}, 1, mixed, experts=experts)
    assert facts(MegatronConfig(experts=experts), mixed).columns_wanted == {"routed_experts"}
    assert not facts(MegatronConfig(), mixed).columns_wanted


def test_the_plan_says_how_experts_are_multiplied():
    told = {how: facts(MegatronConfig(grouped_experts=how), ModelInfo("model", MIXED)).notes[1]
            for how in ("auto", True, False)}  # fmt: skip
    assert "at once with Transformer Engine" in told["auto"]
    assert "multiplied at once (" in told[True]
    assert "one after the other (" in told[False]
    assert len(facts(MegatronConfig(), model()).notes) == 1


def test_a_rank_with_padding_alone_is_refused():
    assert padded_rows(375, 2, 64) == 192
    assert "lower it" in found({"tensor": 4}, 4, vocabulary_multiple=128)["vocabulary_multiple"]
    assert not found({"tensor": 4}, 4, vocabulary_multiple=32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, "is a model of type 'gemma3'; this backend has llama"),
        ({"hidden_act": "gelu"}, "has the activation gelu"),
        ({"attention_bias": True}, "has biases"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "attends to a sliding window"),
        ({"use_sliding_window": True}, "attends to a sliding window"),
        ({**MIXED, "model_type": "mixtral", "sliding_window": 4096}, "attends to a sliding window"),
        ({"rope_scaling": {"type": "yarn"}}, "scales rotary positions by yarn"),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 2.0}}, "has low_freq_factor 2.0"),
        ({"rms_norm_eps": None}, "has a config.json without rms_norm_eps"),
        ({"num_hidden_layers": -2}, "has num_hidden_layers -2, wanted a positive integer"),
        ({"rms_norm_eps": "x"}, "has rms_norm_eps 'x', wanted a positive number"),
        ({**MIXED, "num_experts": None}, "has a config.json without num_experts"),
        ({"rope_theta": "x"}, "has rope_theta 'x' in its rope_parameters, wanted a positive number"),
        ({"rope_scaling": "x"}, "has rope_scaling x, wanted one object for all layers"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "wanted one object for all layers"),
        ({"rope_scaling": {"type": "llama3", "factor": None, **architecture.LLAMA3}}, "has factor None"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "has low_freq_factor None, high_freq_factor None"),
        ({"dtype": "float16"}, "computes in float16"),
        ({**MIXED, "mlp_only_layers": [0]}, "has dense layers among those with experts"),
        ({**MIXED, "num_experts_per_tok": 1}, "chooses one expert for each token"),
        ({**MIXED, "num_experts_per_tok": 9}, "chooses 9 of 8 experts for each token"),
        ({"num_key_value_heads": 3}, "has 8 heads, which its 3 key heads do not divide"),
        ({"head_dim": 15}, "has heads of 15 values"),
        ({"quantization_config": {"quant_method": "fp8"}}, "has quantised weights (quantization_config)"),
        ({"text_config": {"quantization_config": {}}}, "has quantised weights (quantization_config)"),
    ],
    ids=str,
)
def test_what_megatron_cannot_compute_is_refused_by_the_plan_and_by_the_worker(changes, words):
    of = model(changes["dtype"]) if "dtype" in changes else model(**changes)
    assert words in found({}, 1, of)["use"]
    with pytest.raises(ConfigError):
        architecture.read(of)
    assert facts(MegatronConfig(), of).memory is None


@pytest.mark.parametrize("kind", sorted(architecture.FAMILIES))
def test_numbers_that_a_config_lacks_are_those_of_transformers_or_refused(kind):
    """Leave out each key. The sizes here are none that `transformers` takes by itself."""
    configs = pytest.importorskip("transformers").AutoConfig
    sizes = MIXED if kind in ("mixtral", "qwen3_moe") else QWEN3
    whole = {**sizes, "rope_theta": 5e5, "model_type": kind}
    for key in sorted(whole.keys() - {"architectures", "model_type"}):
        config = {name: value for name, value in whole.items() if name != key}
        of = ModelInfo("model", config)
        if any(architecture.refusals(of)):
            assert key in next(architecture.refusals(of))
            continue
        read, theirs = architecture.read(of), configs.for_model(**config)
        assert read.rope_theta == theirs.rope_parameters["rope_theta"]
        assert read.tied == theirs.tie_word_embeddings
        assert read.kv_heads == theirs.num_key_value_heads
        assert read.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("changes", [
    {}, {"sliding_window": 8}, {"use_sliding_window": True}, {"sliding_window": 8, "use_sliding_window": True},
    {"sliding_window": None, "use_sliding_window": True}, {"sliding_window": 8, "use_sliding_window": False},
], ids=str)  # fmt: skip
def test_windows_are_those_of_transformers(kind, changes):
    configs = pytest.importorskip("transformers").AutoConfig
    window = configs.for_model(kind, **changes).sliding_window
    of = model(**{**MIXED, **changes, "model_type": kind})
    refused = any("sliding window" in one for one in architecture.refusals(of))
    assert refused == bool(window)


def test_a_config_that_names_no_quantisation_is_that_of_plain_weights():
    assert "use" not in found({}, 1, model(quantization_config=None, text_config=[]))


def test_a_teacher_that_does_not_fit_is_refused_by_its_key(tmp_path):
    def teaching(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
        return found({"tensor": 2}, 2, teacher=str(tmp_path)).get("teacher", "")

    assert not teaching()
    assert found({}, 1, teacher=str(tmp_path / "no"))["teacher"].startswith("there is no folder")
    assert "has a vocabulary of 400 tokens, the model that is trained 375" in teaching(vocab_size=400)
    assert "which does not divide the model's 1 key heads (of the teacher)" in teaching(num_key_value_heads=1)
    assert "has the activation gelu" in teaching(hidden_act="gelu")
    assert "kl_forward" in facts(MegatronConfig(teacher=str(tmp_path)), model()).outputs_given
    with_teacher = held(MegatronConfig(teacher=str(tmp_path)), model(), 1)
    assert with_teacher - held(MegatronConfig(), model(), 1) == pytest.approx(4 * model().parameters, rel=0.02)


def test_rotary_settings_are_read_wherever_a_version_of_transformers_wrote_them():
    assert architecture.read(model(rope_theta=5e5)).rope_theta == 5e5
    assert architecture.read(model(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})).rope_theta == 5e5
    scaled = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    assert architecture.read(model(rope_theta=5e5, rope_scaling=scaled)).rope_factor == 32.0
    both = {"rope_theta": 5e5, "rope_scaling": scaled, "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}
    theirs = pytest.importorskip("transformers").AutoConfig.for_model("llama", **both).rope_parameters
    read = architecture.read(model(**both))
    assert (read.rope_theta, read.rope_factor) == (theirs["rope_theta"], theirs["factor"]) == (5e5, 32.0)


def test_a_package_can_offer_a_family(monkeypatch):
    def load():
        return Family(architecture.FAMILIES["llama"].rules, lambda config: {"qkv_bias": True})

    offered = [SimpleNamespace(name="new-kind", value="package:family", dist=None, load=load)]
    monkeypatch.setattr(architecture, "entry_points", lambda group: offered)
    architecture._offered.cache_clear()
    try:
        assert architecture.read(model(model_type="new-kind")).qkv_bias
        offered[0].load = lambda: 1 / 0
        architecture._offered.cache_clear()
        with pytest.raises(ConfigError, match="package:family, which a distribution offers"):
            architecture.read(model(model_type="new-kind"))
    finally:
        architecture._offered.cache_clear()


def test_settings_that_exclude_each_other_are_refused():
    config = MegatronConfig(
        optimizer=OptimizerConfig(overlap=True, groups=(WeightGroup("("), WeightGroup("x", lr=1e-3, lr_factor=2.0))),
        schedule=ScheduleConfig(warmup_ratio=0.1, warmup_steps=3),
        parallel=ParallelConfig(pipeline=2, virtual=2),
    )
    paths = [problem.path for problem in section_problems(config, "backend", gpus=0, dtype="float32")]
    assert paths == [
        "backend.schedule.warmup_ratio", "backend.optimizer.groups.0.match", "backend.optimizer.groups.1.lr_factor",
        "backend.optimizer.overlap",
    ]  # fmt: skip
    assert not list(section_problems(MegatronConfig(), "backend", gpus=0, dtype="float32"))
    apart = MegatronConfig(experts=ExpertsConfig(balance=0.1, balance_of="model", balance_over="micro-batch"))
    (problem,) = section_problems(apart, "backend", gpus=0, dtype="float32")
    assert problem.path == "backend.experts.balance_of"

    def on_gpus(dtype, **settings):
        return [problem.path for problem in section_problems(MegatronConfig(**settings), "backend", 8, dtype)]

    assert on_gpus("float32") == ["model.dtype"]
    assert on_gpus("float32", layout="padded", parallel=ParallelConfig(context=2)) == ["model.dtype"]
    assert not on_gpus("float32", layers="test")
    assert not on_gpus("float32", layout="padded")
    assert not on_gpus("bfloat16")
    with pytest.raises(ConfigError, match="tensr"):
        structure({"parallel": {"tensr": 2}}, MegatronConfig, None)


def test_adapters_of_experts_that_a_model_lacks_and_targets_that_match_nothing_are_refused():
    def asked(of=None, **lora):
        return found({}, 1, of, lora=LoraConfig(**lora))

    lacks = "is true, and Qwen3ForCausalLM has no experts that can get adapters; leave it out"
    assert asked(experts=True) == {"lora.experts": lacks}
    assert facts(MegatronConfig(lora=LoraConfig(experts=True)), model()).memory is None
    assert (
        "'query' matches no linear layer but the head of Qwen3ForCausalLM" in asked(targets=("query",))["lora.targets"]
    )
    layers = "its layers have k_proj, o_proj, q_proj, v_proj"  # experts are none of them
    told = asked(ModelInfo("model", MIXED), targets=("up_proj",))["lora.targets"]
    assert layers in told
    assert "experts get adapters by `experts: true`, not by name" in told
    assert not asked(targets=("q_proj", r"model\.layers\.[0-3]\..*"))


def test_an_adapter_has_its_facts_and_takes_the_memory_of_the_rest_away():
    config, sizes = MegatronConfig(lora=LoraConfig(rank=4), reference=True), ParallelConfig(pipeline=2)
    made = facts(config, model())
    assert made.adapter == AdapterInfo(4, 16.0)
    assert {"policy", "reference", "base", "trial"} <= made.weights_given
    terms = {term.what: term.bytes for term in made.memory(1, True)}
    assert terms == {
        "weights in float32, which compute": 4 * held_parameters(config),
        "the adapter and its moments in float32": 12 * ADAPTER,
        "gradients of the adapter in float32": 4 * ADAPTER,
    }
    staged = {term.what: term.bytes for term in facts(evolve(config, parallel=sizes), model()).memory(2, True)}
    assert staged["gradients of the adapter in float32"] == 2 * ADAPTER


def test_adapters_of_experts_have_their_facts_and_are_counted_where_they_are_held():
    of, lora = ModelInfo("model", MIXED), LoraConfig(rank=4, experts=True)

    def counted(sizes, ranks):
        made = facts(MegatronConfig(lora=lora, parallel=ParallelConfig(**sizes)), of)
        assert made.adapter == AdapterInfo(4, 16.0, kinds=("linear", "experts"))
        terms = {term.what: term.bytes for term in made.memory(ranks, True)}
        return terms["gradients of the adapter in float32"] // 4

    attention, one = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64)), (128 + 2 * 48) + (48 + 128)
    assert counted({}, 1) == attention + 4 * 4 * 8 * one
    assert counted({"expert": 2}, 2) == attention + 4 * 4 * 4 * one
    assert counted({"pipeline": 2}, 2) == (attention + 4 * 4 * 8 * one) // 2
    split = 4 * 4 * (2 * (128 + 64) + 2 * (128 + 32))  # one half of each adapter of attention, and all of the other
    halves = 4 * 4 * 8 * ((128 + 48) + (24 + 128))
    assert counted({"tensor": 2, "sequence": True, "expert_tensor": 2}, 2) == split + halves


ADAPTER = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
"""Rank 4, in 4 layers: queries and outputs, keys and values, and the feed-forward layer."""


def held_parameters(config):
    return sum(memory.held(config.parallel, architecture.read(model()), config.vocabulary_multiple))


def test_what_is_wrong_with_an_adapter_by_itself_is_refused_by_its_key():
    def sections(sync_every=0, **lora):
        section = SimpleNamespace(config=MegatronConfig(lora=LoraConfig(**lora)))
        roles = {"teacher": SimpleNamespace(component=section, sync_every=sync_every, model=None)}
        cluster = SimpleNamespace(gpus={}, colocate=None, python={})
        model = SimpleNamespace(dtype="float32")
        config = SimpleNamespace(backend=section, roles=roles, generator=None, cluster=cluster, model=model)
        return [one.path for one in whet_check_config(config)]

    assert sections(targets=("(",)) == ["backend.lora.targets.0", "roles.teacher.lora.targets.0"]
    assert sections(export="adapter", sync_every=1) == ["backend.lora.export"]
    assert not sections(export="adapter")


@pytest.mark.parametrize(
    ("cluster", "refused"),
    [({}, True), ({"colocate": [["backend", "critic"]]}, True), ({"colocate": [["critic"]]}, False),
     ({"colocate": []}, False), ({"python": {"critic": "other"}}, False)],
)  # fmt: skip
def test_roles_of_the_same_processes_have_axes_of_equal_sizes(cluster, refused):
    backend, critic = (SimpleNamespace(config=MegatronConfig(parallel=ParallelConfig(tensor=n))) for n in (2, 1))
    roles = {"critic": SimpleNamespace(component=critic, sync_every=0, model=None)}
    section = SimpleNamespace(**{"gpus": {}, "colocate": None, "python": {}, **cluster})
    model = SimpleNamespace(dtype="float32")
    config = SimpleNamespace(backend=backend, roles=roles, generator=None, cluster=section, model=model)
    found = [str(one) for one in whet_check_config(config)]
    assert [one.partition(" ")[0] for one in found] == ["roles.critic.parallel:"] * refused


def held(config, of, ranks, trained=True):
    return sum(term.bytes for term in facts(config, of).memory(ranks, trained))


def test_memory_is_16_bytes_a_parameter_in_float32_and_18_in_bfloat16():
    of = model(vocab_size=384)  # no padding
    vectors = 4 * 2 * 16  # norms of heads, which the estimate of a model leaves out
    for dtype, each, frozen in (("float32", 16, 4), ("bfloat16", 18, 2)):
        info = attrs.evolve(of, dtype=dtype)
        assert held(MegatronConfig(), info, 1) == pytest.approx(each * (info.parameters + vectors), rel=2e-3)
        assert held(MegatronConfig(), info, 1, trained=False) == pytest.approx(frozen * info.parameters, rel=2e-3)


def test_ranks_share_the_memory_that_they_split():
    of = model(vocab_size=384)
    one, both = MegatronConfig(), MegatronConfig(parallel=ParallelConfig(tensor=2, pipeline=2))
    assert held(both, of, 4) < 0.4 * held(one, of, 1)
    moments = 8 * of.parameters
    assert held(one, of, 1) - held(one, of, 2) == pytest.approx(moments / 2, rel=2e-2)  # the distributed optimizer
    whole = MegatronConfig(optimizer=OptimizerConfig(distributed=False))
    assert held(whole, of, 2) == held(whole, of, 1)


def test_ranks_are_numbered_as_megatron_numbers_them():
    grid = Grid(8, ParallelConfig(tensor=2, pipeline=2))
    places = [attrs.astuple(grid.coordinates(rank)) for rank in range(8)]  # data, tensor, pipeline, context
    assert places == [(0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0), (1, 0, 1, 0),
                      (1, 1, 1, 0)]  # fmt: skip
    assert members(grid, 0, "tensor", "pipeline", "context") == [0, 1, 4, 5]


def test_the_plan_says_what_layers_are_made_of():
    (note,) = facts(MegatronConfig(), model()).notes
    assert "Transformer Engine" in note or "transformer-engine" in note
    assert "test vehicle" in facts(MegatronConfig(layers="test"), model()).notes[0]


def test_a_transformer_engine_that_cannot_load_is_named_with_what_to_do(monkeypatch, tmp_path):
    import torch

    (tmp_path / "transformer_engine").mkdir()
    module = tmp_path / "transformer_engine" / "__init__.py"
    module.write_text('raise RuntimeError("cudnn shared object not found.")')
    monkeypatch.syspath_prepend(str(tmp_path))
    for wanted, device in (("auto", "cpu"), ("test", "cpu"), ("auto", "cuda:0")):
        with pytest.raises(ConfigError, match=r"cannot load.*cudnn shared object not found.*install") as raised:
            layers.choose(wanted, torch.device(device))
        assert ("pip uninstall" in str(raised.value)) == (device == "cpu")
        sys.modules.pop("transformer_engine", None)
    with pytest.raises(ConfigError, match="needs a GPU"):
        layers.choose("transformer-engine", torch.device("cpu"))


def test_planning_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from whet.data.model_info import ModelInfo; from whet_megatron.config import *;"
        "from whet_megatron import hooks, checks;"
        f"f = facts(MegatronConfig(), ModelInfo('m', {QWEN3!r})); list(f.problems(1)); list(f.memory(1, True));"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'transformers')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
