"""What a model wrote, in parts: reasoning, content, tool calls."""

from weakref import WeakKeyDictionary

from attrs import frozen

from whet.data.messages import Call, Message, Tools
from whet.errors import DataError
from whet.interfaces.chat import Chat
from whet_chat.calls import Frame, Reader, made
from whet_chat.learn import CALLS, NAME, TOOL, USER, Render, common, first_mark, learn_calls, marks
from whet_chat.values import read_json

_REASON, _ANSWER = "whet-reason", "whet-answer"


@frozen
class Reasoning:
    """How reasoning is marked at the beginning of a response."""

    open: str
    """Text before the reasoning. Empty: the model writes none."""
    close: str
    """Text after the reasoning."""
    opened: bool
    """Whether the prompt already ends with the text before the reasoning."""

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the rest of a response."""
        begin = text.lstrip()
        inside = self.opened
        if self.open and begin.startswith(self.open):
            text, inside = begin[len(self.open) :], True
        before, found, after = text.partition(self.close)
        if found:
            return before.strip(), after.lstrip("\n")
        return (text.strip(), "") if inside else ("", text)


@frozen
class ResponseFormat:
    """How a response of the model is written."""

    reasoning: Reasoning | None
    """None: the template knows no reasoning."""
    calls: Reader | None
    """None: the template does not show how calls are written."""
    why: str = ""
    """Why the template cannot be used with tools. Empty: it can be."""
    lead: str = ""
    """Text between reasoning, or the prompt, and content."""
    tail: tuple[str, ...] = ()
    """Tags after the content, in their order."""
    channels: bool = False
    """Whether each part of a response names its channel."""
    in_fields: bool = True
    """Whether the template writes calls that it gets as fields. If not, they stay in the content that it gets."""

    def read(self, text: str, tools: Tools = ()) -> Message:
        """Return a response as a message with its parts. Without tools there are no calls in it."""
        if self.channels and "<|message|>" in text:
            reasoning, content, calls = _channels(text)
        else:
            reasoning, content = self.reasoning.split(text) if self.reasoning else ("", text)
            content, calls = self._called(content, tools)
            if not calls and not content:  # reasoning that the model did not end before it called
                reasoning, calls = self._called(reasoning, tools)
            content = self._bare(content)
        return Message("assistant", content, tuple(calls) if tools else (), reasoning=reasoning)

    def shown(self, text: str, tools: Tools = ()) -> Message:
        """Return a response as the template takes it."""
        return self.read(text, tools if self.in_fields else ())

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts with which calls may begin. Empty: a response is calls alone, or has channels."""
        frame = self.calls.frame if self.calls else Frame("")
        thought = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return tuple(mark for mark in (*frame.opening, frame.marker) if mark and mark not in thought)

    def _called(self, content: str, tools: Tools) -> tuple[str, list[Call]]:
        if self.calls is None or not tools:
            return content, []
        try:
            end, calls = self.calls.calls(content, tools)
        except (ValueError, RecursionError):
            return content, []
        return (content[:end].rstrip(), calls) if calls else (content, [])

    def _bare(self, content: str) -> str:
        """Return content without the tags around it."""
        if self.lead and content.lstrip().startswith(self.lead):
            content = content.lstrip()[len(self.lead) :]
        for count in reversed(range(1, len(self.tail) + 1)):
            if content.rstrip().endswith(tags := "".join(self.tail[:count])):
                return content.rstrip()[: -len(tags)]
        return content


def _channels(text: str) -> tuple[str, str, list[Call]]:
    """Read `<|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.f<|channel|>commentary...`."""
    found: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[Call] = []
    for part in text.split("<|start|>"):
        header, message, body = part.partition("<|message|>")
        if not message:
            continue
        for end in ("<|end|>", "<|call|>", "<|return|>"):
            body = body.partition(end)[0]
        _, called, name = header.partition("to=functions.")
        if called:
            try:
                calls.append(made(name.partition("<")[0].split()[0], read_json(body, 0)[0]))
                continue
            except (ValueError, IndexError, RecursionError):
                body = f"{header}{message}{body}"
        found["reasoning" if "analysis" in header and not called else "content"].append(body.strip())
    return "\n".join(found["reasoning"]), "\n".join(found["content"]), calls


