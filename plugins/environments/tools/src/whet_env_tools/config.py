"""The configs of the environments `calculator` and `tool-use`, and their facts for planning."""

from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen, validators

from whet.component import EnvironmentFacts, Selection
from whet.config.bounds import GROUP, PROCESSES, RECORDS, SECONDS, SEED, above, between
from whet.config.sections import selection
from whet.data.model_info import ModelInfo
from whet.errors import ConfigError, DataError
from whet_data.quoting import template_with
from whet_sandbox.limits import Limits

TOOL_PROMPT = """You can call tools. Here they are, one JSON object in each line:

<tools>
{tools}
</tools>

To call a tool, end your message with its name and arguments as JSON between <tool_call> and </tool_call>:

<tool_call>
{"name": "the name", "arguments": {"the argument": "the value"}}
</tool_call>

You may write several calls, one after another. You then get their results, and can call again or answer."""
MEMORY_MIB = between(64, 1 << 24)
_NAMES: Any = validators.deep_iterable(validators.min_len(1))


@frozen
class CalculatorConfig:
    """Products such as `Compute 47*83.`, and a calculator that the model calls by writing `calc 47*83`."""

    smallest: int = field(default=11, validator=between(0, 999_999))
    """Smallest factor."""
    largest: int = field(default=99, validator=between(0, 999_999))
    """Largest factor."""
    turns: int = field(default=2, validator=between(1, GROUP))
    """Most responses of the model in an episode. The last response is graded, even if it is a call."""
    reply_role: Literal["user", "tool"] = "user"
    """Role of the calculator's messages. `tool` needs a chat template that supports this role."""
    system: str = ""
    """A system message that explains the calculator. Empty: none."""
    train_tasks: int = field(default=1_000_000, validator=between(1, RECORDS))
    """Tasks in the split `train`."""
    test_tasks: int = field(default=256, validator=between(1, RECORDS))
    """Most tasks in the split `test`. They come from the tenth of all products that `train` does not contain."""
    seed: int = field(default=0, validator=between(0, SEED))
    """Seed of the tasks. Another seed gives other tasks."""


@frozen
class SearchConfig:
    """A tool that searches passages of a file by BM25."""

    corpus: str = field(validator=validators.min_len(1), metadata={"path": True})
    """The passages: a file of JSON lines, JSON, CSV or Parquet, or a folder that `datasets` saved. They are held in
    memory."""
    text: str = field(default="text", validator=validators.min_len(1))
    """The field with the text of a passage."""
    title: str = ""
    """The field with its title, which is searched and shown, too. Empty: none."""
    results: int = field(default=3, validator=between(1, GROUP))
    """Passages that a search returns."""
    passage_characters: int = field(default=1000, validator=between(1, RECORDS))
    """Most characters of a passage that the model sees."""
    name: str = field(default="search", validator=validators.min_len(1))
    """The tool's name."""
    description: str = "Search a collection of texts. Returns the passages that fit the query best."
    """What the model reads about it."""


@frozen
class PythonConfig:
    """A tool that runs Python in a sandbox. Its variables and files are kept until the end of the episode."""

    name: str = field(default="python", validator=validators.min_len(1))
    """The tool's name."""
    description: str = (
        "Run Python code. Returns what it prints, and the value of a last expression. Variables are kept."
    )
    """What the model reads about it."""
    sessions: int = field(default=64, validator=between(1, PROCESSES))
    """Most interpreters at a time. Other episodes wait."""
    limits: Limits = field(factory=Limits)
    """Limits of an interpreter; those of time hold for each call."""
    sandbox: Selection = selection("sandboxes", "namespaces")
    """Where code runs. What it needs is checked before a run."""


def _one_way(instance: "McpConfig", attribute: Any, value: str) -> None:
    if bool(value) == bool(instance.command):
        found = "both" if value else "neither"
        raise ValueError(f"{found} of command and url given; wanted one: a program to start, or a server that runs")
    if value and not value.startswith(("http://", "https://")):
        raise ValueError(f"is {value!r:.80}, wanted an address that begins with http:// or https://")


@frozen
class McpConfig:
    """A server of the Model Context Protocol. Needs `pip install 'whet-env-tools[mcp]'`."""

    command: list[str] = field(factory=list, validator=_NAMES)
    """The program of a server that speaks over stdin and stdout, and its arguments. It is your own program: it runs
    with your rights, outside of any sandbox."""
    url: str = field(default="", validator=_one_way)
    """Instead of a program: the address of a server that runs already, e.g. `http://127.0.0.1:8000/mcp`."""
    token_variable: str = ""
    """The environment variable with the bearer token for `url`. Empty: no token is sent."""
    variables: list[str] = field(factory=list, validator=_NAMES)
    """Environment variables that the program gets besides PATH, HOME and a few others, e.g. `[GITHUB_TOKEN]`."""
    folder: str = field(default="", metadata={"path": True})
    """The program's working directory. Empty: that of the run."""
    only: list[str] = field(factory=list, validator=_NAMES)
    """Names of the tools that the model gets. Empty: all of the server's."""
    prefix: str = ""
    """Put before the names of its tools, where servers have tools of one name."""
    each_episode: bool = False
    """Whether each episode has a connection of its own, and with `command` a process of its own: for servers that
    remember what was called. A server that is lost then ends the episode, which is played again."""
    start_seconds: float = field(default=60.0, validator=above(0, SECONDS))
    """Time in which the server must be ready."""
    call_seconds: float = field(default=30.0, validator=above(0, SECONDS))
    """Most time of a call."""
    at_once: int = field(default=16, validator=between(1, PROCESSES))
    """Most calls at a time; with `each_episode`, most episodes at a time. Others wait."""
    memory_mib: int = field(default=4096, validator=MEMORY_MIB)
    """Most memory of each process of the server, and of the client, in MiB."""


