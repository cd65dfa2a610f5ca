"""Kernels of other packages: who is refused, and that what they compute is compared.

The package's kernels need a GPU. Here a module in its place replaces norms by torch's, as the package would.
"""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from torch.nn.functional import rms_norm

from whet.errors import ConfigError
from whet_fsdp2.kernels import refuse_unfit
from whet_fsdp2.loading import load_model, prepare


def package(monkeypatch, factor=1.0, kinds=("qwen3",)):
    """Put a package in place whose norms are right, or off by a factor. Give the options that it gets."""
    given = {"calls": 0}

    def norm(x, module):
        given["calls"] += 1
        return factor * rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)

    def apply(model, **options):
        given.update(options)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(norm, module=module)

    made = ModuleType("liger_kernel.transformers")
    made.monkey_patch = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN=dict.fromkeys(kinds), _apply_liger_kernel_to_instance=apply
    )
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", made)
    return given


def prepared(folder, kernels=("liger",)):
    from whet.data.model_info import read_model

    root, _ = prepare(load_model(read_model(folder, "float32")), "auto", 0, kernels=kernels)
    return root


def test_kernels_that_compute_the_same_are_used_for_all_but_the_head(folders, monkeypatch):
    given = package(monkeypatch)
    prepared(folders())
    assert not given["cross_entropy"]
    assert not given["fused_linear_cross_entropy"]
    assert given["rms_norm"]
    assert given["calls"]


def test_kernels_that_compute_something_else_are_refused(folders, monkeypatch):
    package(monkeypatch, factor=1.1)
    with pytest.raises(ConfigError, match=r"backend\.kernels: with liger outputs of Qwen3ForCausalLM differ by 0\."):
        prepared(folders())


def test_a_model_without_kernels_is_named(folders, monkeypatch):
    package(monkeypatch, kinds=("llama",))
    with pytest.raises(ConfigError, match="has no kernels for Qwen3ForCausalLM"):
        prepared(folders())


def test_a_missing_package_is_named(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"needs the package liger-kernel .* pip install liger-kernel"):
        prepared(folders())


def test_kernels_are_refused_on_a_cpu_and_under_tensor_parallelism(make_worker):
    with pytest.raises(ConfigError, match=r"backend\.kernels: liger runs on GPUs, and this rank is on a cpu"):
        make_worker(kernels=["liger"])
    with pytest.raises(ConfigError, match=r"parallel\.tensor is 2"):
        refuse_unfit(("liger",), "cuda", 2)
    refuse_unfit((), "cpu", 2)


def test_without_kernels_the_package_is_not_needed(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    prepared(folders(), kernels=())
