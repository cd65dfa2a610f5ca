"""The filter of system calls of a program: a BPF program that the kernel runs before each call.

wrong architecture (32-bit calls)     the program is killed
numbers above the newest known call   ENOSYS: a later kernel's calls are refused until somebody has looked at them
DENIED                                EPERM
clone3                                ENOSYS, after which the C library uses clone, whose flags can be looked at
clone with a flag of a namespace      EPERM
socket, socketpair                    AF_UNIX alone: network namespaces do not cover AF_VSOCK, AF_ALG and others
prlimit64, sched_set*                 the calling process alone
ioctl                                 no input into terminals
mmap                                  no shared memory without a file: the kernel keeps all of it while a page
                                      is mapped, and no limit counts it
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Final

from whet_sandbox.isolation.kernel import MACHINE, SECCOMP, system_call

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST: Final = 450
_X32: Final = 0x40000000

# name: (number on x86-64, number on aarch64); -1 where there is none
DENIED: Final = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    # large and little used parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "seccomp": (317, 277),
    "personality": (135, 92), "modify_ldt": (154, -1), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75),
    "remap_file_pages": (216, 234), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42), "uselib": (134, -1),
    "ustat": (136, -1), "sysfs": (139, -1), "_sysctl": (156, -1), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "clock_settime": (227, 112), "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "iopl": (172, -1), "ioperm": (173, -1),
    "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "sync": (162, 81), "syncfs": (306, 267),
    # files of others: whoever can read a file can lock it for all others. Locks by fcntl need a file open for writing
    "flock": (73, 32),
    # what all processes of a user, or of the machine, share one limit of
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "io_setup": (206, 0),
    # memory and files that no limit counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "mknod": (133, -1), "mknodat": (259, 33),
    # identities
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setresuid": (117, 147), "setresgid": (119, 149), "setfsuid": (122, 151), "setfsgid": (123, 152),
    "setgroups": (116, 159), "capset": (126, 91),
}  # fmt: skip
_CLONE3: Final = (435, 435)
_CLONE: Final = (56, 220)
_SET_AFFINITY: Final = (203, 122)
_PRLIMIT: Final = (302, 261)
_SETRLIMIT: Final = (160, 164)
_SOCKETS: Final = {"socket": (41, 198), "socketpair": (53, 199)}
_IOCTL: Final = (16, 29)
_FCNTL: Final = (72, 25)
_MMAP: Final = (9, 222)
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_INTO_TERMINALS: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_ON_FILES_OF_OTHERS: Final = (1024, 1026)  # F_SETLEASE, F_NOTIFY
_CLONE_FLAGS: Final = 0x7E028080
"""Flags of new namespaces, and CLONE_PARENT, by which a process would become a child of the supervisor."""
_LIMIT_OF_CORES: Final = 4
_AF_UNIX: Final = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
Instruction = tuple[int, int, int, int]


def supported() -> str:
    """Return why this machine has no filter. Empty: it has one."""
    known = ", ".join(_ARCHITECTURES)
    return "" if MACHINE in _ARCHITECTURES else f"there is no filter of system calls for {MACHINE}, only for {known}"


def program(machine: str = MACHINE) -> bytes:
    """Return the filter for a machine's architecture, as the kernel reads it."""
    column = list(_ARCHITECTURES).index(machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # x32 calls have large numbers, too
        (_AT_LEAST, 0, 1, min(_NEWEST + 1, _X32)), (_RETURN, 0, 0, _ENOSYS),
    ]  # fmt: skip
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    code += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ENOSYS)]
    code += _where(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _CLONE_FLAGS), (_RETURN, 0, 0, _EPERM)])
    for numbers in _SOCKETS.values():
        code += _where(numbers[column], 0, [(_EQUAL, 1, 0, _AF_UNIX), (_RETURN, 0, 0, _EPERM)])
    itself: list[Instruction] = [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM)]
    code += _where(_SET_AFFINITY[column], 0, itself)
    # a limit of 1 keeps a crash from the machine's handler of core dumps, which runs as root; a limit of 0 does not
    code += _where(_PRLIMIT[column], 0, [*itself, (_LOAD, 0, 0, _ARGUMENTS + 8), *_none_of((_LIMIT_OF_CORES,))])
    code += _where(_SETRLIMIT[column], 0, _none_of((_LIMIT_OF_CORES,)))
    code += _where(_IOCTL[column], 1, _none_of(_INTO_TERMINALS))
    code += _where(_FCNTL[column], 1, _none_of(_ON_FILES_OF_OTHERS))
    shared: list[Instruction] = [
        (_ANY_BIT, 0, 2, _MAP_ANONYMOUS), (_ANY_BIT, 0, 1, _MAP_SHARED), (_RETURN, 0, 0, _EPERM)
    ]  # fmt: skip
    code += _where(_MMAP[column], 3, shared)
    code += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *one) for one in code)


def _none_of(values: Sequence[int]) -> list[Instruction]:
    """Return code that refuses a call whose loaded argument is one of some values."""
    code: list[Instruction] = []
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _EPERM)]
    return code


def _where(number: int, argument: int, tests: list[Instruction]) -> list[Instruction]:
    """Return code that tests the low half of an argument of one call, and allows the call if no test returns."""
    inner: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *tests, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(inner), number), *inner]


def apply() -> None:
    """Apply the filter to this process and all that it starts, for ever. Needs `no_new_privs`."""
    code = program()
    held = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    system_call("seccomp", SECCOMP, 1, 0, header)
