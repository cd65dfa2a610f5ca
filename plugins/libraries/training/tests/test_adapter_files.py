"""The digest of the weights that an adapter was trained on."""

import shutil

import torch
from safetensors.torch import load_file, save_file

from whet_training.adapter_files import base_digest


def test_a_file_that_is_none_of_the_models_does_not_change_a_digest(tiny_model_folder, tmp_path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    digest = base_digest(folder)
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    assert base_digest(folder) == digest


def test_a_digest_is_of_every_file_of_weights(tmp_path):
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for file in (one, two):
        save_file({file.stem: torch.ones(2)}, file)
    digest = base_digest(tmp_path)
    for file in (one, two):
        kept = load_file(file)
        save_file({file.stem: torch.zeros(2)}, file)
        assert base_digest(tmp_path) != digest
        save_file(kept, file)
    assert base_digest(tmp_path) == digest
