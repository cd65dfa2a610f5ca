"""The few exceptions that whet raises on purpose.

Each message says what was found, what was wanted, where, and what to change; the command line
prints the message alone, without a traceback.
"""

import functools
import sysconfig
import traceback
from pathlib import Path


class WhetError(Exception):
    """Anything that whet reports to its user in plain words."""


def in_words(error: BaseException) -> str:
    """Say what was raised: the message alone where it is of whet, else the exception's name, message and place."""
    if isinstance(error, WhetError):
        return str(error)
    place = place_of(error)
    return f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")


def place_of(error: BaseException) -> str:
    """Say where an error was raised; where that is in a library, also the last place before it that is not."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_libraries()))]
    places = [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in (*frames[-1:], *own[-1:])]
    return ", called from ".join(dict.fromkeys(places))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is rarely what its user has to change: Python's own, installed packages, whet."""
    paths = sysconfig.get_paths()
    return (str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "purelib", "platlib")))


class ConfigError(WhetError):
    """The configuration, or a file that it names, is wrong. Carries one line per problem."""

    def __init__(self, problems: list[str] | str, remedy: str = "") -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.remedy = remedy
        """One act that mends several of the problems."""
        super().__init__("\n".join(self.problems))


class PluginError(WhetError):
    """A plugin could not be loaded, offers a name twice, or breaks its contract."""


class DataError(WhetError):
    """A data file, a record in it or a chat template cannot be used."""


class CheckpointError(WhetError):
    """A checkpoint or run folder is incomplete, or belongs to another run."""


class EpisodeError(WhetError):
    """An environment broke its contract: it raised, or gave a reward that is no finite number."""


EnvironmentError = EpisodeError
"""The name of before, for one version. It shadows a builtin."""


class InfrastructureError(WhetError):
    """What an episode stands on failed, not the episode: a sandbox, a server, a process. Environments may raise it.

    Such an episode is played again on a budget of its own (`rollout.infrastructure_retries`), and never scored.
    """

    again = True
    """Whether playing it again may help."""


class Undecided(WhetError):  # noqa: N818 - it says what came of an answer
    """What a model wrote could not be decided about within the limits of a grader: time, memory, depth.

    It is the answer's fault, not the grader's. An episode whose environment raises this is finished, and every reward
    of the environment's `reward_weights` is 0, and every other one that its episodes have counts as 0. An environment
    whose worst reward is another one catches it.
    """


class RequestLost(InfrastructureError):  # noqa: N818 - it says what happened to the request
    """A request was with one replica after another when they were lost, and may be what kills them."""

    again = False


class WorkerError(WhetError):
    """A worker failed, died or missed its deadline. Names role, rank, phase and cause."""

    def __init__(
        self, role: str, rank: int | None, phase: str, cause: str, last_words: str = "", details: str = ""
    ) -> None:
        self.role, self.rank, self.phase, self.cause, self.last_words = role, rank, phase, cause, last_words
        self.details = details
        """The worker's traceback, where it raised."""
        who = role if rank is None else f"{role} rank {rank}"
        tail = f"\nIts last words:\n{last_words}" if last_words else ""
        super().__init__(f"{who} failed in {phase}: {cause}{tail}")


class WorkerLost(WorkerError):  # noqa: N818 - it says what happened to the worker
    """A worker's process died or hung: nothing says that the same work would fail again in another process."""


class ClusterLost(WorkerLost):
    """What runs all processes is lost, and they with it: none can be started before all are."""


class ClusterGone(WhetError):  # noqa: N818 - it says what happened
    """What runs processes is there no more."""


class WeightSyncError(WhetError):
    """A weight sync was partial, stale or damaged, and was refused."""


RefitError = WeightSyncError
"""The name of before, for one version."""
