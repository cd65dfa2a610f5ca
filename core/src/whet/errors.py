"""The exceptions that whet raises on purpose.

Each message contains what was found, what was expected, where, and what to change. The command line prints only the
message, without a traceback.
"""

import functools
import sysconfig
import traceback
from pathlib import Path


class WhetError(Exception):
    """An error that whet reports to its user in plain words."""


def in_words(error: BaseException) -> str:
    """Return the message of a `WhetError`. For any other exception, return its name, message and place."""
    if isinstance(error, WhetError):
        return str(error)
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def printable(text: str) -> str:
    """Return text with escapes in place of characters that could control the terminal. Errors may quote a model."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def place_of(error: BaseException) -> str:
    """Return the place where an error was raised.

    If the place is in a library, also return the last place before it that is outside of libraries.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = outside_libraries(frames)
    places = [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in (*frames[-1:], *own[-1:])]
    return ", called from ".join(dict.fromkeys(places))


def outside_libraries(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that are neither Python's own code nor installed packages nor whet's core."""
    return [frame for frame in frames if not frame.filename.startswith(("<", *_libraries()))]


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of code that users rarely have to change: Python itself, installed packages, whet."""
    paths = sysconfig.get_paths()
    return (str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "purelib", "platlib")))


class ConfigError(WhetError):
    """The config, or a file that the config names, is wrong. The message has one line for each problem."""

    def __init__(self, problems: list[str] | str, remedy: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.remedy = remedy
        """One change that fixes several of the problems."""
        super().__init__("\n".join(self.problems))


class PluginError(WhetError):
    """A plugin could not be loaded, offers a name twice, or breaks its contract."""


class DataError(WhetError):
    """A data file, a record in it or a chat template cannot be used."""


class RewrittenHistory(DataError):  # noqa: N818 - it says what the template did
    """A chat template renders earlier messages differently when a message is appended."""


class CheckpointError(WhetError):
    """A checkpoint or run folder is incomplete, or belongs to another run."""


class EpisodeError(WhetError):
    """An environment broke its contract: it raised an exception, or returned a reward that is not a finite number."""


class InfrastructureError(WhetError):
    """The infrastructure failed, not the episode: a sandbox, a server, a process. Environments may raise this error.

    The episode is never scored. It is played again, within a separate limit: `rollout.infrastructure_retries`.
    """

    again = True
    """Whether playing the episode again may help."""


class Undecided(WhetError):  # noqa: N818 - it says what came of an answer
    """A grader could not decide about a response within its limits of time, memory or depth.

    The cause is the response, not the grader. If the environment raises this exception, the episode is finished. Then
    every reward in the environment's `reward_weights` is 0. Every other reward that the environment's episodes have
    counts as 0. If the worst reward of an environment is not 0, the environment should catch this exception.
    """


class ContextFull(WhetError):  # noqa: N818 - it says what came of a request
    """The context has no room for another response of the model. Nothing was appended.

    If the environment does not catch this exception, the episode is finished. It keeps the rewards that the environment
    has recorded. Every other reward in the environment's `reward_weights` is 0.
    """

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"a prompt of {length} tokens leaves no room for a response in {limit} (rollout.max_context)")
        self.length = length
        """Length of the prompt, in tokens."""


class RequestLost(InfrastructureError):  # noqa: N818 - it says what happened to the request
    """Several replicas were lost, one after another, while they ran the same request. The request may be the cause."""

    again = False


class WorkerError(WhetError):
    """A worker failed, died or missed its deadline. The message names the role, rank, phase and cause."""

    def __init__(
        self, role: str, rank: int | None, phase: str, cause: str, last_words: str = "", details: str = ""
    ) -> None:
        self.role, self.rank, self.phase, self.cause, self.last_words = role, rank, phase, cause, last_words
        self.details = details
        """The worker's traceback, if the worker raised an exception."""
        who = role if rank is None else f"{role} rank {rank}"
        tail = f"\nIts last words:\n{last_words}" if last_words else ""
        super().__init__(f"{who} failed in {phase}: {cause}{tail}")


class WorkerLost(WorkerError):  # noqa: N818 - it says what happened to the worker
    """A worker's process died or hung. The same work may succeed in another process."""


class ClusterLost(WorkerLost):
    """The cluster that runs all processes is lost, and all its processes are lost too.

    The cluster must be started again before any process can be started.
    """


class ClusterGone(WhetError):  # noqa: N818 - it says what happened
    """The cluster that runs the processes no longer exists."""


class WeightSyncError(WhetError):
    """A transfer of weights was refused, because it was incomplete, stale or damaged."""
