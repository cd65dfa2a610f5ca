r"""The environment `tool-use`: questions from a data set, and tools that the model calls before it answers.

    user       Which river flows past the oldest whetstone quarry?
    assistant  <tool_call>{"name": "search", "arguments": {"query": "oldest whetstone quarry"}}</tool_call>
    tool       [1] ...                      the tool's text: part of the sequence, never trained on
    assistant  \boxed{Meuse}

The chat template shows the tools and decides how calls are written; with `calls_by: text` a system message does.
The answer to a wrong call states what is wrong. If a tool fails, it is called again. If it fails again, the model reads
this, and the failure is counted. If a tool is broken, the infrastructure failed: the episode is played again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from whet.data.messages import Conversation, Message, conversation
from whet.data.records import GOLD, Reply, Task
from whet.errors import ContextFull, DataError
from whet.interfaces.environment import Model
from whet.rollout.event_loop import gather_or_cancel
from whet_data.quoting import filled, shown
from whet_data.readers import Row
from whet_data.tasks import DatasetTasks
from whet_env_tools.answers import canonical, final_answer, is_right
from whet_env_tools.config import ToolUseConfig
from whet_env_tools.processes import Outcome
from whet_env_tools.text_calls import ToolCall, described, read_calls, shown_results
from whet_env_tools.toolbox import Playing, Toolbox

MOST_CALLS: Final = 128
"""Calls of one response that get an answer. Further calls are ignored."""


class ToolUse:
    """The environment `tool-use`: rewards `correct`, `calls`, `wrong_calls` and `failed_calls`."""

    def __init__(self, config: ToolUseConfig) -> None:
        self._config = config
        self._toolbox = Toolbox(config)
        tools = [tool.plain for tool in self._toolbox.tools.values()]
        by_template = config.calls_by == "template"
        self._format: ByTemplate | ByText = ByTemplate(tools) if by_template else ByText(config, tools)
        self._tasks = DatasetTasks(config, self._task)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight 1 for `correct`. The counts of calls have weight 0: they are only recorded."""
        return {"correct": 1.0, "calls": 0.0, "wrong_calls": 0.0, "failed_calls": 0.0}

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises `DataError` with file and line."""
        return self._tasks(split)

    async def run(self, task: Task, model: Model) -> Mapping[str, float]:
        """Play one episode: answer calls until a response has none, or no turn is left. Returns the rewards."""
        async with self._toolbox.playing(task, model.episode) as playing:
            counts = {"calls": 0.0, "wrong_calls": 0.0, "failed_calls": 0.0}
            talk = self._format.begun(model)
            reply = await talk.reply(task.prompt)
            for _ in range(self._config.turns - 1):
                calls = self._format.calls(reply)
                if not calls:
                    break
                outcomes = await self._answered(calls, int(counts["calls"]), playing)
                counts["calls"] += len(outcomes)
                counts["wrong_calls"] += sum(outcome.error and not outcome.failed for outcome in outcomes)
                counts["failed_calls"] += sum(outcome.failed for outcome in outcomes)
                results = [shown(outcome.text, self._config.result_characters) for outcome in outcomes]
                try:
                    reply = await talk.reply(self._format.results(calls, results))
                except ContextFull:  # the last response is graded
                    break
        correct = is_right(final_answer(reply.text), task.data["answers"])
        return {"correct": float(correct), **counts}

    def final_answer(self, messages: Conversation) -> str | None:
        """Return the final answer of the last response, in the form in which answers are compared."""
        answer = final_answer(messages[-1].text)
        return (canonical(answer) or None) if answer is not None else None

    def close(self) -> None:
        """End all processes, servers and sandboxes of the tools."""
        self._toolbox.close()

    async def _answered(self, calls: Sequence[ToolCall], before: int, playing: Playing) -> list[Outcome]:
        """Return the outcome of each call of a response, in their order. `before`: calls of earlier responses."""
        config = self._config

        async def answered(number: int, call: ToolCall) -> Outcome:
            if number >= config.parallel:
                return Outcome(f"At most {config.parallel} calls can be in one message.", error=True)
            if before + number >= config.calls:
                return Outcome("No call is left. Answer now.", error=True)
            if call.problem:
                return Outcome(f"This call cannot be read: {call.problem}", error=True)
            return await self._toolbox.call(call.name, call.arguments, playing)

        return await gather_or_cancel([answered(number, call) for number, call in enumerate(calls)])

    def _task(self, row: Row) -> Task:
        config = self._config
        question = row.record.get(config.question)
        if not isinstance(question, str) or not question.strip():
            raise DataError(f"the field {config.question!r} has no question; there are {list(row.record)!r:.120}")
        held = row.record.get(config.answer)
        answers = [str(one) for one in (held if isinstance(held, list) else [held]) if one is not None and str(one)]
        if not answers:
            raise DataError(f"the field {config.answer!r} has no answer; there are {list(row.record)!r:.120}")
        asked = conversation(filled(config.prompt, {"question": question}))
        data: dict[str, Any] = {GOLD: answers[0], "answers": answers, "record": dict(row.record)}
        system = self._format.system(config.system)
        return Task((*([Message("system", system)] if system else []), *asked), data, id=row.where)


class ByTemplate:
    """The model's chat template shows the tools, and decides how calls are written."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = ({"type": "function", "function": tool} for tool in tools)
        self._tools = tuple(json.dumps(function, ensure_ascii=False) for function in functions)

    def system(self, given: str) -> str:
        """Return the system message."""
        return given

    def begun(self, model: Model) -> Model:
        """Return the sequence to be played."""
        return model.with_tools(self._tools)

    def calls(self, reply: Reply) -> list[ToolCall]:
        """Return the calls in a response. A damaged call is part of its text."""
        return [ToolCall(call.name, json.loads(call.arguments), id=call.id) for call in reply.calls[:MOST_CALLS]]

    def results(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[Message]:
        """Return the messages with the results."""
        return [Message("tool", text, answers=call.id) for call, text in zip(calls, texts, strict=True)]


class ByText:
    """A system message explains the tools, and calls are JSON in `<tool_call>`."""

    def __init__(self, config: ToolUseConfig, tools: Sequence[Mapping[str, Any]]) -> None:
        self._explained = filled(config.tool_prompt, {"tools": described(tools)})
        self._role = config.reply_role

    def system(self, given: str) -> str:
        """Return the system message."""
        return f"{given}\n\n{self._explained}".strip()

    def begun(self, model: Model) -> Model:
        """Return the sequence to be played."""
        return model

    def calls(self, reply: Reply) -> list[ToolCall]:
        """Return the calls in a response, damaged ones included."""
        return read_calls(reply.text)[:MOST_CALLS]

    def results(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[Message]:
        """Return the messages with the results."""
        return [Message(self._role, shown_results(texts))]
