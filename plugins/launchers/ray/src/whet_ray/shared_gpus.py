"""GPUs that several processes share, e.g. an engine on two GPUs and the two ranks of a trainer there.

    bundle {GPU: 2} ── Holder: Ray assigns both GPUs to this actor
                    ├─ process of generator-0    takes no resources; sees GPUs 0 and 1 of the holder
                    ├─ process of backend-0      ...                 sees GPU 0
                    └─ process of backend-1      ...                 sees GPU 1

Ray would assign each GPU to one actor only. A process may be started again at any time, so none of them can hold the
GPUs for the others.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from attrs import frozen

from whet.runtime.hosts import Host


def assigned_gpus() -> str:
    """Return the GPUs that Ray has assigned to this actor, as in `CUDA_VISIBLE_DEVICES`.

    Ray does not set that variable where `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` is set.
    """
    found = import_module("ray").get_runtime_context().get_accelerator_ids()["GPU"]
    return ",".join(sorted(map(str, found), key=lambda gpu: (len(gpu), gpu)))


class Holder:
    """The actor that holds the GPUs of a bundle."""

    def gpus(self) -> str:
        """Return the GPUs of the bundle, as in `CUDA_VISIBLE_DEVICES`."""
        return assigned_gpus()


@frozen(eq=False)
class SharedGpus:
    """The GPUs of a bundle with several processes."""

    planned: tuple[str, ...]
    """The GPUs by their numbers in the plan, in order."""
    holder: Any
    """The actor. Ray starts it again, perhaps on another node, if its node is lost."""

    def assigned(self) -> Any:
        """Ask the holder. Return the reference to its answer."""
        return self.holder.gpus.remote()

    def visible(self, host: Host, assigned: str) -> str:
        """Return the GPUs that a process sees, from the holder's answer."""
        found: Mapping[str, str] = dict(zip(self.planned, assigned.split(","), strict=True))
        return ",".join(found[gpu] for gpu in host.gpus)


def hold(hosts: Sequence[Host], strategy: Any, name: str, namespace: str) -> SharedGpus:
    """Start the holder for processes that share the GPUs of a bundle. `strategy` places the actor in the bundle."""
    planned = tuple(sorted({gpu for host in hosts for gpu in host.gpus}, key=int))
    ray: Any = import_module("ray")
    holder = (
        ray.remote(Holder)
        .options(
            num_cpus=0,
            num_gpus=len(planned),
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=strategy,
            name=name,
            namespace=namespace,
        )
        .remote()
    )
    return SharedGpus(planned, holder)
