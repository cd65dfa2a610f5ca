"""The manifest of a weight sync through files: what was sent, so that a receiver can prove that all of it arrived.

    sender      remove the old manifest -> write the bytes -> write the manifest under its name in one step
    receiver    wait for the manifest of its session -> read -> compare the checksums -> read the manifest again

So a manifest is never beside bytes of another session.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from whet.errors import WeightSyncError
from whet.interfaces.weights import TransferSpec

if TYPE_CHECKING:
    import torch

PAGE = 4096


@frozen
class Entry:
    """One tensor of a transfer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in torch, e.g. `bfloat16`."""
    checksum: int
    file: str
    """Name of the file, within the folder of the transfer."""
    offset: int = 0
    """Bytes from the beginning of the file, for files that have no index of their own."""


@frozen
class Manifest:
    """What one sender sent in one session."""

    session: str
    version: int
    sender: int
    entries: tuple[Entry, ...]
    failed: str = ""
    """Why the sender gave up, so that receivers need not wait for their deadline. Empty: it did not."""


def checksum(tensor: "torch.Tensor") -> int:
    """Return a checksum of a contiguous tensor: the crc32 of the 64-bit sums of its pages of 4 KiB.

    It detects torn and stale pages and flipped bits at the speed of memory, which crc32 alone does not reach.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // PAGE * PAGE
    if data.storage_offset() % 8:
        data = data.clone()
    pages = data[:whole].view(torch.int64).view(-1, PAGE // 8).sum(1)
    return zlib.crc32(data[whole:].cpu().numpy().data, zlib.crc32(pages.cpu().numpy().data))


def byte_count(entry: Entry) -> int:
    """Return the number of bytes of a tensor."""
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype.itemsize * torch.Size(entry.shape).numel()


def manifest_path(link: TransferSpec, sender: int) -> Path:
    """Return the path of a sender's manifest."""
    return Path(link.address) / f"manifest-{sender}.json"


def withdraw(link: TransferSpec, sender: int) -> None:
    """Create the folder if needed and remove the sender's manifest of an earlier session."""
    path = manifest_path(link, sender)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


def publish(link: TransferSpec, sender: int, entries: Iterable[Entry], failed: str = "") -> None:
    """Write the manifest in one step: it exists completely or not at all."""
    path = manifest_path(link, sender)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(Manifest(link.session, link.version, sender, tuple(entries), failed))))
    os.replace(draft, path)


def read(link: TransferSpec, sender: int) -> Manifest | None:
    """Return a sender's manifest. None: there is none. Raises `WeightSyncError` if the file is no manifest."""
    path = manifest_path(link, sender)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(Entry(**{**e, "shape": tuple(e["shape"])}) for e in document.pop("entries"))
        if outside := next((entry.file for entry in entries if "/" in entry.file or entry.file[:1] in ("", ".")), None):
            raise ValueError(f"it names the file {outside!r:.120}, wanted one beside it")
        return Manifest(**document, entries=entries)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"{path} is no manifest of a weight sync: {error}") from error


def await_manifests(link: TransferSpec) -> list[Manifest]:
    """Wait until every sender of the link has published, and return the manifests in order of sender.

    Raises `WeightSyncError` when the deadline passes, a sender gave up, or a version or a name contradicts the link.
    """
    deadline, pause = time.monotonic() + link.timeout_seconds, 0.0005
    manifests: dict[int, Manifest] = {}
    while True:
        for sender in range(link.senders):
            found = manifests.get(sender) or read(link, sender)
            if found and found.session == link.session:
                manifests[sender] = found
        if len(manifests) == link.senders:
            break
        if time.monotonic() > deadline:
            raise WeightSyncError(_overdue(link, [s for s in range(link.senders) if s not in manifests]))
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    ordered = [manifests[sender] for sender in range(link.senders)]
    check(link, ordered)
    return ordered


def still_current(link: TransferSpec, manifests: Iterable[Manifest]) -> None:
    """Raise `WeightSyncError` if a sender began another session while this one was read."""
    for manifest in manifests:
        now = read(link, manifest.sender)
        if now is None or now.session != link.session:
            raise WeightSyncError(
                f"{title(link)}: sender {manifest.sender} began another session while this one was read"
            )


def damaged(link: TransferSpec, entry: Entry, found: str) -> WeightSyncError:
    """Return the error for bytes that differ from the manifest."""
    where = Path(link.address) / entry.file
    return WeightSyncError(f"{title(link)}: {entry.name} in {where} is damaged: {found}")


def check(link: TransferSpec, manifests: list[Manifest]) -> None:
    """Raise `WeightSyncError` if a sender gave up, or a version or a name contradicts the link."""
    owner: dict[str, int] = {}
    for manifest in manifests:
        if manifest.failed:
            raise WeightSyncError(f"{title(link)}: sender {manifest.sender} gave up: {manifest.failed}")
        if manifest.version != link.version:
            raise WeightSyncError(
                f"{title(link)}: sender {manifest.sender} sent version {manifest.version}, wanted {link.version}"
            )
        for entry in manifest.entries:
            first = owner.setdefault(entry.name, manifest.sender)
            if first != manifest.sender:
                raise WeightSyncError(f"{title(link)}: {entry.name} came from senders {first} and {manifest.sender}")


def _overdue(link: TransferSpec, missing: list[int]) -> str:
    lines = []
    for sender in missing:
        found = read(link, sender)
        what = f"that of session {found.session}, version {found.version}" if found else "none"
        lines.append(f"sender {sender}: {what}")
    return (
        f"{title(link)}: no complete manifest of {len(missing)} of {link.senders} senders in {link.address} after "
        f"{link.timeout_seconds:g} s; found of {'; '.join(lines)}"
    )


def title(link: TransferSpec) -> str:
    """Return the name of a transfer in errors."""
    return f"weight sync {link.session} of version {link.version}"


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a dtype without the module."""
    return str(dtype).removeprefix("torch.")
