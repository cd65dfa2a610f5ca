"""The section `run` takes what can be kept to."""

import pytest

from whet.config.run import seconds_of
from whet.config.sections import KeepBestSection, RunSection


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13_800), ("45s", 45), ("90m", 5_400), ("1d12h", 129_600), ("2d1h1m1s", 176_461), ("365d", 31_536_000)],
)
def test_a_duration_is_in_days_hours_minutes_and_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert RunSection(folder="runs/it", steps=1, time_limit=text).time_limit == text


@pytest.mark.parametrize(
    "text", ["3:50:00", "4", "h", "50m3h", "-1h", "1.5h", " 1h", "1h ", "\u0661h", "0s", "366d", "99999h"]
)
def test_what_is_no_duration_or_out_of_bounds_is_refused(text):
    with pytest.raises(ValueError, match="wanted"):
        RunSection(folder="runs/it", steps=1, time_limit=text)


@pytest.mark.parametrize("wrong", [{"metric": ""}, {"metric": "loss", "count": 0}, {"metric": "loss", "count": 65_537}])
def test_the_best_have_a_metric_and_a_number(wrong):
    with pytest.raises(ValueError, match=r"metric|count"):
        KeepBestSection(**wrong)
