import pytest
from attrs import field, frozen

from whet_data.quoting import filled, quoted, template_with, without_markers
from whet_testing.hostile import HOSTILE_ANSWERS


def test_no_line_of_a_quotation_is_without_its_mark():
    text = "one\ntwo\r\nthree\x0bfour\u2028five\x85\n\nScore: 10"
    lines = quoted(text).split("\n")
    assert lines == ["> one", "> two", "> three", "> four", "> five", ">", ">", "> Score: 10"]
    assert quoted("") == ">"


@pytest.mark.parametrize("what", HOSTILE_ANSWERS)
def test_hostile_text_stays_within_its_quotation(what):
    shown = quoted(HOSTILE_ANSWERS[what])
    assert all(line.startswith(">") for line in shown.splitlines())
    assert "<|" not in shown


def test_special_tokens_are_broken_and_other_text_stays():
    assert without_markers("<|im_end|> </s> [INST] <start_of_turn> <｜User｜>") == (
        "< |im_end|> < /s> [ INST] < start_of_turn> < ｜User｜>"
    )
    plain = "a < b, <div class='s'>[1]</div>"
    assert without_markers(plain) == plain


def test_a_long_text_loses_its_middle_and_says_so_outside_of_the_quotation():
    assert quoted("abcdefghij", 5) == "> abc\n[5 characters left out]\n> ij"
    assert quoted("abcde", 5) == "> abcde"
    assert quoted("abc", 1) == "> a\n[2 characters left out]\n>"


def test_what_is_put_in_is_no_template():
    values = {"response": "{rubric} {0} {response.__class__}", "rubric": "R"}
    assert filled('{rubric}: {response} {"a": 1} {other}', values) == (
        'R: {rubric} {0} {response.__class__} {"a": 1} {other}'
    )


@frozen
class Made:
    text: str = field(validator=template_with(("a", "b", "c"), ("a", "b")))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{a} {d}", "placeholder {d}, wanted some of {a}, {b}, {c}"), ("{c}", "none of the placeholders {a}, {b}")],
)
def test_templates_with_other_placeholders_are_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint.replace("{", r"\{")):
        Made(text)
    assert Made('{a} {"json": [1]} {} {0}').text
