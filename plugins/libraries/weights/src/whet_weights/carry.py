"""Carries weights in shared memory to the other nodes of the receivers. The driver calls it after the senders are done.

    sender's node       manifest-0.json         names the sender's memory and its node
    receiver's node     manifest-0@NODE.json    names the copy on that node, or why there is none

A receiver reads the manifest that holds for its own node, see `manifest.read_here`.
"""

import attrs

from whet.interfaces.weights import CopyMemory, TransferSpec
from whet_weights.manifest import carried_nodes, manifest_path, read, write


def carry(spec: TransferSpec, copy_memory: CopyMemory) -> None:
    """Carry what each sender wrote to the nodes that need it, and publish a manifest for each node."""
    for sender in range(spec.senders if spec.transport == "shared-memory" else 0):
        sent = read(spec, sender)
        if sent is None or sent.session != spec.session or sent.failed or not sent.node or not sent.entries:
            continue
        memory = sent.entries[0].file
        for node, copy in copy_memory(
            memory, sent.size, sent.node, _served(spec, sender), spec.timeout_seconds
        ).items():
            entries = tuple(attrs.evolve(entry, file=copy.name) for entry in sent.entries) if copy.name else ()
            failed = copy.failure and f"its weights could not be carried to node {node}: {copy.failure}"
            manifest = attrs.evolve(sent, node=node, entries=entries, failed=failed)
            write(manifest, manifest_path(spec, sender, node))


def _served(spec: TransferSpec, sender: int) -> list[str]:
    """Return the nodes that have a copy of this session."""
    found = (read(spec, sender, node) for node in carried_nodes(spec, sender))
    return [one.node for one in found if one and one.session == spec.session and not one.failed]
