"""Calls of the Linux kernel that Python has no functions for. Each raises `OSError` with the call's name."""

import ctypes
import os
import platform
import struct
from typing import Any, Final

MACHINE: Final = platform.machine()
_AARCH64: Final = MACHINE == "aarch64"
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

NEW_NAMESPACES: Final = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
}
"""Flags of `unshare` for each namespace."""

PIVOT_ROOT: Final = 41 if _AARCH64 else 155
MOVE_MOUNT, OPEN_TREE, OPENAT2, MOUNT_SETATTR = 429, 428, 437, 442
SECCOMP: Final = 277 if _AARCH64 else 317
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_CAPSET: Final = 91 if _AARCH64 else 126

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_RDONLY, MS_REC, MS_PRIVATE = 2, 4, 8, 1, 16384, 1 << 18
_MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_AT_EMPTY_PATH, _AT_RECURSIVE, _AT_FDCWD = 0x1000, 0x8000, -100
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4
_RESOLVE_BENEATH, _RESOLVE_NO_SYMLINKS, _RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_XDEV = 8, 4, 2, 1

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_MOST_CAPABILITIES = 64


def system_call(name: str, number: int, *arguments: Any) -> int:
    """Make a system call by its number, and return its result."""
    values = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return _checked(name, _libc.syscall(ctypes.c_long(number), *values))


def prctl(option: int, value: int = 0) -> None:
    """Change an attribute of this process or thread."""
    none = ctypes.c_ulong(0)
    _checked("prctl", _libc.prctl(option, ctypes.c_ulong(value), none, none, none))


def unshare(flags: int) -> None:
    """Move this process into new namespaces. A new process namespace holds only later children."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system."""
    names = [text.encode() for text in (source, target, kind)]
    _checked(f"mount {kind or target}", _libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None))


def unmount(target: str) -> None:
    """Detach a mount now, even if it is in use."""
    _checked(f"umount {target}", _libc.umount2(target.encode(), _MNT_DETACH))


def pivot_root_here() -> None:
    """Make the current folder the root of the mount namespace, and detach the old root."""
    system_call("pivot_root", PIVOT_ROOT, b".", b".")
    unmount(".")
    os.chdir("/")


def clone_tree(path: str) -> int:
    """Return a descriptor of a detached copy of the mounts at and below a path."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return system_call(f"open_tree {path}", OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def attach_tree(tree: int, target: str) -> None:
    """Attach a detached tree of mounts at a path."""
    system_call(
        f"move_mount {target}", MOVE_MOUNT, tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH
    )  # fmt: skip


def restrict_tree(tree: int, attributes: int) -> None:
    """Set attributes of all mounts of a tree."""
    _set_attributes(tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes)


def restrict_mount(path: str, attributes: int) -> None:
    """Set attributes of one mount."""
    _set_attributes(_AT_FDCWD, path.encode(), 0, attributes)


def _set_attributes(folder: int, path: bytes, flags: int, attributes: int) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    system_call("mount_setattr", MOUNT_SETATTR, folder, path, flags, wanted, len(wanted))


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a file in a folder, without following any link or leaving the folder or its file system."""
    resolve = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return system_call("openat2", OPENAT2, folder, os.fsencode(path), how, len(how))


def drop_capabilities() -> None:
    """Drop all capabilities for ever, and the right to gain some by starting a program."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(_MOST_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the kernel knows no more of them
            break
    _checked("prctl", _libc.prctl(PR_CAP_AMBIENT, *(ctypes.c_ulong(n) for n in (_PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))))
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this thread
    system_call("capset", _CAPSET, header, none)


def _checked(name: str, result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)
