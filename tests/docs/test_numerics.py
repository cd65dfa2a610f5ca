"""What the numerics page names as options is there, and gives no complaint from `whet check`."""

import re
from pathlib import Path

import pytest
import yaml

from whet.errors import ConfigError
from whet.plan.prepare import prepare

PAGE = (Path(__file__).parents[2] / "docs/reference/numerics.md").read_text()
TABLE = PAGE.split("### The numbers of others")[1].split("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][2:]
CASES = [(row[0], cell) for row in ROWS for cell in row[1:] if cell != "-"]


def test_the_table_is_read():
    assert len(CASES) > 30


@pytest.mark.parametrize("library", [1, 3])
def test_rows_of_libraries_that_bound_no_log_ratio_have_no_bound(library):
    losses = [yaml.safe_load(row[library].strip("`")) for row in ROWS if "`loss`" in row[0] and row[library] != "-"]
    unbounded = [loss for loss in losses if isinstance(loss, dict) and loss["use"] in ("clipped-pg", "gspo", "gmpo")]
    assert len(unbounded) > 4
    assert [loss for loss in unbounded if loss.get("clamp_log_ratio") != 0] == []
    if library == 3:  # NeMo RL counts sequences without a token of the model, and not masked ones
        averaged = [loss for loss in unbounded if loss.get("aggregation") == "sequence" or loss["use"] == "gspo"]
        assert {(loss["count_empty"], loss["count_masked"]) for loss in averaged} == {(True, False)}


@pytest.mark.parametrize(("of", "cell"), CASES)
def test_the_numbers_of_others_can_be_asked_for(small_run, tmp_path, of, cell):
    (key,) = re.findall(r"`(advantages|loss|correction|overlong|kl_reward|top_entropy)`", of)
    section = yaml.safe_load(cell.strip("`"))
    algorithm = {"use": "grpo", "prompts_per_step": 2, "group_size": 4, key: section}
    if key in ("advantages", "top_entropy"):  # which may be of tokens
        algorithm["loss"] = "clipped-pg"
    document = small_run(tmp_path, algorithm=algorithm, backend={"use": "fsdp2", "reference": True})
    try:
        prepare(document)
    except ConfigError as error:
        pytest.fail(f"{of}: {cell}: {error}")
