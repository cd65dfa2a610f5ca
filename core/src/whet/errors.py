"""The few exceptions that whet raises on purpose.

Each message tells what was found, what was wanted, where, and what to change. The command line prints only the message,
without a traceback.
"""

import functools
import sysconfig
import traceback
from pathlib import Path


class WhetError(Exception):
    """An error that whet reports to its user in plain words."""


def in_words(error: BaseException) -> str:
    """Return the message of an error of whet, or else the exception's name, message and place."""
    if isinstance(error, WhetError):
        return str(error)
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """Return where an error was raised. If that is in a library, also return the last place before it that is not."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_libraries()))]
    places = [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in (*frames[-1:], *own[-1:])]
    return ", called from ".join(dict.fromkeys(places))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of code that users rarely have to change: Python's own, installed packages, whet."""
    paths = sysconfig.get_paths()
    return (str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "purelib", "platlib")))


class ConfigError(WhetError):
    """The configuration, or a file that it names, is wrong. Has one line per problem."""

    def __init__(self, problems: list[str] | str, remedy: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.remedy = remedy
        """One change that fixes several of the problems."""
        super().__init__("\n".join(self.problems))


class PluginError(WhetError):
    """A plugin could not be loaded, offers a name twice, or breaks its contract."""


class DataError(WhetError):
    """A data file, a record in it or a chat template cannot be used."""


class CheckpointError(WhetError):
    """A checkpoint or run folder is incomplete, or belongs to another run."""


class EpisodeError(WhetError):
    """An environment broke its contract: it raised, or returned a reward that is no finite number."""


EnvironmentError = EpisodeError
"""The name of before, for one version. It shadows a builtin."""


class InfrastructureError(WhetError):
    """The infrastructure failed, not the episode: a sandbox, a server, a process. Environments may raise it.

    Such an episode is played again within a limit of its own (`rollout.infrastructure_retries`), and never scored.
    """

    again = True
    """Whether playing the episode again may help."""


class Undecided(WhetError):  # noqa: N818 - it says what came of an answer
    """A grader could not decide about a response within its limits of time, memory or depth.

    This is the response's fault, not the grader's. An episode whose environment raises it is finished. Every reward in
    the environment's `reward_weights` is 0, and every other reward that the environment's episodes have counts as 0. An
    environment whose worst reward is not 0 should catch it.
    """


class RequestLost(InfrastructureError):  # noqa: N818 - it says what happened to the request
    """A request was running on one lost replica after another, and may be what kills them."""

    again = False


class WorkerError(WhetError):
    """A worker failed, died or missed its deadline. Names role, rank, phase and cause."""

    def __init__(
        self, role: str, rank: int | None, phase: str, cause: str, last_words: str = "", details: str = ""
    ) -> None:
        self.role, self.rank, self.phase, self.cause, self.last_words = role, rank, phase, cause, last_words
        self.details = details
        """The worker's traceback, if it raised."""
        who = role if rank is None else f"{role} rank {rank}"
        tail = f"\nIts last words:\n{last_words}" if last_words else ""
        super().__init__(f"{who} failed in {phase}: {cause}{tail}")


class WorkerLost(WorkerError):  # noqa: N818 - it says what happened to the worker
    """A worker's process died or hung. The same work may succeed in another process."""


class ClusterLost(WorkerLost):
    """The cluster that runs all processes is lost, and the processes with it. None can be started before the cluster
    is.
    """


class ClusterGone(WhetError):  # noqa: N818 - it says what happened
    """The cluster that runs the processes no longer exists."""


class WeightSyncError(WhetError):
    """A transfer of weights was partial, stale or damaged, and was refused."""


RefitError = WeightSyncError
"""The name of before, for one version."""
