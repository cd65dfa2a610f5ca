"""What people do with pip alone: `nox -s packages`, or `python tests/packages [FOLDER] [--steps 100]`.

    build a wheel of every distribution -> an empty environment -> core alone answers in words
    -> whet-demo from these wheels, third-party packages from the index -> whet demo, recipe, check, run, report

Nothing of the repository is on the path, and all of it happens in a folder outside. Prints sizes and times.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
BUNDLE = "grpo"
FIRST = ("whet-demo", f"whet[{BUNDLE}]")
"""What the first run is installed from."""


def main() -> None:
    """Build, install and try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where all of it goes; default: a temporary folder")
    parser.add_argument("--steps", default="10", help="of the demo's GRPO; the recipe has 100")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        wheels = build(folder / "wheels")
        venv.create(folder / "env", with_pip=True)
        core_alone(folder, wheels)
        pip(folder, "-c", str(CONSTRAINTS), *sorted({need for name in FIRST for need in third_party(name, wheels)}))
        pip(folder, "--no-index", "--find-links", str(wheels), *FIRST)
        first_run(folder, arguments.steps)


def build(folder: Path) -> Path:
    """Build a wheel of core and of every plugin; return their folder."""
    for project in [ROOT / "core", *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]:
        for wheel in WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"]):
            print(f"{Path(wheel).stat().st_size / 1000:8.0f} kB  {Path(wheel).name}", flush=True)
    return folder


def third_party(requirement: str, wheels: Path) -> Iterator[str]:
    """Yield what a requirement needs beside the wheels that were built, directly or through them."""
    wanted = Requirement(requirement)
    (wheel,) = wheels.glob(f"{wanted.name.replace('-', '_')}-[0-9]*.whl")
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = HeaderParser().parsestr(file.read(metadata).decode()).get_all("Requires-Dist") or []
    for needed in map(Requirement, lines):
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in (*wanted.extras, "")):
            continue
        if not needed.name.startswith("whet"):
            needed.marker = None
            yield str(needed)
        elif needed.name != "whet":  # which is where this began
            yield from third_party(f"{needed.name}[{','.join(needed.extras)}]", wheels)


def core_alone(folder: Path, wheels: Path) -> None:
    """Install core and nothing else of whet: every command answers in words, and says what to install."""
    pip(folder, "-c", str(CONSTRAINTS), *sorted(set(third_party("whet", wheels))))
    pip(folder, "--no-index", "--find-links", str(wheels), "whet")
    recipe = str(ROOT / "recipes" / "quickstart-grpo.yaml")
    expect(f"pip install 'whet[{BUNDLE}]'", whet(folder, "plugins"))
    expect("pip install whet-demo", whet(folder, "demo", code=2))
    expect(f"pip install 'whet[{BUNDLE}]'", whet(folder, "check", recipe, code=1))
    expect("pip install whet-dpo", whet(folder, "plugins", "why", "dpo", code=1))
    expect("pip install whet-start", whet(folder, "recipe", "learn-dpo", code=2))
    expect("pip install whet-start", whet(folder, "schema", "dpo", code=2))


def first_run(folder: Path, steps: str) -> None:
    """Go from the demo to a recipe of one's own."""
    whet(folder, "demo", "--steps", steps, shown=True)
    made = ("start/model.safetensors", "sft/model/model.safetensors", "grpo/model/model.safetensors", "grpo/plot.png")
    if missing := [name for name in made if not (folder / "work" / "runs/quickstart-0" / name).is_file()]:
        sys.exit(f"the demo has not made {', '.join(missing)}")
    expect("quickstart-grpo", whet(folder, "recipe"))
    expect("pip install whet-dpo", whet(folder, "recipe", "learn-dpo", code=1))
    whet(folder, "recipe", "quickstart-grpo", shown=True)
    small = ["model.path=runs/quickstart-0/sft/model", "run.folder=runs/mine", "run.steps=2"]
    small += ["evaluation.environments.0.limit=16"]
    whet(folder, "check", "quickstart-grpo.yaml", *small, shown=True)
    whet(folder, "run", "quickstart-grpo.yaml", *small, shown=True)
    whet(folder, "report", "runs/mine", shown=True)


def pip(folder: Path, *arguments: str) -> None:
    """Install into the environment."""
    run([str(folder / "env" / "bin" / "pip"), "install", "-q", *arguments], folder, code=0, shown=True)


def whet(folder: Path, *arguments: str, code: int = 0, shown: bool = False) -> str:
    """Run the installed command in an empty folder; return all that it printed."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return run([str(folder / "env" / "bin" / "whet"), *arguments], work, code, shown)


def run(command: list[str], folder: Path, code: int, shown: bool) -> str:
    """Run a command, with its time; what it prints is shown, or else kept. Fails where it ends with another code."""
    print(f"\n$ {' '.join([Path(command[0]).name, *command[1:]])[:300]}", flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept = None if shown else subprocess.PIPE
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=clean, stdout=kept, stderr=subprocess.STDOUT if kept else None, text=True, check=False
    )
    print(f"{done.stdout or ''}({time.monotonic() - began:.1f} s)", flush=True)
    if done.returncode != code:
        sys.exit(f"exit code {done.returncode}, wanted {code}")
    return done.stdout or ""


def expect(words: str, said: str) -> None:
    """Fail where words are missing."""
    if words not in said:
        sys.exit(f"it does not say {words!r}")


if __name__ == "__main__":
    main()
