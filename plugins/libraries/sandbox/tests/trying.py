"""Try all escapes in sandboxes, and print as JSON what came of each."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from attrs import evolve

from whet_sandbox.config import NamespacesConfig
from whet_sandbox.limits import Limits
from whet_sandbox.namespaces import Namespaces
from whet_sandbox.sandbox import Sandbox

LIMITS = Limits(cpu_seconds=0.7, wall_seconds=4.0, memory_mib=256, disk_mib=8, disk_files=512)
LONGER = evolve(LIMITS, wall_seconds=30.0)
"""For what another limit stops: on a busy machine four seconds can be over before it is reached."""


def escapes() -> Any:
    """Return the module of escapes, which lies beside this file."""
    spec = importlib.util.spec_from_file_location("escapes", Path(__file__).with_name("escapes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["escapes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main(secret: str, port: str, unix: str, abstract: str, source: str, python: str = "") -> None:
    """Try the escapes, some at a time."""
    names = {
        "SECRET_FILE": secret, "SECRET_FOLDER": str(Path(secret).parent), "PORT": int(port), "UNIX_PATH": unix,
        "ABSTRACT": abstract, "SOURCE": source,
    }  # fmt: skip
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    module, sandbox = escapes(), Sandbox(Namespaces(NamespacesConfig(warm=2, at_once=4, python=python)), LIMITS)
    results = await asyncio.gather(
        *[
            sandbox.run(code=head + module.PRELUDE + one.code, limits=LIMITS if "wall" in one.shows else LONGER)
            for one in module.ESCAPES
        ]
    )
    sandbox.close()
    print(json.dumps([[r.why, r.exit, r.stdout[:2000], r.stderr[-2000:]] for r in results]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
