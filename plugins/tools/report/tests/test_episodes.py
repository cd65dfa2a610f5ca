"""The page holds a bounded part of the rollouts, and the part that matters."""

import json

import pytest

from whet.run.run_folder import RunFolder
from whet_report import episodes, gaps


def test_steps_with_tokens_come_first_and_the_widest_gaps_among_them():
    steps, widths = list(range(1, 1001)), dict.fromkeys(range(1, 1001), 1e-06)
    widths |= {730: 0.5, 731: 0.9}
    chosen = episodes.choose_steps(steps, 10, widths)
    assert len(chosen) == len(set(chosen)) == episodes.STEPS
    assert chosen[:2] == [1000, 1]
    assert 730 in chosen
    recorded = [step for step in chosen if step == 1 or step % 10 == 0]
    assert recorded == chosen[: len(recorded)]
    assert len(recorded) == episodes.RECORDED_STEPS


@pytest.mark.parametrize(("count", "every"), [(0, 10), (1, 10), (5, 0), (36, 7)])
def test_short_runs_are_held_whole(count, every):
    assert sorted(episodes.choose_steps(range(1, count + 1), every, {})) == list(range(1, count + 1))


def test_what_the_page_holds_is_bounded_however_much_there_is(tmp_path, monkeypatch, run_folders):
    monkeypatch.setattr(episodes, "ROOM", 40_000)
    run = RunFolder(tmp_path)
    for step in range(1, 41):
        rows = [run_folders.episode(step, i, step, "x" * 5_000 if i % 2 else "y", None) for i in range(600)]
        rows[599] = run_folders.episode(step, 599, step, "recorded", 0.1)
        run.append(f"rollouts/step-{step:06d}.jsonl", rows)
    found = episodes.rollouts(tmp_path, 1, {})
    assert len(json.dumps(found["sources"])) < 60_000
    assert (len(found["sources"]), found["steps"]) == (episodes.RECORDED_STEPS, 40)
    assert all(source["total"] == 600 for source in found["sources"])
    assert all(any(one["sample"] == 599 for one in source["episodes"]) for source in found["sources"])


def test_long_texts_and_sequences_are_cut_and_say_so():
    row = {
        "messages": [{"role": "user", "content": "x" * 30_000}],
        "sequences": [{"tokens": [1] * 20_000, "loss_mask": [1] * 20_000}],
    }
    made = episodes.episode(row)
    assert made["messages"][0]["content"].endswith("x [10000 more characters]")
    [sequence] = made["sequences"]
    assert (len(sequence["tokens"]), sequence["length"]) == (16_384, 20_000)


def test_the_worst_gaps_come_first_and_lead_to_their_tokens(tmp_path, run_folders):
    run_folders.write(tmp_path)
    sources = episodes.rollouts(tmp_path, 2, {})["sources"]
    found = gaps.gaps(sources)
    first = found["worst"][0]
    assert first["gap"] == 0.25
    source, one, sequence, token = first["at"]
    assert sources[source]["step"] == 10
    assert sources[source]["episodes"][one]["gap"] == 0.25
    assert sources[source]["episodes"][one]["sequences"][sequence]["pieces"][token] == "<|end|>"
    widths = [each["gap"] for each in found["worst"]]
    assert widths == sorted(widths, reverse=True)
    assert [(each["step"], each["tokens"]) for each in found["steps"]] == [(1, 3), (2, 3), (10, 3)]
    assert found["steps"][2]["max"] == 0.25
    assert found["steps"][2]["mean"] == pytest.approx(0.25 / 3, rel=1e-5)


def test_images_of_a_safe_kind_are_shown_and_nothing_is_loaded_from_elsewhere():
    fine = "data:image/png;base64,iVBORw0KGgo="
    urls = [
        fine,
        "https://example.org/a.png",
        "data:image/svg+xml;base64,AAAA",
        'data:image/png;base64,A" onload="x',
        7,
    ]
    content = [{"type": "text", "text": "Look"}, *({"type": "image", "url": url} for url in urls)]
    row = {
        "messages": [{"role": "user", "content": content}],
        "recorded": {"board": {"type": "image", "url": fine}, "log": "moved", "odd": {"type": "image", "url": urls[1]}},
        "addressed": [{"agent": "white", "reward": 1.5, "turns": [{"turn": 0, "name": "legal", "value": -1.0}, 3]}, 4],
    }
    shown = episodes.episode(row)
    assert shown["messages"] == [{"role": "user", "content": "Look", "images": [fine]}]
    assert [(one["name"], one["images"]) for one in shown["recorded"]] == [("board", [fine]), ("log", []), ("odd", [])]
    assert shown["recorded"][1]["content"] == "moved"
    assert shown["addressed"] == [
        {"agent": "white", "reward": 1.5, "turns": [{"turn": 0, "name": "legal", "value": -1.0}]}
    ]
    assert episodes.episode({"recorded": 3})["recorded"] == []
