from pathlib import Path

import pytest

DIES_FORKING = """
import os, signal, sys
if "whet.runtime.forkserver" in sys.orig_argv:
    os.register_at_fork({}=lambda: os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(params=["before", "after_in_parent"])
def dies_forking(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a module; a fork server that has imported it dies right before it forks, or right after that."""
    folder, name = tmp_path / "dying", f"dies_{request.param}_it_forks"
    folder.mkdir()
    (folder / f"{name}.py").write_text(DIES_FORKING.format(request.param))
    monkeypatch.syspath_prepend(str(folder))
    return name
