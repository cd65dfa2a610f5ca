"""How weights are sent: what both ends can, and what the placement allows."""

from collections.abc import Sequence

from whet.errors import ConfigError


def choose_transport(
    sender: Sequence[str],
    receiver: Sequence[str],
    *,
    same_process: bool,
    same_host: bool,
    same_gpu: bool = False,
    own_gpus: bool = False,
    together: bool = False,
    wanted: str = "",
) -> str:
    """Choose the way to hand weights over: the sender's best that the receiver knows and the placement allows.

    `sender` and `receiver` are the transports of their facts, best first. `same_gpu`: they take turns on their GPUs;
    `own_gpus`: each has its own; `together`: they share processes. `wanted` is what the config insists on. Raises
    `ConfigError` saying why none fits.
    """
    reachable = {
        "shared": same_process,
        "cuda-ipc": same_gpu,
        "broadcast": own_gpus or (wanted == "broadcast" and not together),
        "shared-memory": same_host,
        "tcp": True,
        "disk": True,
    }
    for transport in [wanted] if wanted else sender:
        if transport in sender and transport in receiver and reachable.get(transport, False):
            return transport
    place = "in one process" if same_process else "on one machine" if same_host else "on different machines"
    what = f"{wanted} is no way to hand weights over" if wanted else "no way to hand weights over"
    raise ConfigError(
        f"{what}: the backend offers {_list(sender)}, the generator takes {_list(receiver)}, and they are {place}; "
        "`shared` needs one process (cluster.colocate), `cuda-ipc` shared GPUs, `broadcast` processes of their own, "
        "`shared-memory` one machine"
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
