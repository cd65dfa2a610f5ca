"""`whet plugins` lists what there is and what is broken."""

import json
from typing import Any


def test_components_and_broken_plugins_are_listed(alone: Any, offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "import nothing_of_that_name"})
    done = alone()
    assert done.returncode == 0
    assert any(line.split()[:3] == ["losses", "clip", "whet-offers"] for line in done.stdout.splitlines())
    assert "not usable: whet-bad (plugin 'bad_hooks'): ModuleNotFoundError" in done.stdout


def test_names_that_are_offered_twice_are_listed(alone: Any, offers: Any, install: Any, site: Any) -> None:
    install("whet-again", {"again_hooks": (site / "offers_hooks.py").read_text()})
    done = alone()
    assert "offered twice: losses 'clip' by whet-again and whet-offers" in done.stdout
    assert any(line.split()[:3] == ["losses", "whet-again/clip", "whet-again"] for line in done.stdout.splitlines())
    found = json.loads(alone("--json").stdout)
    assert found["contested"]["losses"]["clip"] == ["whet-again", "whet-offers"]
    assert found["components"]["losses"]["whet-offers/clip"] == "whet-offers"


def test_json_holds_the_same(alone: Any, offers: Any, install: Any) -> None:
    install("whet-bad", {"bad_hooks": "1 / 0"})
    found = json.loads(alone("--json").stdout)
    assert found["components"]["backends"]["trainer"] == "whet-offers"
    bad = next(broken for broken in found["broken"] if broken["distribution"] == "whet-bad")
    assert "ZeroDivisionError" in bad["reason"]
