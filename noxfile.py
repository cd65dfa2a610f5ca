"""What can be done in this repository: `nox -l` lists it. Each session makes its own environment."""

from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]
PLUGINS = sorted(str(p.parent) for p in Path("plugins").glob("*/*/pyproject.toml"))
CONSTRAINTS = ("-c", "constraints/cpu.txt")


def install(session: nox.Session, *extra: str) -> None:
    """Install core and every plugin, editable, against the tested versions."""
    session.install(*CONSTRAINTS, "torch", "hatchling", "editables")
    editable = [word for path in ["core[testing]", *PLUGINS] for word in ("-e", path)]
    session.install(*CONSTRAINTS, "--no-build-isolation", *editable, *extra)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Warm a small model up with SFT and sharpen it with GRPO; `-- 1` takes seed 1."""
    install(session)
    seed = session.posargs[0] if session.posargs else "0"
    runs = f"runs/quickstart-{seed}"
    session.run("python", "examples/quickstart/prepare.py", f"models/quickstart-{seed}", "--seed", seed)
    data = f"models/quickstart-{seed}"
    session.run(
        "whet", "run", "recipes/quickstart-sft.yaml", f"run.seed={seed}", f"run.folder={runs}/sft",
        f"model.path={data}", f"data.train.0.path={data}/train.jsonl", f"data.validation.0.path={data}/validation.jsonl",
    )  # fmt: skip
    session.run(
        "whet", "run", "recipes/quickstart-grpo.yaml", f"run.seed={seed}", f"run.folder={runs}/grpo",
        f"model.path={runs}/sft/model",
    )  # fmt: skip
    session.run("python", "examples/quickstart/ask.py", f"{runs}/grpo/model")


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test, the linters and the type checker."""
    install(session, "pytest-timeout", "ruff", "mypy", "import-linter", "types-PyYAML")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("pytest", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure a GRPO step against TRL's, in turn, and print ratios."""
    install(session, "trl==1.16.0", "datasets")
    session.run("python", "benchmarks/grpo_step.py", *session.posargs)
