"""Reads requests in the terms of OpenAI's API. A parameter is understood, or known to change nothing, or refused.

What would be sampled otherwise than training samples must not pass in silence: an episode's answers are trained on.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Conversation, Tools
from whet.data.records import IntArray, Sampling
from whet.endpoint.refused import Refused, unwanted
from whet.endpoint.said import is_text, read_messages, read_tools
from whet.errors import WhetError

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
}
"""Parameters that are not understood, and the values with which they change nothing."""
WITHOUT_EFFECT = (
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user",
)  # fmt: skip
"""Parameters that say nothing about the answer."""


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
    tools: Tools = ()
    """That the model is told of."""
    reads_calls: bool = False
    """Whether calls that it makes are told as such, rather than as the text that they are."""

    @property
    def is_chat(self) -> bool:
        """Whether it has messages."""
        return isinstance(self.prompt, tuple)


def read_chat(body: Any, rules: Rules) -> Asked:
    """Read the body of `/v1/chat/completions`. Raises `Refused`."""
    fields = _Fields(body, rules)
    fields.model()
    messages = read_messages(fields.take("messages"))
    tools, called = fields.tools()
    limits = [fields.integer(name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    limit = min((n for n in limits if n is not None), default=None)
    logprobs = fields.flag("logprobs")
    fields.refuse_top_logprobs()
    return evolve(_asked(fields, messages, limit, logprobs), tools=tools, reads_calls=called)


def read_text(body: Any, rules: Rules) -> Asked:
    """Read the body of `/v1/completions`. Raises `Refused`."""
    fields = _Fields(body, rules)
    fields.model()
    prompt = _prompt(fields.take("prompt"))
    limit, logprobs = fields.integer("max_tokens", 1, None), fields.integer("logprobs", 0, None)
    if logprobs:
        raise unwanted("logprobs", logprobs, "0: there are those of the tokens that were sampled alone")
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
            raise unwanted(name, value, "true or false")
        return value

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        bound = "" if high is None else f" to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise unwanted(name, value, f"an integer from {low}{bound}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise unwanted(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def sampled(self) -> Sampling:
        """Give the run's sampling with what is asked for in its place, where that is allowed."""
        base, top_k = self.rules.sampling, self.integer("top_k", -1, MOST_K)
        temperature = self.number("temperature", 0, 100, base.temperature)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise unwanted("temperature", temperature, f"0, or at least {LEAST_TEMPERATURE:g}")
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
            raise unwanted("stop", value, f"text or a list of at most {MOST_STOPS}, of 1 to {LONGEST_STOP} characters")
        return tuple(stops)

    def usage(self) -> bool:
        options = self.take("stream_options", {})
        if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
            raise unwanted("stream_options", options, "{include_usage: true or false}")
        return bool(options.get("include_usage"))

    def tools(self) -> tuple[Tools, bool]:
        """Give the tools, and whether calls of them are to be read."""
        tools = read_tools(self.take("tools", []), "" if "strict" in self.rules.ignore else self._way_out("strict"))
        choice, parallel = self.take("tool_choice", "auto"), self.take("parallel_tool_calls", True)
        freely = "what the model answers is sampled freely"
        if choice not in ("auto", "none"):
            why = f"tool_choice is {choice!r:.80}, and {freely}: it cannot be made to call; wanted auto or none"
            raise Refused(400, f"{why}; {self._way_out('tool_choice')}", "tool_choice")
        if tools and parallel is not True:
            why = f"parallel_tool_calls is {parallel!r:.80}, and {freely}: it may call several tools"
            raise Refused(400, f"{why}; {self._way_out('parallel_tool_calls')}", "parallel_tool_calls")
        return tools, bool(tools) and choice == "auto"

    def refuse_top_logprobs(self) -> None:
        """Raise `Refused` where the likeliest tokens are asked for: generators give the logprobs of sampled ones."""
        if asked := self.integer("top_logprobs", 0, None):
            why = f"top_logprobs is {asked}, and there are the logprobs of sampled tokens alone (logprobs: true)"
            raise Refused(400, f"{why}; {self._way_out('top_logprobs')}", "top_logprobs")

    def refuse_others(self) -> None:
        """Raise `Refused` for a field that nobody has read and that might mean something."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()):
                continue
            raise Refused(400, f"{name:.80} is not understood here; {self._way_out(name[:80])}", name[:80])

    def _way_out(self, name: str) -> str:
        return "leave it out" + f", or have it ignored: model.endpoint(ignore=[{name!r}])" * self.rules.fixed


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_STOP and is_text(value)


def _prompt(value: Any) -> str | IntArray:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value and is_text(value):
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return np.array(value, np.int64)
    raise unwanted("prompt", value, "text, or a list of token ids; one prompt")


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
