"""Chat templates: render the Jinja template of a model folder in a sandbox, without transformers.

Template, globals, filters and variables are those of `transformers`' `apply_chat_template`, so that the text is the
same character for character. A template is untrusted code: it runs in Jinja's immutable sandbox and sees only strings,
and tools as JSON values.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from whet.data.messages import Conversation, Tools
from whet.errors import DataError


class ChatTemplate:
    """A compiled chat template, with the special tokens that it may write."""

    def __init__(
        self, source: str, variables: Mapping[str, str], now: datetime, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Compile a template. `variables` are special tokens by name; `now` is the time that the template sees.

        `arguments` are further variables. Raises `DataError` for one that the template does not use. The time is fixed
        because a conversation that runs past midnight would otherwise have its history rewritten.
        """
        self.source = source
        self._variables, environment = {**variables, **(arguments or {})}, _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"the chat template cannot be read: line {error.lineno}: {error.message}") from error
        own = {"messages", "tools", "documents", "add_generation_prompt", *variables, *environment.globals}
        used = sorted(jinja2.meta.find_undeclared_variables(tree) - own - {"bos_token", "eos_token", "pad_token"})
        if unused := [name for name in arguments or () if name not in used]:
            known = f"it uses {', '.join(used)}" if used else "it uses none"
            raise DataError(f"the chat template does not use the argument {unused[0]!r}; {known}")
        read = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
        read |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self._reasoning = next((name for name in ("reasoning_content", "reasoning", "thinking") if name in read), "")
        self._last: tuple[Conversation, list[dict[str, Any]]] = (), []

    def render(self, conversation: Conversation, *, generation_prompt: bool = False, tools: Tools = ()) -> str:
        """Return the text of a conversation. Raises `DataError` if the template refuses it.

        Templates differ in what they take: content as text or as a list of parts; beside calls, no content or an empty
        one; arguments of calls as values or as text. The first form that a template takes is used.
        """
        calling, fault = any(message.calls for message in conversation), None
        for empty, as_text in ((None, False), ("", False), ("", True)) if calling else ((None, False),):
            messages = list(self._seen(conversation, empty, as_text)) if calling else self._plain(conversation)
            try:
                text = self._rendered(messages, tools, generation_prompt)
            except _FAULTS as error:
                fault = fault or error
            else:
                if empty == "" or not calling or "None" not in text:
                    return text
        roles = ", ".join(message.role for message in conversation) or "none"
        raise DataError(f"the chat template refuses a conversation with the roles {roles}: {fault}") from fault

    def _rendered(self, messages: list[dict[str, Any]], tools: Tools = (), generation_prompt: bool = False) -> str:
        return self._template.render(
            messages=messages,
            tools=[json.loads(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._variables,
        )

    def _plain(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return messages without calls in the form that templates read.

        They are kept, as a conversation is often rendered again up to an earlier message. No template can change them.
        """
        known, seen = self._last
        if known[: len(conversation)] != conversation:
            seen = list(self._seen(conversation, None, False))
            self._last = conversation, seen
        return seen[: len(conversation)]

    def _seen(self, conversation: Conversation, empty: str | None, as_text: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages in the form that templates read. Raises `DataError` if a part of one is not text.

        The result of a tool has the id and the name of its call. Without a known id, results have the order of calls.
        """
        waiting: dict[str, str] = {}
        for message in conversation:
            if any(part.type != "text" for part in message.content):
                raise DataError(f"a {message.role} message has an image, and no model reads images yet; leave it out")
            seen: dict[str, Any] = {"role": message.role, "content": message.text}
            if self._takes_parts:
                seen["content"] = [{"type": "text", "text": message.text}]
            if message.role == "tool":
                call = message.answers if message.answers in waiting else next(iter(waiting), message.answers)
                seen |= {"tool_call_id": call} if call else {}
                seen |= {"name": waiting.pop(call)} if call in waiting else {}
            if message.reasoning and self._reasoning:
                seen[self._reasoning] = message.reasoning
            if message.calls:
                waiting = {call.id: call.name for call in message.calls}
                seen["content"] = seen["content"] if message.text else empty
                seen["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": held}}
                    for c in message.calls
                    for held in [c.arguments if as_text else json.loads(c.arguments)]
                ]
            yield seen

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template drops or refuses content that is text, and takes a list of parts.

        A template that writes the list itself, as Python shows it, takes none: it cuts a text, for example.
        """
        part = {"type": "text", "text": "whetstone"}
        for content in ("whetstone", [part]):
            try:
                text = self._rendered([{"role": "user", "content": content}])
            except _FAULTS:
                continue
            if "whetstone" in text and str(part) not in text:
                return not isinstance(content, str)
        return False


_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip
"""The exceptions that a template can raise while it is rendered."""


def read_text(file: Path) -> str:
    """Return the text of a template file. Raises `DataError` with the reason if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text, at byte {error.start}") from error


def read_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return a folder's template: `chat_template.jinja`, else the (default) one in `tokenizer_config.json`,
    else None.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        try:
            found = {entry["name"]: entry["template"] for entry in found}
        except (TypeError, KeyError) as error:
            raise DataError(f"{folder / 'tokenizer_config.json'} has a list of no chat templates: {error}") from error
    if isinstance(found, Mapping):
        if "default" not in found:
            raise DataError(
                f"{folder} has the chat templates {', '.join(map(str, found))} and none named `default`; "
                "choose one with model.chat_template"
            )
        found = found["default"]
    return found if isinstance(found, str) else None


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks what the model wrote. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the declaration is Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """What templates see as `dict`. They only need to call it; the class itself would be a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """What templates see as `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # so that a template may name an attribute `self`
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} on a namespace")


def _environment(now: datetime) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": now.strftime,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(functions)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which templates do not mean.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
