"""A model of 7 billion parameters: refused where its memory is not, planned where it is."""

import json
import re
import time

import pytest

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "rms_norm_eps": 1.0e-6,
}  # fmt: skip
ON_EIGHT = "cluster.gpus={backend: 8, generator: 8}"
SMALL, LARGE = "cores=8,memory=24GB", "8xH200-141GB,cores=96,memory=1TB"


@pytest.fixture
def recipe(tmp_path, small_run):
    """Write a recipe of GRPO with a folder that has the shape of the model and no weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN_7B))
    return small_run(tmp_path, model={"path": str(tmp_path / "model")}, rollout={"max_tokens": 64, "max_context": 512})


@pytest.fixture(autouse=True)
def no_traces_of_before(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def on_gpu(output, role, phase):
    """Return the GiB that a line of the table has for the fullest GPU."""
    return float(re.search(rf"^  {role} +{phase} .*GPU 0: ([\d.]+) GiB", output, re.MULTILINE)[1])


def test_a_host_of_24_gib_cannot_train_it(recipe, whet):
    done = whet("check", recipe, "--machine", SMALL)
    assert done.code == 1
    assert "cluster.memory: the given machine has 24.0 GiB of memory, and the plan takes at least 14" in done.errors
    assert "56.7 GiB backend: AdamW's two moments in float32" in done.errors
    assert whet("check", recipe, "--machine", SMALL, "cluster.memory=ignore").code == 0


def test_eight_large_gpus_can_and_small_ones_cannot(recipe, whet):
    done = whet("check", recipe, ON_EIGHT, "--machine", LARGE)
    assert done.code == 0, done.errors
    assert "backend: fsdp2, 8 ranks x 1 thread on cuda:0" in done.output
    assert 33 <= on_gpu(done.output, "generator", "generation") < 34, "28 of weights, 4 of cache, 1 assumed for CUDA"
    apart = whet("check", recipe, ON_EIGHT, "cluster.offload=never", "--machine", LARGE)
    both = on_gpu(done.output, "backend", "train") + on_gpu(done.output, "generator", "generation") - 1
    assert on_gpu(apart.output, "backend", "train") == pytest.approx(both, abs=0.2), "the generator is awake meanwhile"
    syncs = [on_gpu(one.output, "backend", "weight_sync") for one in (done, apart)]
    left = 4 + 56.7 / 8  # the generator's cache does not wake, and the backend's moments have left
    assert syncs[1] - syncs[0] == pytest.approx(left, abs=0.2)
    small = whet("check", recipe, ON_EIGHT, "--machine", "8x24GB")
    assert small.code == 1
    assert "cluster.memory: GPU 0 of the given machine has 24.0 GiB of memory" in small.errors


def test_an_engine_s_weights_are_known_and_its_cache_takes_the_rest_of_its_share(recipe, whet):
    engine = (ON_EIGHT, "model.dtype=bfloat16", "generator={use: vllm, tensor_parallel: 2}")
    done = whet("check", recipe, *engine, "rollout.max_context=0", "--machine", LARGE)
    assert re.search(r"^  generator +generation +14\.\d GiB \+ cache +GPU 0: 12[01]\.\d GiB", done.output, re.MULTILINE)
    assert "generator: the cache takes the rest of memory_fraction, 85% of each of a rank's 2 GPUs" in done.output
    assert "backend: sequences of 8,192 tokens were assumed, as rollout.max_context is 0, no limit" in done.output
    assert "GPU 0 of machine" not in done.output
    limited = whet("check", recipe, *engine, "generator.memory_fraction=0.04", "--machine", LARGE)
    assert "generator.memory_fraction: is 0.04, 5.6 GiB of a GPU of 141.0 GiB, and the weights take 7" in limited.errors
    assert "were assumed" not in limited.output


def test_on_several_machines_the_table_names_them(recipe, whet):
    ray = ("cluster.launcher=ray", "cluster.address=10.0.0.1:6379", "cluster.gpus={backend: 4, generator: 4}")
    done = whet("check", recipe, *ray, "--machine", "2x2xH200-141GB,cores=96,memory=1TB")
    assert re.search(r"^  backend +train .*GPU 0 of machine 1: .*host of machine \d: ", done.output, re.MULTILINE)


def test_a_run_that_cannot_fit_starts_nothing_and_reads_no_weights(recipe, whet, tmp_path):
    many = "cluster.ranks.generator=4000"  # no machine has that: 100 TiB of weights, each rank its own
    done = whet("run", recipe, many)
    assert done.code == 1
    assert "cluster.memory: this machine has " in done.errors
    assert "holds no weights" not in done.errors
    assert not list(tmp_path.rglob("backend-0.log"))
    ignored = whet("run", recipe, many, "cluster.memory=ignore")
    assert "holds no weights" in ignored.errors


def test_the_doctor_says_of_memory_what_check_says(recipe, whet):
    many = "cluster.ranks.generator=4000"
    checked = whet("check", recipe, many, "--json")
    found = json.loads(whet("doctor", recipe, many, "--json").output)["checks"]
    of_memory = [(check["status"], check["found"]) for check in found if check["name"] == "memory"]
    assert of_memory == [("fail", problem) for problem in json.loads(checked.output)["problems"]]
    ignored = json.loads(whet("doctor", recipe, many, "cluster.memory=ignore", "--json").output)["checks"]
    assert [check["status"] for check in ignored if check["name"] == "memory"] == ["warn"]


@pytest.mark.slow
def test_what_does_not_fit_is_told_with_changes_that_were_predicted_to_fit(recipe, whet):
    begin = time.monotonic()
    done = whet("check", recipe, "cluster.gpus={backend: 1, generator: 1}", "model.dtype=bfloat16",
                "backend.micro_batch_tokens=32768", "--machine", "1xH100,cores=8,memory=1TB")  # fmt: skip
    assert time.monotonic() - begin < 120, "ten seconds on two quiet cores"
    assert done.code == 1
    assert "DOES NOT FIT" in done.output
    told = done.output.partition("changes that make it fit")[2]
    changes = re.findall(
        r"^  (\S.*): [\d.,]+ GiB -> ([\d.,]+) GiB \(-[\d.,]+ GiB\)(?:, on (\d+) GPUs)?; costs ", told, re.MULTILINE
    )
    assert len(changes) == 3
    parts = [frozenset(part.partition("=")[0] for part in overrides.split()) for overrides, *_ in changes]
    assert not any(one < other for one in parts for other in parts if not any("gpus" in key for key in one))
    for overrides, needs, gpus in changes:
        assert float(needs) < 80
        again = whet("check", recipe, "cluster.gpus={backend: 1, generator: 1}", "model.dtype=bfloat16",
                     "backend.micro_batch_tokens=32768", *overrides.split(),
                     "--machine", f"{gpus or 1}xH100,cores=8,memory=1TB")  # fmt: skip
        assert "DOES NOT FIT" not in again.output


@pytest.mark.slow
def test_what_is_not_enough_is_told_as_what_brings_it_nearer(recipe, whet):
    done = whet("check", recipe, "cluster.gpus={backend: 1, generator: 1}", "model.dtype=bfloat16",
                "backend.lora.rank=16", "--machine", "1x16GB,cores=8,memory=1TB")  # fmt: skip
    assert "DOES NOT FIT" in done.output
    nearer = done.output.partition("changes that bring it nearer, but are not enough alone")[2]
    assert "gradient_checkpointing" in nearer
    assert re.search(r"besides: |no change that was tried makes", done.output)


@pytest.mark.parametrize("begun", [False, True])
def test_a_change_with_which_checkpoints_do_not_load_is_offered_to_a_new_run_alone(recipe, whet, tmp_path, begun):
    if begun:
        (tmp_path / "run/checkpoints/step-000001").mkdir(parents=True)
        (tmp_path / "run/checkpoints/step-000001/complete.json").touch()
    section = "backend={use: megatron, layout: padded, micro_batch_tokens: 512, optimizer: {distributed: false}}"
    done = whet("check", recipe, section, ON_EIGHT, "model.dtype=bfloat16", f"run.folder={tmp_path / 'run'}",
                "--machine", "8xH100,cores=96,memory=2TB")  # fmt: skip
    assert done.code == 1
    offered = done.output.partition("changes that make it fit")[2]
    assert ("backend.optimizer.distributed=true" in offered) != begun
    assert "backend.parallel.tensor" in offered


def test_stages_of_a_pipeline_are_predicted_each_and_refused_with_changes_that_fit(recipe, whet):
    on_four = ("cluster.gpus={backend: 4, generator: 4}", "--machine", "4xH100-80GB,cores=96,memory=1TB")
    stages = "backend={use: megatron, layout: padded, parallel: {pipeline: 2}, micro_batch_tokens: 8192}"
    done = whet("check", recipe, stages, "rollout.max_context=8192", "algorithm.prompts_per_step=64", *on_four)
    assert done.code == 1
    row = re.search(r"^  backend +train +([\d.]+) GiB.*? \| ([\d.]+) GiB", done.output, re.MULTILINE)
    assert float(row[1]) > float(row[2]), "the first stage keeps the activations of two passes"
    assert "of one rank of each pipeline stage" in done.output
    assert "  backend: by formulas, which can be a fifth off\n" in done.output, "no trace is offered that is not there"
    assert "backend.gradient_checkpointing=true" in done.output.partition("changes that make it fit")[2]
    assert "needs" in done.error
    mended = (*on_four, "backend.gradient_checkpointing=true", "backend.parallel.tensor=2")
    small = whet("check", recipe, stages, "rollout.max_context=8192", "algorithm.prompts_per_step=64", *mended)
    assert small.code == 0, small.errors
