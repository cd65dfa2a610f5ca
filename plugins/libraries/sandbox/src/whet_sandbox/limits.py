"""The limits of a program in a sandbox. The section `limits` of an environment that runs programs."""

from typing import Any

from attrs import field, frozen

from whet.config.bounds import PROCESSES, SECONDS, above, between

_MIB = 1 << 20


@frozen
class Limits:
    """Limits of each program that runs in a sandbox."""

    cpu_seconds: float = field(default=5.0, validator=above(0, SECONDS))
    """Most processor time of a program and all that it starts. It does not depend on how busy the machine is."""
    wall_seconds: float = field(default=30.0, validator=above(0, SECONDS))
    """Most time that a program runs, or takes for one answer. Keep it several times as long as `cpu_seconds`: on a busy
    machine a program gets little processor time."""
    memory_mib: int = field(default=512, validator=between(64, 1 << 24))
    """Most memory of a program and all that it starts, in MiB; also the address space of each process."""
    disk_mib: int = field(default=16, validator=between(1, 1 << 20))
    """Most bytes of files that a program writes, in MiB. They lie in memory."""
    disk_files: int = field(default=1024, validator=between(64, 1 << 24))
    """Most files and folders that a program makes."""
    processes: int = field(default=32, validator=between(1, PROCESSES))
    """Most processes and threads at a time."""
    open_files: int = field(default=64, validator=between(8, 65_536))
    """Most open files of each process."""
    output_kib: int = field(default=256, validator=between(1, 1 << 16))
    """Most output, stdout and stderr together, in KiB. A program that writes more is stopped."""
    answer_kib: int = field(default=1024, validator=between(1, 1 << 16))
    """Longest answer of a program that answers questions, in KiB."""
    files_kib: int = field(default=1024, validator=between(0, 1 << 16))
    """Most bytes of the files that are fetched from a sandbox, together, in KiB."""

    def as_order(self) -> dict[str, Any]:
        """Return the limits as the supervisor reads them."""
        return {
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "memory_bytes": self.memory_mib * _MIB,
            "disk_bytes": self.disk_mib * _MIB,
            "disk_files": self.disk_files,
            "processes": self.processes,
            "open_files": self.open_files,
            "output_bytes": self.output_kib << 10,
            "answer_bytes": self.answer_kib << 10,
            "file_bytes": self.files_kib << 10,
        }
