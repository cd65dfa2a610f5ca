"""Requests in the format of OpenAI's API. Each parameter is understood, or known to change nothing, or refused.

The responses of an episode are trained on, so a request that asks for another sampling than training's is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Conversation, Tools
from whet.data.records import IntArray, Sampling
from whet.errors import WhetError
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.messages import is_text, read_messages, read_tools

MODEL = "policy"
"""The only name of a model in requests."""
MOST_CHOICES = 16
"""Most choices of one request."""
LEAST_TEMPERATURE, MOST_K = 0.01, 2**31 - 1
"""Beyond these bounds engines compute no finite numbers, and fail all requests that they serve at the same time."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Most stop strings of one request, and most characters in each."""
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
"""Parameters that are not supported, with the values that change nothing."""
WITHOUT_EFFECT = (
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user",
)  # fmt: skip
"""Parameters that do not change the response."""


@frozen
class Rules:
    """The sampling that requests may ask for."""

    sampling: Sampling
    """The default of requests; `max_tokens` is also the most that they may ask for, and its stops always apply."""
    fixed: bool
    """Whether temperature, top-p and top-k must be as in `sampling`, and requests may not set a seed."""
    ignore: frozenset[str] = frozenset()
    """Parameters that are not read."""


@frozen(eq=False)
class ApiRequest:
    """A request that the rules allow."""

    prompt: Conversation | str | IntArray
    """Messages for the chat template; or text, or tokens [prompt], that are continued as they are."""
    sampling: Sampling
    stops: tuple[str, ...]
    """Stop strings of this request: the response is shown up to the first one."""
    count: int
    """Number of choices."""
    seed: int | None
    stream: bool
    show_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    show_logprobs: bool
    show_tokens: bool
    """Whether the response has the ids of all tokens, prompt included (`return_token_ids`, as in vLLM)."""
    tools: Tools = ()
    """Tools that the prompt describes."""
    reads_calls: bool = False
    """Whether calls of tools are parsed, rather than shown as text."""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        return isinstance(self.prompt, tuple)


def read_chat(body: Any, rules: Rules) -> ApiRequest:
    """Return the request in a body of `/v1/chat/completions`. Raises `ApiError`."""
    fields = _Fields(body, rules)
    fields.model()
    messages = read_messages(fields.take("messages"))
    tools, called = fields.tools()
    limits = [fields.integer(name, 1, None) for name in ("max_completion_tokens", "max_tokens")]
    limit = min((n for n in limits if n is not None), default=None)
    logprobs = fields.flag("logprobs")
    fields.refuse_top_logprobs()
    return evolve(_request(fields, messages, limit, logprobs), tools=tools, reads_calls=called)


def read_text(body: Any, rules: Rules) -> ApiRequest:
    """Return the request in a body of `/v1/completions`. Raises `ApiError`."""
    fields = _Fields(body, rules)
    fields.model()
    prompt = _prompt(fields.take("prompt"))
    limit, logprobs = fields.integer("max_tokens", 1, None), fields.integer("logprobs", 0, None)
    if logprobs:
        raise unwanted("logprobs", logprobs, "0: there are those of the tokens that were sampled alone")
    return _request(fields, prompt, limit, logprobs is not None)


def _request(fields: "_Fields", prompt: Conversation | str | IntArray, limit: int | None, logprobs: bool) -> ApiRequest:
    base, stops = fields.rules.sampling, fields.stops()
    sampling = evolve(
        fields.sampled(),
        max_tokens=base.max_tokens if limit is None else min(limit, base.max_tokens),
        stop=(*base.stop, *stops),
    )
    request = ApiRequest(
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
    return request


class _Fields:
    """The fields of a body that are still to be read. A field that is null counts as absent."""

    def __init__(self, body: Any, rules: Rules) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object")
        self.rules = rules
        self._left = {k: v for k, v in body.items() if v is not None and k not in rules.ignore}

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def model(self) -> None:
        if (name := self.take("model", MODEL)) != MODEL:
            raise ApiError(404, f"there is no model {name!r:.80}, wanted {MODEL!r}", "model", "model_not_found")

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
        """Return the sampling of the request, where the rules allow it."""
        base, top_k = self.rules.sampling, self.integer("top_k", -1, MOST_K)
        temperature = self.number("temperature", 0, 100, base.temperature)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise unwanted("temperature", temperature, f"0, or at least {LEAST_TEMPERATURE:g}")
        wanted = evolve(
            base,
            temperature=temperature,
            top_p=self.number("top_p", 1e-6, 1, base.top_p),
            top_k=base.top_k if top_k is None else max(0, top_k),
        )
        for name in ("temperature", "top_p", "top_k") if self.rules.fixed else ():
            if (found := getattr(wanted, name)) != (own := getattr(base, name)):
                why = f"{name} is {found:g}, and this episode is sampled with {own:g}"
                raise ApiError(400, f"{why}; {self._way_out(name)}", name)
        return wanted

    def seed(self) -> int | None:
        seed = self.integer("seed", -(2**63), 2**63)
        if seed is not None and self.rules.fixed:
            raise ApiError(
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
        """Return the tools, and whether calls of them are parsed."""
        tools = read_tools(self.take("tools", []), "" if "strict" in self.rules.ignore else self._way_out("strict"))
        choice, parallel = self.take("tool_choice", "auto"), self.take("parallel_tool_calls", True)
        freely = "what the model answers is sampled freely"
        if choice not in ("auto", "none"):
            why = f"tool_choice is {choice!r:.80}, and {freely}: it cannot be made to call; wanted auto or none"
            raise ApiError(400, f"{why}; {self._way_out('tool_choice')}", "tool_choice")
        if tools and parallel is not True:
            why = f"parallel_tool_calls is {parallel!r:.80}, and {freely}: it may call several tools"
            raise ApiError(400, f"{why}; {self._way_out('parallel_tool_calls')}", "parallel_tool_calls")
        return tools, bool(tools) and choice == "auto"

    def refuse_top_logprobs(self) -> None:
        """Raise `ApiError` for `top_logprobs`: generators return the logprobs of sampled tokens alone."""
        if wanted := self.integer("top_logprobs", 0, None):
            why = f"top_logprobs is {wanted}, and there are the logprobs of sampled tokens alone (logprobs: true)"
            raise ApiError(400, f"{why}; {self._way_out('top_logprobs')}", "top_logprobs")

    def refuse_others(self) -> None:
        """Raise `ApiError` for a field that was not read and might change the response."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()):
                continue
            raise ApiError(400, f"{name:.80} is not understood here; {self._way_out(name[:80])}", name[:80])

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
    """Return the parameters to ignore. Raises `WhetError` for parameters that every request needs."""
    if isinstance(names, str) or {"messages", "prompt"} & set(names):
        raise WhetError(
            f"model.endpoint(ignore={names!r:.80}): wanted a list of parameters, without messages and prompt"
        )
    return frozenset(names)


def shown(text: str, stops: tuple[str, ...]) -> str:
    """Return text up to the first stop string, as OpenAI's API shows it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
