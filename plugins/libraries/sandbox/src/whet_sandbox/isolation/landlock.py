"""A second wall around files, signals and TCP, by Landlock: it also holds if a mount is wrong.

Kernels offer more of it with each version (ABI); what the kernel does not offer is left out.
"""

import os
import struct
from collections.abc import Sequence
from typing import Final

from whet_sandbox.isolation.kernel import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    system_call,
)

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_BITS_BY_ABI: Final = {1: 13, 2: 14, 3: 15, 4: 15}
_RULE_PATH_BENEATH: Final = 1


def version() -> int:
    """Return the version that the kernel offers. 0: Landlock is off or unknown."""
    try:
        return system_call("landlock", LANDLOCK_CREATE_RULESET, 0, 0, 1)
    except OSError:
        return 0


def apply(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> int:
    """Restrict this process, and all that it starts, to these paths. Returns the version in force; 0: none.

    Everything below `readable` can be read and executed, below `writable` anything can be done, and `devices` can be
    read and written. Needs `no_new_privs`.
    """
    abi = version()
    if not abi:
        return 0
    handled = (1 << _BITS_BY_ABI.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0  # bind and connect
    scoped = 3 if abi >= 6 else 0  # abstract Unix sockets and signals
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = system_call("landlock", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for paths, rights in ((readable, READ), (writable, handled), (devices, READ | _WRITE_FILE)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        system_call("landlock", LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _RIGHTS_OF_FILES
        rule = struct.pack("=Qi", rights, opened)
        system_call("landlock", LANDLOCK_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(opened)
