"""What the sections of data files take, and the split that a validation file reads."""

import pytest

from whet.config.sections import HELD_OUT, DataFile, DataSection
from whet.config.structure import structure, unstructure
from whet.errors import ConfigError


def test_the_column_of_the_tools_of_a_record_can_have_another_name() -> None:
    assert DataFile("a.jsonl", fields={"tools": "functions"}).fields == {"tools": "functions"}
    document = {"train": [{"path": "a.jsonl", "fields": {"tool": "functions"}}]}
    with pytest.raises(ConfigError, match=r"train\.0\.fields: names tool, wanted .*tools"):
        structure(document, DataSection, None)


def test_a_validation_file_that_names_no_split_is_never_read_as_training_data() -> None:
    document = {"train": [{"path": "a"}], "validation": [{"path": "a"}, {"path": "a", "split": "train"}]}
    section = structure(document, DataSection, None)
    assert [file.split for file in section.train] == [""]
    assert [file.split for file in section.validation] == [HELD_OUT, "train"]
    assert structure(unstructure(section), DataSection, None) == section
