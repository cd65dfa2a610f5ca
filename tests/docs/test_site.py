"""The site is built without a warning, and every page is in its table of contents."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-c", "docs", "-d", str(tmp_path / "trees"), "-W", "--keep-going", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, ".", str(tmp_path / "html")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "html" / "docs" / "README.html").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        if "_build" not in name:
            assert (tmp_path / "html" / "docs" / name).is_file()
            assert name in first or name.startswith("reference/"), f"{name} is not in the table of contents"
