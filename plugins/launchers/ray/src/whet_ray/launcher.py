"""What core asks of the launcher `ray`. Ray is imported only where a cluster is made or its head is looked up."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from whet.errors import ConfigError
from whet.interfaces.launcher import Finding
from whet_ray.address import address_to_join, head_of, source_of
from whet_ray.life import connect

if TYPE_CHECKING:
    from whet.config.sections import ClusterSection
    from whet_ray.cluster import RayCluster


class RayLaunching:
    """Obeys `whet.interfaces.launcher.Launching`."""

    def address(self, section: "ClusterSection") -> str:
        """Return the address of the cluster that a run joins, or "" where Ray starts on this machine."""
        return address_to_join(section)

    def examine(self, section: "ClusterSection | None") -> Iterator[Finding]:
        """Return which Ray is installed, and whether the head of the cluster answers that the run joins."""
        try:
            version = metadata.version("ray")
        except metadata.PackageNotFoundError:  # the plugin was installed without its requirements
            yield Finding("fail", "the package ray, which whet-ray needs, is not installed", "pip install ray")
            return
        if section is not None and (address := address_to_join(section)):
            yield _head(address)
        yield Finding("ok", version)

    def cluster(
        self,
        section: "ClusterSection",
        run: str,
        logs: Path,
        share: Sequence[Sequence[str]],
        python: Mapping[str, str],
    ) -> "RayCluster":
        """Return a cluster for groups of roles that share processes. Ray starts in the background."""
        from whet_ray.cluster import RayCluster

        return RayCluster(
            logs, section.deadlines, share, run=run, address=address_to_join(section), placement=section.placement,
            resources=section.resources, python=python,
        )  # fmt: skip


def _head(address: str) -> Finding:
    head = address
    try:
        head = head_of(address)
        connect(head)
    except ConfigError as error:
        return Finding("fail", str(error))
    except OSError as error:
        change = f"`ray start --head` prints the address; start it, or {source_of(address)[1]}"
        return Finding("fail", f"nobody answers at {head}: {error}", change)
    return Finding("ok", f"{head} answers")
