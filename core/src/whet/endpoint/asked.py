"""Reads requests in the terms of OpenAI's API. A parameter is understood, or known to change nothing, or refused.

What would be sampled otherwise than training samples must not pass in silence: an episode's answers are trained on.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Conversation, conversation
from whet.data.records import IntArray, Sampling
from whet.errors import DataError, WhetError

MODEL = "policy"
"""What requests call the model: there is one."""
MOST_CHOICES = 16
"""Answers of one request."""
LEAST_TEMPERATURE, MOST_K = 0.01, 2**31 - 1
"""Beyond these engines give numbers that are none, and all that they serve at that time fails with the request."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of one request, and characters in each."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Parameters that are not understood, and the values with which they change nothing."""
WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "user",
)  # fmt: skip
"""Parameters that say nothing about the answer."""


class Refused(WhetError):  # noqa: N818 - it says what becomes of the request
    """A request is not answered, or not as it was asked."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@frozen
class Rules:
    """What requests may say of sampling."""

    sampling: Sampling
    """Of requests that say nothing; `max_tokens` is also the most that they may ask for, and all stops are kept."""
    fixed: bool
    """Whether temperature, top-p and top-k must be as in `sampling`, and randomness is not for requests to choose."""
    ignore: frozenset[str] = frozenset()
    """Parameters that are not read."""


@frozen(eq=False)
class Asked:
    """A request that can be answered."""

    prompt: Conversation | str | IntArray
    """Messages for the chat template; or text, or tokens [prompt], to be continued as they are."""
    sampling: Sampling
    stops: tuple[str, ...]
    """Stop strings of this request's own: the answer is shown up to where one begins."""
    count: int
    """Answers wanted."""
    seed: int | None
    stream: bool
    show_usage: bool
    """Whether a stream ends with the counts of tokens."""
    show_logprobs: bool
    show_tokens: bool
    """Whether the answer has the ids of all tokens, prompt included (`return_token_ids`, as vLLM has it)."""

    @property
    def is_chat(self) -> bool:
        """Whether it has messages."""
        return isinstance(self.prompt, tuple)


