import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

START = "import subprocess, sys\nimport pytest\nSLEEP = [sys.executable, '-c', 'import time; time.sleep(60)']\n"


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, whet_testing.pytest_plugin\n"
        "print(sorted({'torch', 'transformers', 'ray', 'tokenizers', 'hypothesis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_left_behind_fails_the_test_that_left_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(START + "def test_leaves(no_orphans):\n    subprocess.Popen(SLEEP)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*the test left processes behind: * (*time.sleep(60))*"])


def test_a_grandchild_whose_parent_died_is_found(pytester: pytest.Pytester) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    pytester.makepyfile(
        START + f"def test_leaves(no_orphans):\n    subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=1)


def test_a_process_that_ends_in_time_is_no_orphan(no_orphans: None) -> None:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"])


def test_a_gpu_test_is_skipped_with_a_reason(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it():\n    raise AssertionError\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs", "--strict-markers")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a GPU*"])


def test_shared_data_is_skipped_with_the_folder_that_is_missing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHET_SHARED_DATA", str(pytester.path / "nowhere"))
    pytester.makepyfile("def test_it(shared_data):\n    raise AssertionError\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*nowhere*WHET_SHARED_DATA*"])


def test_the_tiny_model_folder_holds_a_model_and_its_tokenizer(tiny_model_folder: Path) -> None:
    names = {file.name for file in tiny_model_folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
