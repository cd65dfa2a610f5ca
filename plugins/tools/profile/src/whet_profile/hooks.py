"""The hooks of this plugin: the profiler, which is a hook with settings."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_profile.config import ProfileConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_hooks() -> Iterable[Component]:
    """Offer the profiler."""
    return [Component("profile", ProfileConfig, "whet_profile.profile:Profile")]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Find roles that cannot be traced."""
    known = ["backend", *config.roles]
    for i, chosen in enumerate(config.hooks):
        if not isinstance(chosen.config, ProfileConfig):
            continue
        for role in chosen.config.roles:
            if role not in known:
                why = "serves requests that overlap" if role == "generator" else "is no role of this run"
                yield Problem(f"hooks.{i}.roles", f"{role} {why}; wanted some of {', '.join(known)}")