def read_chat(body: Any, rules: Rules) -> Asked:
    """Read the body of `/v1/chat/completions`. Raises `Refused`."""
    fields = _Fields(body, rules)
    fields.model()
    messages = _conversation(fields.take("messages"))
    limits = [fields.integer(name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    return _asked(fields, messages, min((n for n in limits if n is not None), default=None), fields.flag("logprobs"))


def read_text(body: Any, rules: Rules) -> Asked:
    """Read the body of `/v1/completions`. Raises `Refused`."""
    fields = _Fields(body, rules)
    fields.model()
    prompt = _prompt(fields.take("prompt"))
    limit, logprobs = fields.integer("max_tokens", 1, None), fields.integer("logprobs", 0, None)
    if logprobs:
        raise _unwanted("logprobs", logprobs, "0: there are those of the tokens that were sampled alone")
    return _asked(fields, prompt, limit, logprobs is not None)


def _asked(fields: "_Fields", prompt: Conversation | str | IntArray, limit: int | None, logprobs: bool) -> Asked:
    base, stops = fields.rules.sampling, fields.stops()
    sampling = evolve(
        fields.sampled(),
        max_tokens=base.max_tokens if limit is None else min(limit, base.max_tokens),
        stop=(*base.stop, *stops),
    )
    asked = Asked(
        prompt=prompt,
        sampling=sampling,
        stops=stops,
        count=fields.integer("n", 1, MOST_CHOICES) or 1,
        seed=fields.seed(),
        stream=fields.flag("stream"),
        show_usage=fields.usage(),
        show_logprobs=logprobs,
        show_tokens=fields.flag("return_token_ids"),
    )
    fields.refuse_others()
    return asked


class _Fields:
    """The fields of a body that are still to be read. A field that is null is as if it were not there."""

    def __init__(self, body: Any, rules: Rules) -> None:
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object")
        self.rules = rules
        self._left = {k: v for k, v in body.items() if v is not None and k not in rules.ignore}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def model(self) -> None:
        if (name := self.take("model", MODEL)) != MODEL:
            raise Refused(404, f"there is no model {name!r:.80}, wanted {MODEL!r}", "model", "model_not_found")

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise _unwanted(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        bound = "" if high is None else f" to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise _unwanted(name, value, f"an integer from {low}{bound}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _unwanted(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def sampled(self) -> Sampling:
        """Give the run's sampling with what is asked for in its place, where that is allowed."""
        base, top_k = self.rules.sampling, self.integer("top_k", -1, MOST_K)
        temperature = self.number("temperature", 0, 100, base.temperature)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise _unwanted("temperature", temperature, f"0, or at least {LEAST_TEMPERATURE:g}")
        asked = evolve(
            base,
            temperature=temperature,
            top_p=self.number("top_p", 1e-6, 1, base.top_p),
            top_k=base.top_k if top_k is None else max(0, top_k),
        )
        for name in ("temperature", "top_p", "top_k") if self.rules.fixed else ():
            if (found := getattr(asked, name)) != (own := getattr(base, name)):
                why = f"{name} is {found:g}, and this episode is sampled with {own:g}"
                raise Refused(400, f"{why}; {self._way_out(name)}", name)
        return asked

    def seed(self) -> int | None:
        seed = self.integer("seed", -(2**63), 2**63)
        if seed is not None and self.rules.fixed:
            raise Refused(
                400,
                "seed is set, and an episode's randomness is derived from the run's, so that no two samples of a task "
                f"are the same; {self._way_out('seed')}",
                "seed",
            )
        return seed

    def stops(self) -> tuple[str, ...]:
        value = self.take("stop", [])
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(map(_is_stop, stops)):
            raise _unwanted("stop", value, f"text or a list of at most {MOST_STOPS}, of 1 to {LONGEST_STOP} characters")
        return tuple(stops)

    def usage(self) -> bool:
        options = self.take("stream_options", {})
        if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
            raise _unwanted("stream_options", options, "{include_usage: true or false}")
        return bool(options.get("include_usage"))

    def refuse_others(self) -> None:
        """Raise `Refused` for a field that nobody has read and that might mean something."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()):
                continue
            raise Refused(400, f"{name:.80} is not understood here; {self._way_out(name[:80])}", name[:80])

    def _way_out(self, name: str) -> str:
        return "leave it out" + f", or have it ignored: model.endpoint(ignore=[{name!r}])" * self.rules.fixed


def _unwanted(name: str, value: Any, wanted: str) -> Refused:
    return Refused(400, f"{name} is {value!r:.80}, wanted {wanted}", name)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_STOP and _is_text(value)


def _is_text(value: str) -> bool:
    """Whether text has no half characters, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _conversation(value: Any) -> Conversation:
    """Read messages. What a client adds to those that it was given, and is null, is nothing."""
    if not isinstance(value, list) or not value:
        raise _unwanted("messages", value, "a list of messages")
    try:
        messages = conversation([_plain(message) for message in value])
    except DataError as error:
        raise Refused(400, str(error), "messages") from error
    if not all(_is_text(message.text) for message in messages):
        raise Refused(400, "a message has half a character (a lone surrogate)", "messages")
    if messages[-1].role == "assistant":
        raise Refused(400, "the last message is the assistant's own: there is nothing to answer", "messages")
    return messages


def _plain(message: Any) -> Any:
    """Take the role `developer` for what it was called before; refuse calls of tools."""
    if not isinstance(message, dict):
        return message
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise Refused(400, f"a message has {name}, and messages here are text alone", "messages")
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _prompt(value: Any) -> str | IntArray:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value and _is_text(value):
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return np.array(value, np.int64)
    raise _unwanted("prompt", value, "text, or a list of token ids; one prompt")


def check_ignored(names: Collection[str]) -> frozenset[str]:
    """Check what an environment wants ignored. Raises `WhetError` for what no request can do without."""
    if isinstance(names, str) or {"messages", "prompt"} & set(names):
        raise WhetError(
            f"model.endpoint(ignore={names!r:.80}): wanted a list of parameters, without messages and prompt"
        )
    return frozenset(names)


def shown(text: str, stops: tuple[str, ...]) -> str:
    """Cut an answer where the first of some stop strings begins, as OpenAI's API has it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
