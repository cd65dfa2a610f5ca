"""The hooks of this plugin: the environments `calculator` and `tool-use`."""

import importlib.util
import os
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Component, Problem
from whet_env_tools.config import CalculatorConfig, McpConfig, ToolUseConfig

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_environments() -> Iterable[Component]:
    """Offer the environments `calculator` and `tool-use`."""
    facts = "whet_env_tools.config:facts"
    return [
        Component("calculator", CalculatorConfig, "whet_env_tools.calculator:Calculator", facts),
        Component("tool-use", ToolUseConfig, "whet_env_tools.environment:ToolUse", facts),
    ]


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Yield a problem for each section that cannot be played on this machine. No tool is started."""
    for path, section in config.played():
        found = section.component.config
        if isinstance(found, CalculatorConfig) and found.largest < found.smallest:
            yield Problem(f"{path}.largest", f"is {found.largest}, wanted at least smallest, {found.smallest}")
        if isinstance(found, ToolUseConfig):
            yield from _problems(path, found)


def _problems(path: str, config: ToolUseConfig) -> Iterable[Problem]:
    if not (config.functions or config.search or config.python or config.mcp):
        yield Problem(path, "has no tool; name some under functions, search, python or mcp")
    if config.python is not None:
        from whet_sandbox.open import why_not

        sandbox = config.python.sandbox
        if reason := why_not(sandbox):
            name = sandbox.component.name
            words = f"no program can run in the sandbox {name!r} on this machine: {reason}"
            yield Problem(f"{path}.python.sandbox", words)
    if config.mcp and importlib.util.find_spec("mcp") is None:
        yield Problem(f"{path}.mcp", "needs the package mcp; pip install 'whet-env-tools[mcp]'")
    for name, server in config.mcp.items():
        yield from _server_problems(f"{path}.mcp.{name}", server)


def _server_problems(path: str, server: McpConfig) -> Iterable[Problem]:
    if server.command and shutil.which(server.command[0]) is None:
        yield Problem(f"{path}.command", f"there is no program {server.command[0]!r}")
    variables = [*server.variables, *([server.token_variable] if server.token_variable else [])]
    for variable in variables:
        if not os.environ.get(variable):
            yield Problem(path, f"names the environment variable {variable}, which is not set")
