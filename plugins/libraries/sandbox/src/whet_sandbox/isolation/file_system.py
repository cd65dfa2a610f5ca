"""The file system of a sandbox: an empty root in memory, with read-only views of a few folders of the machine.

/usr /bin /lib /lib64 ...      the machine's, read-only; also the folder of the Python that runs programs
/dev/null full random urandom      no zero: mapped as shared, it is memory that no limit counts
/proc                          of the sandbox's own processes, read-only; none where the machine's is masked
/box /tmp /dev/shm             writable, in memory, empty, with one limit of bytes and one of files
everything else                read-only, in memory, nearly empty
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from whet_sandbox.isolation import kernel

BOX: Final = "/box"
"""The folder of a program: its working directory and its HOME."""
WRITABLE: Final = {BOX: "box", "/tmp": "tmp", "/dev/shm": "shm"}
DEVICES: Final = tuple(f"/dev/{name}" for name in ("null", "full", "random", "urandom"))
SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/etc/alternatives")
_TEXTS: Final = {
    "/etc/passwd": "sandbox:x:1000:1000::/box:/bin/sh\n",
    "/etc/group": "sandbox:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
PYTHON: Final = "/python"
"""A virtual environment without packages, so that no package of the machine's Python runs before a program."""
_NEW_ROOT: Final = "/tmp"
_READ_ONLY: Final = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
_DEVICE: Final = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC


def views(folders: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return detached read-only copies of what a sandbox sees of the machine, and the links in its root, by path.

    Called before a root user gives up its rights, so that a Python in a folder of root's own can be shown. Where the
    mounts may not be copied, as for an ordinary user outside of a namespace, this raises `PermissionError`.
    """
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    shown = [path for path in (*SYSTEM, *_SYSTEM_FILES, *folders) if path not in links and os.path.exists(path)]
    trees: dict[str, int] = {}
    try:
        for path in sorted(set(shown)):
            if not any(path.startswith(f"{other}/") for other in trees):
                trees[path] = _view(path, _READ_ONLY)
        for path in DEVICES:
            trees[path] = _view(path, _DEVICE)
    except OSError:
        for tree in trees.values():
            os.close(tree)
        raise
    return trees, links


def _view(path: str, attributes: int) -> int:
    tree = kernel.clone_tree(path)
    kernel.restrict_tree(tree, attributes)
    return tree


def build(
    trees: Mapping[str, int], links: Mapping[str, str], settings: Mapping[str, Any], mount_proc: Callable[[str], None]
) -> None:
    """Make the root of this process's mount namespace, and move into it.

    :param settings: `disk_bytes`, `disk_files`, and the path of `python`. :param mount_proc: mounts a `/proc`.
    """
    new = _NEW_ROOT
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", new, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,nr_inodes=2048,mode=755")
    for folder in ("/dev", "/etc", "/proc", "/mnt", f"{PYTHON}/bin", *WRITABLE):
        os.makedirs(new + folder, exist_ok=True)
    _mount_writable(
        new, settings["disk_bytes"], settings["disk_files"]
    )  # first: a folder that is shown may lie below /tmp
    for path, target in links.items():
        os.symlink(target, new + path)
    for path, tree in trees.items():
        _place(new + path, is_folder=stat.S_ISDIR(os.fstat(tree).st_mode))
        kernel.attach_tree(tree, new + path)
        os.close(tree)
    for path, text in _TEXTS.items():
        with open(new + path, "w") as file:
            file.write(text)
    os.symlink("/proc/self/fd", f"{new}/dev/fd")
    for name in ("python", "python3"):
        os.symlink(settings["python"], f"{new}{PYTHON}/bin/{name}")
    with open(f"{new}{PYTHON}/pyvenv.cfg", "w") as file:
        file.write(f"home = {os.path.dirname(settings['python'])}\ninclude-system-site-packages = false\n")
    mount_proc(f"{new}/proc")
    os.chdir(new)
    kernel.pivot_root_here()
    kernel.restrict_mount("/", _READ_ONLY)


def _place(path: str, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        with open(path, "x"):
            pass


def mount_proc(folder: str) -> None:
    """Mount the `/proc` of this process's namespace, unless the machine's own is masked, as in containers."""
    with suppress(OSError):
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
        kernel.mount("proc", folder, "proc", flags, "subset=pid,hidepid=invisible")


def _mount_writable(new: str, disk_bytes: int, files: int) -> None:
    """Mount one file system in memory, and show a folder of it at each writable path."""
    options = f"size={disk_bytes},nr_inodes={files},mode=700"
    kernel.mount("box", f"{new}/mnt", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    for target, name in WRITABLE.items():
        os.mkdir(f"{new}/mnt/{name}", 0o700)
        tree = kernel.clone_tree(f"{new}/mnt/{name}")
        kernel.restrict_tree(tree, kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
        kernel.attach_tree(tree, new + target)
        os.close(tree)
    kernel.unmount(f"{new}/mnt")
