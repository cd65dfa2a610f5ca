"""The configs of the providers of sandboxes."""

from attrs import field, frozen, validators

from whet.config.bounds import PROCESSES, between

_AT_ONCE = between(2, PROCESSES)  # a program that is graded needs one beside its tests
_WARM = between(0, PROCESSES)


@frozen
class NamespacesConfig:
    """Sandboxes from namespaces, Landlock and a filter of system calls. They need no daemon and no root."""

    at_once: int = field(default=16, validator=_AT_ONCE)
    """Most sandboxes at a time. Other programs wait."""
    warm: int = field(default=2, validator=_WARM)
    """Sandboxes that are made before there is a program for them. Each takes about 3 MB."""
    python: str = field(default="", metadata={"path": True})
    """The Python that runs programs. Empty: the one behind the driver's own, without its packages."""
    packages: list[str] = field(factory=list, metadata={"path": True})
    """Folders of packages that programs can import, e.g. the `site-packages` of an environment made for them."""
    readable: list[str] = field(factory=list, metadata={"path": True})
    """Further folders that programs can read."""


@frozen
class DockerConfig:
    """Containers, by the command line of Docker or Podman. For machines that forbid namespaces to users."""

    image: str = field(default="python:3.11-slim", validator=validators.min_len(1))
    """The image. It must be on the machine and have Python 3.11 or newer; it is never pulled."""
    command: str = field(default="docker", validator=validators.min_len(1))
    """The program that starts containers, e.g. `podman`."""
    runtime: str = ""
    """The container runtime, e.g. `runsc` for gVisor. Empty: the default."""
    python: str = field(default="/usr/local/bin/python3", validator=validators.min_len(1))
    """Path of Python in the image."""
    at_once: int = field(default=8, validator=_AT_ONCE)
    """Most containers at a time. Other programs wait."""
    warm: int = field(default=2, validator=_WARM)
    """Containers that are started before there is a program for them."""
    memory_mib: int = field(default=1024, validator=between(64, 1 << 24))
    """Most memory of a container, in MiB, enforced by the container runtime."""
