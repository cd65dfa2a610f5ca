"""What makes a run this run: a resume that would mix two of them is refused with the difference shown."""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import whet
from whet.config.structure import unstructure
from whet.model import fingerprint

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.model import ModelInfo

FREE = {
    "run": ("folder", "steps", "save_every", "keep", "resume", "export", "allow_changed"),
    "rollout": ("retries", "max_failed_groups", "max_filtered_groups"),
    "model": ("path", "revision"),
}
"""Keys of each section that may change between the sittings of a run."""
SECTIONS = ("run", "model", "algorithm", "backend", "generator", "rollout", "environments", "data")
"""Sections that decide what a run computes; the others say where it runs and who watches."""


def identity_of(config: "Config", model: "ModelInfo", data_fingerprint: str) -> dict[str, Any]:
    """Collect what decides a run's numbers: config, model files, tokenizer and data."""
    plain = unstructure(config)
    chosen = {
        name: _without(plain[name], FREE.get(name, ())) for name in SECTIONS if plain.get(name) not in (None, [], {})
    }
    files = fingerprint(model.path)
    return {**chosen, "model files": files, "data files": data_fingerprint}


def versions() -> dict[str, str]:
    """List the versions of Python, whet, every plugin, and what they stand on; nothing is imported."""
    found = {"python": platform.python_version(), "whet": whet.__version__}
    wanted = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "ray", "vllm", "sglang"}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in wanted or name.startswith("whet-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _without(section: Any, keys: tuple[str, ...]) -> Any:
    return {k: v for k, v in section.items() if k not in keys} if isinstance(section, Mapping) else section
