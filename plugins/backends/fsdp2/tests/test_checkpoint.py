import json
import resource

import numpy as np
import pytest
import torch

from whet.component import Spec
from whet.errors import CheckpointError, WhetError
from whet_fsdp2 import checkpoint

LIKELIHOOD = Spec("whet_testing.losses:Likelihood")


def numbers(found):
    return {name: found[name].number() for name in ("loss", "grad_norm", "lr")}


def state(worker):
    weights = {name: w.detach().clone() for name, w in worker._weights.masters.items()}
    moments = {f"{n}.{k}": v.clone() for n, s in worker._stepper.state().items() for k, v in s.items()}
    return weights | moments


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_is_bitwise_over_two_more_steps(make_worker, make_batch, tmp_path, dtype):
    options = {"dtype": dtype, "schedule": {"kind": "cosine", "warmup_steps": 2}}
    first, again = make_worker(**options), make_worker(**options)
    for seed in range(3):
        first.train(make_batch(seed), LIKELIHOOD)
    first.save(str(tmp_path / "saved"))
    again.load(str(tmp_path / "saved"))
    for seed in range(3, 5):
        expected, found = (worker.train(make_batch(seed), LIKELIHOOD) for worker in (first, again))
        assert numbers(found) == numbers(expected)
    ours, theirs = state(again), state(first)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_fresh_backend_can_be_saved_and_loaded(make_worker, batch, tmp_path):
    first, again = make_worker(), make_worker()
    first.save(str(tmp_path / "saved"))
    again.train(batch, LIKELIHOOD)
    again.load(str(tmp_path / "saved"))
    assert numbers(again.train(batch, LIKELIHOOD)) == numbers(first.train(batch, LIKELIHOOD))


def test_the_files_are_safetensors_and_json(make_worker, batch, tmp_path):
    worker = make_worker()
    worker.train(batch, LIKELIHOOD)
    worker.save(str(tmp_path))
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".safetensors"]
    document = json.loads((tmp_path / "backend.json").read_text())
    assert document["optimizer_steps"] == 1
    assert document["tensors"]["exp_avg/model.norm.weight"]["shape"] == [48]


def test_many_small_files_load_as_one(make_worker, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 10_000)
    first, again = make_worker(), make_worker()
    first.train(batch, LIKELIHOOD)
    first.save(str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again.load(str(tmp_path))
    assert np.array_equal(again.score(batch, ("logprobs",))["logprobs"], first.score(batch, ("logprobs",))["logprobs"])


def test_another_models_checkpoint_is_refused_with_the_difference(make_worker, batch, tmp_path):
    make_worker("llama").save(str(tmp_path))
    worker = make_worker("qwen2")
    before = worker.score(batch, ("logprobs",))["logprobs"]
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is missing.*more"):
        worker.load(str(tmp_path))
    assert np.array_equal(worker.score(batch, ("logprobs",))["logprobs"], before)


def test_other_shapes_are_shown(make_worker, tmp_path):
    make_worker("qwen3").save(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has shape \[\d+, 48\], the model has \[\d+, 96\]"):
        make_worker("qwen3 untied").load(str(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "gone", "no index", "bad index", "other format", "entry gone"])
def test_damage_is_reported(make_worker, batch, tmp_path, damage):
    worker = make_worker()
    worker.train(batch, LIKELIHOOD)
    worker.save(str(tmp_path))
    file, index = next(tmp_path.glob("*.safetensors")), tmp_path / "backend.json"
    document = json.loads(index.read_text())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-50])
    elif damage == "gone":
        file.unlink()
    elif damage == "no index":
        index.unlink()
    elif damage == "bad index":
        index.write_text("{")
    elif damage == "other format":
        index.write_text(json.dumps({**document, "format": 99}))
    else:
        del document["tensors"]["exp_avg/model.norm.weight"]
        index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        make_worker().load(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["weights/model.norm.weight", "exp_avg/model.norm.weight", "exp_avg_sq/model.norm.weight"]
)
def test_state_that_is_not_finite_is_refused(make_worker, batch, tmp_path, name, value):
    from safetensors.torch import load_file, save_file

    worker = make_worker()
    worker.train(batch, LIKELIHOOD)
    worker.save(str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name][3] = value
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"holds {name} with 1 of .* values that are not finite"):
        make_worker().load(str(tmp_path))


@pytest.mark.parametrize("change", [{"steps": {"model.norm.weight": float("nan")}}, {"optimizer_steps": -1}])
def test_impossible_numbers_of_steps_are_refused(make_worker, batch, tmp_path, change):
    worker = make_worker()
    worker.train(batch, LIKELIHOOD)
    worker.save(str(tmp_path))
    index = tmp_path / "backend.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **change}))
    with pytest.raises(CheckpointError, match="finite and not negative"):
        make_worker().load(str(tmp_path))


def test_an_index_cannot_name_files_outside_the_folder(make_worker, tmp_path):
    worker = make_worker()
    worker.save(str(tmp_path / "saved"))
    index = tmp_path / "saved" / "backend.json"
    (tmp_path / "outside.safetensors").write_bytes(next((tmp_path / "saved").glob("*.safetensors")).read_bytes())
    index.write_text(index.read_text().replace("tensors-00001.safetensors", "../outside.safetensors"))
    with pytest.raises(CheckpointError):
        worker.load(str(tmp_path / "saved"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_folder_holds_the_computing_weights_bitwise(make_worker, batch, tmp_path, family, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    worker = make_worker(family, dtype=dtype)
    worker.train(batch, LIKELIHOOD)
    worker.export(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    theirs = dict(model.named_parameters())
    ours = dict(worker._weights.computing())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family


def test_a_file_that_cannot_be_written_is_named(make_worker, tmp_path):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    try:
        with pytest.raises(WhetError, match=r"cannot write .*tensors-00001\.safetensors: File too large"):
            make_worker().save(str(tmp_path / "saved"))
        with pytest.raises(WhetError, match=r"cannot write .*exported: File too large"):
            make_worker().export(str(tmp_path / "exported"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
