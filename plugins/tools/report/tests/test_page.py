"""The page is one file that asks for nothing, and what a model wrote cannot leave its place in it."""

import base64
import hashlib
import json
import re
import resource
from html.parser import HTMLParser

import pytest

from whet.errors import WhetError
from whet_report.page import embedded, page_of, write_page
from whet_report.run import read_run
from whet_testing.hostile import HOSTILE_ANSWERS


class Parts(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self):
        super().__init__(convert_charrefs=False)
        self.tags, self.texts, self.open = [], {}, None

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open = f"{tag} {dict(attrs).get('type', '')}".strip()

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        self.texts[self.open] = self.texts.get(self.open, "") + data


def parsed(page):
    parts = Parts()
    parts.feed(page)
    return parts


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory, run_folders):
    return page_of(read_run(run_folders.write(tmp_path_factory.mktemp("run"), run_folders.HOSTILE)))


def test_the_policy_lets_this_script_and_this_style_run_and_nothing_else(hostile_page):
    parts = parsed(hostile_page)
    [policy] = [a["content"] for tag, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def hash_of(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "script-src": hash_of(parts.texts["script"]),
        "style-src": hash_of(parts.texts["style"]),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_nothing_is_asked_of_any_other_place(hostile_page):
    parts = parsed(hostile_page)
    assert not any({"src", "href", "srcset", "action", "style"} & set(attributes) for _, attributes in parts.tags)
    assert [tag for tag, _ in parts.tags] == [
        "html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "header", "main", "noscript",
        "script", "script",
    ]  # fmt: skip
    own = parts.texts["script"] + parts.texts["style"]
    assert re.findall(r"https?://[^\"]+", own) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert way not in own


def test_hostile_text_stays_in_the_data_and_reads_back_the_same(hostile_page, run_folders):
    data = parsed(hostile_page).texts["script application/json"]
    assert not re.search("[<>&\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", data)
    [source, *_] = json.loads(data)["training"]["sources"]
    assert source["episodes"][0]["messages"][1]["content"] == run_folders.HOSTILE
    assert source["episodes"][0]["sequences"][0]["pieces"][2] == run_folders.HOSTILE


@pytest.mark.parametrize("name", HOSTILE_ANSWERS)
def test_no_answer_can_end_the_data_block(name):
    answer = HOSTILE_ANSWERS[name]
    page = page_of({"said": answer})
    assert json.loads(parsed(page).texts["script application/json"]) == {"said": answer}
    assert json.loads(embedded({answer: 1})) == {answer: 1}


def test_the_page_quotes_rollouts_and_is_as_private_as_they_are(tmp_path, run_folders):
    write_page(tmp_path / "page.html", read_run(run_folders.write(tmp_path / "run", run_folders.HOSTILE)))
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600


def test_the_page_is_written_whole(tmp_path):
    size = write_page(tmp_path / "deep" / "report.html", {"a": 1})
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["report.html"]
    assert (tmp_path / "deep" / "report.html").stat().st_size == size


def test_a_page_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path):
    write_page(tmp_path / "page.html", {"a": 1})
    page, before = (tmp_path / "page.html").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(WhetError, match=r"page\.html: File too large"):
            write_page(tmp_path / "page.html", {"a": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [page]
