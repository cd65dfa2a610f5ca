"""What a module of tools may import: the episode that a function is called in.

    def look(place: str, episode: Episode) -> str:
        "Look around."
        episode.state["seen"] = [*episode.state.get("seen", []), place]
        return episode.data["map"][place]

A parameter with the annotation `Episode` gets the episode. The model does not see it.
"""

from collections.abc import Mapping
from typing import Any

from attrs import define, field


@define
class Episode:
    """The episode of a call."""

    data: Mapping[str, Any] = field(factory=dict)
    """Data of the task: the whole record of the data set. The model does not see it."""
    seed: int = 0
    """For the function's randomness. It differs for each sample of a task."""
    split: str = ""
    """The split of the task."""
    state: dict[str, Any] = field(factory=dict)
    """What functions keep from call to call of this episode: JSON values. Each call may run in another process."""
