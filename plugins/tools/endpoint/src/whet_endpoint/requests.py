"""Requests in all dialects. Each parameter is understood, or known to change nothing, or not supported.

The responses of an episode are trained on, so a request that asks for another sampling than training's is not supported
there. What is not supported is refused, or left out and named in the response, as `endpoint.unsupported` says.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from whet.data.messages import Conversation, Tools
from whet.data.records import IntArray, Sampling
from whet.errors import WhetError
from whet_endpoint.errors import ApiError, unwanted
from whet_endpoint.forced import Tooling, calls_schema, forces
from whet_endpoint.messages import is_text, read_tools

MODEL = "policy"
"""The only name of a model in requests."""
MOST_CHOICES = 16
"""Most choices of one request."""
MOST_LIKELIEST = 20
"""Most likeliest tokens at each position, as in OpenAI's API."""
LEAST_TEMPERATURE, MOST_K = 0.01, 2**31 - 1
"""Beyond these bounds engines compute no finite numbers, and fail all requests that they serve at the same time."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Most stop strings of one request, and most characters in each."""
LONGEST_SCHEMA = 1 << 16
"""Most characters of a JSON schema."""
MOST_IGNORED = 16
"""Most names of ignored parameters in a response."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "mcp_servers": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "suffix": ("",),
    "truncation": ("disabled",),
}
"""Parameters that are not supported, with the values that change nothing."""
WITHOUT_EFFECT = (
    "cache_control", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "user",
)  # fmt: skip
"""Parameters that do not change the response."""
_PLAIN_NAME = re.compile(r"[\w.\-\[\]]{1,60}", re.ASCII)
FREELY = "what the model answers is sampled freely"


@frozen
class Rules:
    """The sampling that requests may ask for."""

    sampling: Sampling
    """The default of requests; `max_tokens` is also the most that they may ask for, and its stops always apply."""
    fixed: bool
    """Whether temperature, top-p and top-k must be as in `sampling`, and requests may not set a seed."""
    ignore: frozenset[str] = frozenset()
    """Parameters that are not read."""
    lenient: bool = False
    """Whether parameters that are not supported are left out, rather than refused."""
    extras: frozenset[str] = frozenset()
    """The optional parts of requests that the generator supports; see `GeneratorFacts`."""


@frozen(eq=False)
class ApiRequest:
    """A request that the rules allow."""

    prompt: Conversation | str | IntArray
    """Messages for the chat template; or text, or tokens [prompt], that are continued as they are."""
    sampling: Sampling
    stops: tuple[str, ...]
    """Stop strings of this request: the response is shown up to the first one."""
    seed: int | None
    stream: bool
    ignored: tuple[str, ...] = ()
    """Parameters that were left out."""
    count: int = 1
    """Number of choices."""
    show_usage: bool = False
    """Whether a stream ends with the numbers of tokens, in dialects that leave it open."""
    show_logprobs: bool = False
    likeliest: int = 0
    """The number of likeliest tokens to show at each position."""
    show_tokens: bool = False
    """Whether the response has the ids of all tokens, prompt included (`return_token_ids`, as in vLLM)."""
    tools: Tools = ()
    """Tools that the prompt describes."""
    reads_calls: bool = False
    """Whether calls of tools are parsed, rather than shown as text."""
    forces_calls: bool = False
    """Whether the text is held to the schema of calls in `whet_endpoint.forced`, and is read as these."""
    show_reasoning: bool = True
    """Whether the model's reasoning is shown, apart from the text."""
    history: Conversation = ()
    """What a later request continues by the id of this one's response."""
    kept: bool = False
    """Whether a later request may do so."""
    asked: Mapping[str, Any] = {}
    """Parameters that the response repeats."""

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt is a list of messages."""
        return isinstance(self.prompt, tuple)


class Fields:
    """The fields of a body that are still to be read. A field that is null counts as absent."""

    def __init__(self, body: Any, rules: Rules) -> None:
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object")
        self.rules = rules
        given = {k: v for k, v in body.items() if v is not None}
        self._left = {k: v for k, v in given.items() if k not in rules.ignore}
        self._ignored = dict.fromkeys(sorted(given.keys() & rules.ignore))

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the parameters that were left out."""
        return tuple(name if _PLAIN_NAME.fullmatch(name) else "?" for name in self._ignored)[:MOST_IGNORED]

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field, and count it as read."""
        return self._left.pop(name, default)

    def unsupported(self, name: str, why: str, key: str = "") -> None:
        """Leave a parameter out; where that is not allowed, raise `ApiError`. `key`: what ignores it."""
        if not self.rules.lenient and (key or name) not in self.rules.ignore:
            raise ApiError(400, f"{why}; {self._way_out(key or name)}", name)
        self.note(key or name)

    def note(self, name: str) -> None:
        """Remember that a parameter is left out."""
        self._ignored[name] = None

    def model(self) -> None:
        """Read the name of the model. Raises `ApiError` for another one."""
        if (name := self.take("model", MODEL)) == MODEL:
            return
        if not self.rules.lenient:
            raise ApiError(404, f"there is no model {name!r:.80}, wanted {MODEL!r}", "model", "model_not_found")
        self.note("model")

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that is true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise unwanted(name, value, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """Return a field that is an object."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise unwanted(name, value, "an object")
        return dict(value)

    def integer(self, name: str, low: int, high: int | None) -> int | None:
        """Return a field that is an integer."""
        value = self.take(name)
        if value is None:
            return None
        bound = "" if high is None else f" to {high}"
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise unwanted(name, value, f"an integer from {low}{bound}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Return a field that is a number."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise unwanted(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def request(self, prompt: Conversation | str | IntArray, limit: int | None, stop: str = "stop") -> ApiRequest:
        """Return the request with what all dialects have. `stop` is the field of stop strings."""
        base, stops = self.rules.sampling, self.stops(stop)
        sampling = evolve(
            self.sampled(),
            max_tokens=base.max_tokens if limit is None else min(limit, base.max_tokens),
            stop=(*base.stop, *stops),
        )
        return ApiRequest(prompt, sampling, stops, self.seed(), self.flag("stream"))

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
        if not self.rules.fixed:
            return wanted
        for name in ("temperature", "top_p", "top_k"):
            if (found := getattr(wanted, name)) != (own := getattr(base, name)):
                self.unsupported(name, f"{name} is {found:g}, and this episode is sampled with {own:g}")
        return base

    def seed(self) -> int | None:
        """Return the seed, where the rules allow one."""
        seed = self.integer("seed", -(2**63), 2**63)
        if seed is not None and self.rules.fixed:
            why = "seed is set, and an episode's randomness is derived from the run's, so that no two samples of a task"
            self.unsupported("seed", f"{why} are the same")
            return None
        return seed

    def stops(self, name: str) -> tuple[str, ...]:
        """Return the stop strings."""
        value = self.take(name, [])
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(map(_is_stop, stops)):
            raise unwanted(name, value, f"text or a list of at most {MOST_STOPS}, of 1 to {LONGEST_STOP} characters")
        return tuple(stops)

    def tools(self, given: list[Any], choice: Any, parallel: Any) -> Tooling:
        """Return tools, and what becomes of calls. `given`, `choice` and `parallel` are as in Chat."""
        tools, strict = read_tools(given)
        forced = forces(choice) and self._can_force(choice)
        schema = calls_schema(tools, choice, parallel is True) if forced else ""
        if len(schema) > LONGEST_SCHEMA:
            raise unwanted("tools", given, f"schemas of at most {LONGEST_SCHEMA} characters for a forced call")
        if strict and not forced:
            why = f"{strict}.function.strict is set, and {FREELY}: arguments are not held to a schema"
            self.unsupported("tools", why, "strict")
        if tools and parallel is not True and not forced:
            why = f"parallel_tool_calls is {parallel!r:.80}, and {FREELY}: it may call several tools"
            self.unsupported("parallel_tool_calls", why)
        return Tooling(tools, bool(tools) and choice != "none", schema)

    def _can_force(self, choice: Any) -> bool:
        """Return whether calls can be forced; where it is not allowed to go on without, raise `ApiError`."""
        named = f"tool_choice is {choice!r:.80}"
        if self.rules.fixed:
            why = f"{named}, and {FREELY}: it cannot be made to call; wanted auto or none"
        elif "schema" not in self.rules.extras:
            why = f"{named}, and this generator cannot hold a text to a JSON schema of calls; wanted auto or none"
        else:
            return True
        self.unsupported("tool_choice", why)
        return False

    def held(self, request: ApiRequest, tooling: Tooling, schema: str = "") -> ApiRequest:
        """Return a request with its tools, held to the schema of forced calls, else to the schema of its text."""
        return evolve(
            request, sampling=evolve(request.sampling, schema=tooling.schema or schema), tools=tooling.tools,
            reads_calls=tooling.reads_calls, forces_calls=bool(tooling.schema),
        )  # fmt: skip

    def likeliest(self) -> int:
        """Return the number of likeliest tokens to show, where the generator reports them."""
        wanted = self.integer("top_logprobs", 0, MOST_LIKELIEST) or 0
        if wanted and "likeliest" not in self.rules.extras:
            why = f"top_logprobs is {wanted}, and this generator reports the logprobs of sampled tokens alone"
            self.unsupported("top_logprobs", f"{why} (logprobs: true)")
            return 0
        return wanted

    def schema(self, name: str, form: Any) -> str:
        """Return the JSON schema of a `response_format`, where the generator can hold a text to it; empty: none.

        `form` has the shape of the Responses dialect: `{"type": "json_schema", "schema": {...}}`.
        """
        kind = form.get("type") if isinstance(form, dict) else None
        if kind == "text":
            return ""
        schema = {"type": "object"} if kind == "json_object" else form.get("schema") if kind == "json_schema" else None
        if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
            raise unwanted(name, form, "the type text, json_object, or json_schema with a schema")
        if self.rules.fixed:
            self.unsupported(name, f"{name} is {kind}, and {FREELY}: training needs samples of the model itself")
            return ""
        if "schema" not in self.rules.extras:
            self.unsupported(name, f"{name} is {kind}, and this generator cannot hold a text to a JSON schema")
            return ""
        if len(text := json.dumps(schema)) > LONGEST_SCHEMA:
            raise unwanted(name, form, f"a schema of at most {LONGEST_SCHEMA} characters")
        return text

    def rest(self) -> None:
        """Handle the fields that were not read and might change the response."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()):
                continue
            self.unsupported(name[:80], f"{name:.80} is not understood here")

    def _way_out(self, name: str) -> str:
        own = f", or have it ignored: model.endpoint(ignore=[{name!r}])" * self.rules.fixed
        return f"leave it out{own}"


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= LONGEST_STOP and is_text(value)


def read_token_prompt(value: Any) -> str | IntArray:
    """Return the prompt of `/v1/completions`: a text or tokens. Raises `ApiError`."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value and is_text(value):
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return np.array(value, np.int64)
    raise unwanted("prompt", value, "text, or a list of token ids; one prompt")


def check_ignored(names: Collection[str]) -> frozenset[str]:
    """Return the parameters to ignore. Raises `WhetError` for parameters that every request needs."""
    if isinstance(names, str) or {"messages", "prompt", "input"} & set(names):
        raise WhetError(
            f"model.endpoint(ignore={names!r:.80}): wanted a list of parameters, without messages, prompt and input"
        )
    return frozenset(names)


def shown(text: str, stops: tuple[str, ...]) -> str:
    """Return text up to the first stop string, as OpenAI's API shows it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