def learn(render: Render) -> ResponseFormat:
    """Return the format of a template's responses."""
    calls, why, in_fields = learn_calls(render)
    plain = _rendered(render, Message("assistant", _ANSWER))
    thought = _rendered(render, Message("assistant", _ANSWER, reasoning=_REASON))
    if "<|channel|>" in thought and "<|message|>" in thought:
        return ResponseFormat(None, _Channels(Frame("")), why, channels=True)
    asked = _asked(render)
    reasoning = _reasoning(render, asked, thought)
    before, _, after = (thought if reasoning and _REASON in thought else plain).partition(_ANSWER)
    lead = before.rpartition(reasoning.close)[2] if reasoning and reasoning.close in before else ""
    if not lead and before.startswith(asked):
        lead = before[len(asked) :]
    return ResponseFormat(reasoning, calls, why, lead.strip(), marks(after.partition("\n")[0]), in_fields=in_fields)


@frozen
class _Channels:
    """Reads calls that name their channel."""

    frame: Frame

    def calls(self, text: str, tools: Tools) -> tuple[int, list[Call]]:
        """See `Reader`."""
        return 0, _channels(text)[2]


def _rendered(render: Render, said: Message, tools: Tools = ()) -> str:
    """Return a conversation with a turn. Empty: the template refuses it."""
    try:
        return render((USER, said), tools, False)
    except DataError:
        return ""


def _asked(render: Render) -> str:
    try:
        return render((USER,), (), True)
    except DataError:
        return ""


def _reasoning(render: Render, asked: str, thought: str) -> Reasoning | None:
    """Return how reasoning is written. `thought` is a conversation with reasoning as a field."""
    called = Message("assistant", _ANSWER, CALLS[:1], reasoning=_REASON)
    for whole in (thought, _rendered(render, called, (TOOL,))):
        begin = whole.find(_REASON)
        if begin < 0 or not 0 < begin < max(whole.find(_ANSWER), whole.rfind(NAME)):
            continue
        head, after = whole[:begin].rstrip(), whole[begin + len(_REASON) :].strip()
        if whole != thought:
            asked = render((USER,), (TOOL,), True)
        length = common(asked, head)
        length = head.rfind("<", 0, length) if head.rfind("<", 0, length) > head.rfind(">", 0, length) else length
        after = after.partition(_ANSWER)[0].strip()
        close = first_mark(after) or after
        opened = asked.startswith(head) and close not in asked[len(head) :]
        if close:
            return Reasoning(head[length:].strip() or _tag(head), close, opened)
    inline = _rendered(render, Message("assistant", f"<think>\n{_REASON}\n</think>\n\n{_ANSWER}"))
    opened = asked.rstrip().endswith("<think>")
    dropped = _ANSWER in inline and _REASON not in inline
    return Reasoning("<think>", "</think>", opened) if opened or dropped else None


def _tag(head: str) -> str:
    """Return the tag at the end of a text, or nothing."""
    at = head.rstrip().rfind("<")
    return head[at:].strip() if at >= 0 and ">" in head[at:] and "\n" not in head[at:].strip() else ""


_FORMATS: WeakKeyDictionary[Chat, ResponseFormat] = WeakKeyDictionary()


def response_format(chat: Chat) -> ResponseFormat:
    """Return how the model of a chat tokenizer writes responses, learned once from its template."""
    if chat not in _FORMATS:
        _FORMATS[chat] = learn(lambda talk, tools, asked: chat.with_tools(tools).render(talk, generation_prompt=asked))
    return _FORMATS[chat]


def tool_format(chat: Chat) -> ResponseFormat:
    """Return how the model writes responses. Raises `DataError` if its template shows it no tools."""
    found = response_format(chat)
    if found.why:
        raise DataError(
            f"the model's chat template knows no tools: {found.why}; use a model that was tuned for them or give a "
            "template with model.chat_template, or describe them in a message"
        )
    return found


__all__ = ["NAME", "TOOL", "Reasoning", "ResponseFormat", "learn", "response_format", "tool_format"]
