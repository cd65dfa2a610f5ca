"""Whatever is changed in recipes, overrides, data, run folders and checkpoints: no traceback, nothing wrong accepted.

`python tests/fuzz --count 2000 --seed 1` is the long version.
"""

import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
CASES, SEED = 200, 7


@pytest.fixture(scope="module")
def fuzz():
    """The modules of the fuzzer, as its own command sees them."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(FUZZ))
    import cases
    import ground
    import mutations

    yield cases, ground, mutations
    for name in ("cases", "ground", "mutations"):
        sys.modules.pop(name, None)
    patch.undo()


@pytest.fixture(scope="module")
def ground(fuzz, tmp_path_factory, tiny_model_folder):
    return fuzz[1].make_ground(tmp_path_factory.mktemp("ground"), tiny_model_folder)


def test_no_change_ends_in_a_traceback_or_is_wrongly_accepted(fuzz, ground, tmp_path):
    played, faults, outcomes = Counter(), [], Counter()
    for number in range(CASES):
        case = fuzz[0].play(SEED, number, ground, tmp_path / "case")
        played[case.kind] += 1
        outcomes[case.outcome] += 1
        if case.faults:
            faults.append(f"--seed {SEED} --case {number} ({case.kind}: {case.words})\n" + "\n".join(case.faults))
    assert not faults, "\n".join(["python tests/fuzz " + fault for fault in faults])
    assert len(played) >= 8, played
    assert min(outcomes["refused"], outcomes["accepted"]) > CASES / 10, (
        "a fuzzer whose cases all end alike finds nothing"
    )


def test_every_recipe_that_is_changed_holds_before(fuzz, ground, tmp_path):
    from whet.plan.prepare import prepare

    for base in ground.bases:
        (tmp_path / "it.yaml").write_text(fuzz[2].to_text(base.document))
        prepare(tmp_path / "it.yaml", registry=ground.registry)


def test_a_case_is_decided_by_its_seed_and_number(fuzz, ground, tmp_path):
    one, again, other = (fuzz[0].play(1, number, ground, tmp_path / "case") for number in (3, 3, 4))
    assert (one.kind, one.words) == (again.kind, again.words) != (other.kind, other.words)


def test_what_is_wrongly_accepted_is_found(fuzz, ground, tmp_path, monkeypatch):
    import attrs

    monkeypatch.setattr("whet.config.values._fault_of_number", lambda value, infinite: "")
    attrs.validators.set_disabled(True)
    try:
        played = [fuzz[0].recipe(random.Random(number), ground, tmp_path) for number in range(240)]
    finally:
        attrs.validators.set_disabled(False)
    assert sum("it was accepted" in case.faults for case in played) > 3


def test_a_traceback_is_found(fuzz, ground, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise KeyError("text")

    monkeypatch.setattr(fuzz[0], "prepare", broken)
    case = fuzz[0].override(random.Random(0), ground, tmp_path)
    assert "KeyError: 'text'" in case.faults[0]


def test_a_checkpoint_that_is_wrongly_taken_is_found(fuzz, ground, tmp_path, monkeypatch):
    import whet_jobs.jobs
    from whet.run import checkpoint

    def older(run):
        for _, folder in checkpoint.folders(run):
            with suppress(Exception):
                return checkpoint.read(folder)
        return None

    monkeypatch.setattr(checkpoint, "latest", older)
    monkeypatch.setattr(whet_jobs.jobs, "last_saved", lambda run: 0)
    found = []
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += fuzz[0].checkpoint(random.Random(number), ground, folder).faults
    assert "step 1 would be exported" in found


def test_a_record_that_vanishes_is_found(fuzz, ground, tmp_path, monkeypatch):
    from whet_data import readers

    lines = readers._lines
    monkeypatch.setattr(readers, "_lines", lambda path: (row for row in lines(path) if not row.problem))
    found = []
    for number in range(20):
        found += fuzz[0].data(random.Random(number), ground, tmp_path).faults
    assert any("records were read of" in fault for fault in found)
