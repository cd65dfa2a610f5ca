"""A process that stands in for one of verifiers, and does what processes do wrong. It is told what by the taskset.

    python strange_process.py       reads requests of `whet_env_verifiers.inside.worker` and answers them

It answers a request to play with a request to the endpoint, so that the model is asked.
"""

import json
import os
import sys
import time
import urllib.request

GOOD = {"good": True, "traces": 1, "errors": [], "rewards": {"right": [1.0, 2.0]}, "metrics": {"m": 3.0}, "stop": "end"}
ANSWERS = {
    "plays": GOOD,
    "scores NaN": {**GOOD, "rewards": {"right": [float("nan"), 1.0]}},
    "scores text": {**GOOD, "rewards": {"right": ["much", 1.0]}},
    "scores nothing": {**GOOD, "rewards": {"right": None}, "stop": "scoring_timeout"},
    "answers a list": [1],
    "answers without errors": {"good": True},
    "loses the model": {**GOOD, "good": False, "errors": [["ProviderError", "upstream 503: gone"]]},
    "breaks in a reward": {**GOOD, "good": False, "errors": [["TaskError", "KeyError: 'x'"]]},
    "has two agents": {**GOOD, "traces": 2, "rewards": {}},
}


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def ask_model(asked: dict) -> None:
    body = json.dumps({"model": asked["model"], "messages": [{"role": "user", "content": "one?"}]}).encode()
    headers = {"Authorization": f"Bearer {asked['key']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{asked['url']}/chat/completions", body, headers)) as reply:
        reply.read()


def play(trouble: str, asked: dict) -> None:
    if trouble == "hangs":
        time.sleep(3600)
    if trouble == "dies":
        sys.stderr.write("ran out of luck\n")
        os._exit(3)
    if trouble == "sends no JSON":
        sys.stdout.write("hello\n")
        sys.stdout.flush()
    if trouble == "sends too much":
        sys.stdout.write("x" * 200_000)
        sys.stdout.flush()
        time.sleep(3600)
    if trouble == "sends deep JSON":
        sys.stdout.write("[" * 90_000 + "\n")
        sys.stdout.flush()
    if trouble == "refuses":
        say({"id": asked["id"], "error": "RuntimeError: not today"})
    if trouble in ANSWERS:
        ask_model(asked)
        say({"id": asked["id"], "ok": ANSWERS[trouble]})


def main() -> None:
    trouble, opened = "", os.environ.get("STRANGE_OPENED", "")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("do") == "open":
            trouble = asked["options"].get("trouble", "")
            digest = str(time.monotonic()) if trouble == "changes" else "same"
            if trouble == "cannot be opened":
                say({"id": asked["id"], "error": "ModuleNotFoundError: taskset 'x' not found"})
            say({"id": asked["id"], "ok": {"splits": {"train": 3}, "digest": digest, "rewards": ["right"]}})
            if opened:
                with open(opened, "a", encoding="utf-8") as file:
                    file.write(f"{os.getpid()}\n")
        elif asked.get("do") == "tasks":
            say({"id": asked["id"], "ok": [[f"key {i}", [["user", f"task {i}"]]] for i in range(3)]})
        elif asked.get("do") == "ping":
            say({"id": asked["id"], "ok": None})
        elif asked.get("do") == "play":
            play(trouble, asked)


main()
