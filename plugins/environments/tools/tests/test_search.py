"""Search: against the formula itself, and over real files."""

import gzip
import json
import math
import random
from collections import Counter

import pytest

from whet.errors import DataError
from whet_env_tools.search import K1, B, Index, Passage, as_answer, index_of, words_of


def bm25(query, passages):
    """Return the score of each passage, by the formula and nothing else."""
    texts = [words_of(f"{p.title} {p.text}") for p in passages]
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        counts, score = Counter(text), 0.0
        for term in words_of(query):
            having = sum(term in other for other in texts)
            idf = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
            tf = counts[term]
            score += idf * tf * (K1 + 1) / (tf + K1 * (1 - B + B * len(text) / mean))
        scores.append(score)
    return scores


def test_scores_are_those_of_the_formula():
    draw = random.Random(0)
    words = [f"w{i}" for i in range(30)]
    passages = [Passage(draw.choice(words), " ".join(draw.choices(words, k=draw.randint(1, 40)))) for _ in range(60)]
    index = Index(passages)
    for _ in range(50):
        query = " ".join(draw.choices([*words, "absent"], k=draw.randint(1, 5)))
        wanted = bm25(query, passages)
        found = index.search(query, 7)
        best = sorted((s for s in wanted if s > 0), reverse=True)[:7]
        assert [score for _, score in found] == pytest.approx(best, rel=1e-5)
        assert all(score == pytest.approx(wanted[passages.index(p)], rel=1e-5) for p, score in found)


def test_equal_passages_are_found_in_the_order_of_the_file():
    index = Index([Passage("", "flint")] * 9)
    found = index.search("flint", 3)
    assert [index.passages.index(p) for p, _ in found] == [0, 0, 0]
    assert len(found) == 3
    assert Index([Passage("", "a"), Passage("", "b")]).search("zinc", 3) == []


def test_hostile_queries_cost_no_time():
    import time

    index = Index([Passage("", "steel and stone")])
    begin = time.process_time()
    for query in ("", "\0", "a " * 500_000, "steel" * 200_000, "\u200b" * 500_000):
        index.search(query, 3)
    assert time.process_time() - begin < 1


def test_corpora_are_read_in_the_formats_of_data_sets(tmp_path):
    rows = [{"text": "The Meuse flows past the quarry.", "name": "Meuse"}, {"text": "Steel is hard.", "name": "Steel"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "corpus.jsonl").write_text(lines)
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.write(lines)
    for name in ("corpus.jsonl", "corpus.jsonl.gz"):
        index = index_of(str(tmp_path / name), "text", "name")
        assert index is index_of(str(tmp_path / name), "text", "name")
        found = index.search("quarry", 2)
        assert as_answer(found, 1000) == "[1] Meuse\nThe Meuse flows past the quarry."
        assert as_answer(found, 9) == "[1] Meuse\nThe Meuse..."
    assert as_answer([], 9) == "Nothing was found."


def test_a_corpus_of_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"text": ["flint", "steel"]}), tmp_path / "corpus.parquet")
    assert index_of(str(tmp_path / "corpus.parquet"), "text", "").search("steel", 1)[0][0].text == "steel"


def test_a_corpus_without_texts_is_refused_with_file_and_line(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    with pytest.raises(
        DataError, match=r"corpus.jsonl:2: a passage has no text in the field 'text'; its fields are body"
    ):
        index_of(str(tmp_path / "corpus.jsonl"), "text", "")
