"""The cluster that a config asks for; launchers are imported only where they are used."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whet.runtime.interpreters import located
from whet.runtime.ray_address import address_to_join

if TYPE_CHECKING:
    from whet.config.sections import Config
    from whet.runtime.launcher import Cluster


def make_cluster(config: "Config", groups: Iterable[Sequence[str]], logs: Path) -> "Cluster":
    """Return a cluster for groups of roles that share processes; what takes time begins in the background."""
    section, share = config.cluster, [list(group) for group in groups if group]
    python = {role: str(located(named)) for role, named in section.python.items()}
    if section.launcher == "ray":
        from whet.runtime.ray import RayCluster

        return RayCluster(
            logs, section.deadlines, share, run=Path(config.run.folder).name, address=address_to_join(section),
            placement=section.placement, resources=section.resources, python=python,
        )  # fmt: skip
    from whet.runtime.local import LocalCluster

    return LocalCluster(logs, section.deadlines, share, python=python)
