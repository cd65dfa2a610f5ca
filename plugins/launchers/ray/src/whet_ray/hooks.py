"""What this plugin finds in a config before anything starts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whet import hookimpl
from whet.component import Problem
from whet_ray.address import address_problem

if TYPE_CHECKING:
    from whet.config.sections import Config


@hookimpl
def whet_check_config(config: "Config") -> Iterable[Problem]:
    """Return what is wrong with the address of the cluster that the run would join."""
    cluster = config.cluster
    if cluster.launcher == "ray" and cluster.workers != "inline" and (fault := address_problem(cluster)):
        yield Problem("cluster.address", fault)
