"""The hooks of this plugin: the environments `code` and `tiny-functions`. They run nothing without a sandbox."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_code.config import CodeConfig, TinyFunctionsConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environments `code` and `tiny-functions`."""
    facts = "whet_env_code.config:facts"
    return [
        Component("code", CodeConfig, "whet_env_code.environment:Code", facts),
        Component("tiny-functions", TinyFunctionsConfig, "whet_env_code.tiny_functions:TinyFunctions", facts),
    ]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each sandbox that cannot run a program on this machine."""
    from whet_sandbox.open import why_not

    for path, section in config.played():
        found = section.component.config
        if isinstance(found, CodeConfig | TinyFunctionsConfig) and (reason := why_not(found.sandbox)):
            yield Problem(
                f"{path}.sandbox",
                f"no program can run in the sandbox {found.sandbox.component.name!r} on this machine: {reason}",
            )