@frozen
class ToolUseConfig:
    """Questions from a data set, and tools that the model calls before it answers."""

    dataset: str | dict[str, str] = field(validator=validators.min_len(1), metadata={"path": True})
    """A file, a folder with one file for each split, or a name on the Hugging Face hub; or one file for each split,
    e.g. `{train: a.jsonl, test: b.jsonl}`. A single file is used for every split."""
    subset: str = ""
    """The subset of a hub data set that has several subsets."""
    question: str = "question"
    """The field with the question."""
    answer: str = "answer"
    """The field with the right answer, or a list of right answers."""
    functions: list[str] = field(factory=list, validator=_NAMES)
    """Python functions that are tools, by address: `module:function` or `path/to/file.py:function`. Types and docstring
    tell the model how to call them."""
    search: SearchConfig | None = None
    """Search over a file of passages. Missing: no such tool."""
    python: PythonConfig | None = None
    """Python in a sandbox; `{}` takes all defaults. Missing: no such tool."""
    mcp: dict[str, McpConfig] = field(factory=dict)
    """Servers of the Model Context Protocol, by a name for messages."""
    prompt: str = field(
        default="{question}\n\nPut your final answer within \\boxed{}.",
        validator=template_with(("question",), ("question",)),
    )
    """The prompt. `{question}` is replaced by the question."""
    system: str = ""
    """A system message before the prompt. Empty: none."""
    calls_by: Literal["template", "text"] = "template"
    """How the model learns of the tools and calls them: `template`, as the model's chat template has it; `text`, by
    `tool_prompt` and JSON in `<tool_call>`, for models whose template knows no tools."""
    tool_prompt: str = field(default=TOOL_PROMPT, validator=template_with(("tools",), ("tools",)))
    """With `calls_by: text`: what explains the tools, at the end of the system message. `{tools}` is replaced by their
    descriptions."""
    turns: int = field(default=6, validator=between(1, GROUP))
    """Most responses of the model in an episode. The last one is graded, even if it calls tools."""
    calls: int = field(default=16, validator=between(1, RECORDS))
    """Most calls in an episode. Further ones are refused."""
    parallel: int = field(default=8, validator=between(1, GROUP))
    """Most calls in one response. Further ones are refused. The calls of a response run at the same time."""
    result_characters: int = field(default=4000, validator=between(1, RECORDS))
    """Most characters of a result that the model sees. A longer one loses its middle."""
    reply_role: Literal["user", "tool"] = "user"
    """With `calls_by: text`: role of the messages with results. `tool` needs a chat template that supports this
    role."""
    call_seconds: float = field(default=30.0, validator=above(0, SECONDS))
    """Most time of a call of a function."""
    memory_mib: int = field(default=2048, validator=MEMORY_MIB)
    """Most memory of each process in which functions run, in MiB."""
    processes: int = field(default=2, validator=between(1, PROCESSES))
    """Processes in which functions run, one at a time in each."""
    waiting_calls: int = field(default=64, validator=between(1, PROCESSES))
    """Most calls of async functions at a time. They share one process."""
    max_records: int = field(default=0, validator=between(0, RECORDS))
    """Use only the first records of a split, at most this many. 0: all."""
    max_bad_records: float = field(default=0.0, validator=[validators.ge(0), validators.le(1)])
    """Largest share of records that may be left out because they lack a question or an answer."""


def facts(config: CalculatorConfig | ToolUseConfig, model: ModelInfo) -> EnvironmentFacts:
    """Return the facts for planning: final answers for majority votes, and the splits as far as the config has them.

    Raises `ConfigError` if the model's chat template is to show the tools, and knows none.
    """
    if isinstance(config, CalculatorConfig):
        return EnvironmentFacts(states_answers=True, splits=("train", "test"))
    if config.calls_by == "template" and (Path(model.path) / "tokenizer.json").exists():
        from whet_chat.response import tool_format
        from whet_chat.tokenizer import ChatTokenizer

        try:
            tool_format(ChatTokenizer(model.path, model.chat_template or None))
        except DataError as error:
            raise ConfigError(f"the environment tool-use needs tools: {error}, or set calls_by: text") from error
    splits = tuple(config.dataset) if isinstance(config.dataset, dict) else None
    return EnvironmentFacts(states_answers=True, splits=splits)
