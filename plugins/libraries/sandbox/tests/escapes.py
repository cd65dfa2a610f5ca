# ruff: noqa: E501 - an attempt is easier to read on a line of its own
"""Programs that try to get out of a sandbox, or to exhaust the machine: what each tries, what stops it, and how that shows.

A program that gets through prints `ESCAPED`. What stops it is a regular expression on the way it ended and its output, so
that an escape which fails for another reason, such as a slip of its own, fails the test.
"""

from typing import Final

from attrs import frozen


@frozen
class Escape:
    """One attempt."""

    name: str
    wall: str
    """What stops it, in words."""
    shows: str
    """A regular expression on `WHY EXIT`, stdout and stderr."""
    code: str


PRELUDE: Final = """
import ctypes, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def prevented(*functions):
    for function in functions:
        try:
            function()
        except OSError as error:
            print("stopped:", error)
        else:
            print("ESCAPED", function)
"""
FORBIDDEN: Final = "Operation not permitted"
ABSENT: Final = "No such file or directory"
READ_ONLY: Final = "Read-only file system"
FILTER, ROOT, READ, LIMIT = "filter of system calls", "private root", "read-only mount", "limit"

_FILES = [
    ("a file of the driver", ROOT, ABSENT, "print('ESCAPED', open(SECRET_FILE).read())"),
    ("/etc/shadow", ROOT, ABSENT, "print('ESCAPED', open('/etc/shadow').read())"),
    (
        "the real /etc/passwd",
        ROOT,
        r"^\['sandbox'\]$",
        """
names = [line.split(':')[0] for line in open('/etc/passwd')]
print(names if names == ['sandbox'] else 'ESCAPED')""",
    ),
    (
        "home folders",
        ROOT,
        r"nothing private",
        """
private = []
for top in ('/root', '/home'):
    for at, folders, names in os.walk(top):
        # What is installed beside Python is no secret, and takes all the processor time of the limit to list.
        folders[:] = [name for name in folders if os.path.join(at, name) != sys.base_prefix]
        private += [os.path.join(at, name) for name in names]
print('ESCAPED' if private else 'nothing private', private[:3])""",
    ),
    ("the folder of the driver", ROOT, ABSENT, "print('ESCAPED', os.listdir(SECRET_FOLDER))"),
    ("the sandbox's own source", ROOT, ABSENT, "print('ESCAPED', os.listdir(SOURCE))"),
    ("/sys", ROOT, ABSENT, "print('ESCAPED', os.listdir('/sys'))"),
    ("/run and /var", ROOT, ABSENT, "print('ESCAPED', os.listdir('/run') + os.listdir('/var'))"),
    (
        "the old root",
        ROOT,
        r"^\[\]$",
        (
            "os.chdir('/mnt'); os.chdir('../../..'); print(sorted(set(os.listdir('.')) - {'bin', "
            "'box', 'dev', 'etc', 'lib', 'lib32', 'lib64', 'libx32', 'mnt', 'proc', 'python', 'root', 'sbin', 'tmp', 'usr', 'opt', 'home'}))"
        ),
    ),
    ("write to /usr", READ, READ_ONLY, "open('/usr/x', 'w'); print('ESCAPED')"),
    ("change Python itself", READ, f"{READ_ONLY}|Permission denied", "open(os.__file__, 'a'); print('ESCAPED')"),
    ("change a mode in /usr", READ, READ_ONLY, "os.chmod('/usr/bin/env', 0o777); print('ESCAPED')"),
    ("delete in /usr", READ, READ_ONLY, "os.unlink('/usr/bin/env'); print('ESCAPED')"),
    ("write to the root folder", READ, f"{READ_ONLY}", "os.mkdir('/x'); print('ESCAPED')"),
    ("write to /etc", READ, f"{READ_ONLY}|Permission denied", "open('/etc/passwd', 'a'); print('ESCAPED')"),
    ("write to /dev", READ, READ_ONLY, "os.mkdir('/dev/x'); print('ESCAPED')"),
    ("remount what is read-only", FILTER, FORBIDDEN, "prevented(lambda: call(165, b'', b'/usr', b'', 4128, None))"),
    (
        "clear the flag of a mount",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(442, -100, b'/usr', 0, struct.pack('QQQQ', 0, 1, 0, 0), 32))",
    ),
    ("unmount", FILTER, FORBIDDEN, "prevented(lambda: call(166, b'/usr', 2))"),
    (
        "new mounts",
        FILTER,
        FORBIDDEN,
        (
            "prevented(lambda: call(428, -100, b'/', 1), lambda: call(430, b'tmpfs', 0), "
            "lambda: call(429, 0, b'', -100, b'/tmp', 4))"
        ),
    ),
    ("chroot out of the root", FILTER, FORBIDDEN, "prevented(lambda: os.chroot('/tmp'))"),
    ("pivot_root", FILTER, FORBIDDEN, "prevented(lambda: call(155, b'/tmp', b'/tmp'))"),
    (
        "a device of one's own",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)))",
    ),
    (
        "memory and disk devices",
        ROOT,
        ABSENT,
        """
prevented(*[lambda path=path: open(path, 'rb') for path in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/dev/kvm')])""",
    ),
    ("terminals", ROOT, f"{ABSENT}|No such device", "prevented(lambda: open('/dev/tty'), lambda: open('/dev/ptmx'))"),
    ("files by handle", FILTER, FORBIDDEN, "prevented(lambda: call(304, 0, b'x' * 16, 0))"),
    (
        "links in /proc/1",
        "first process that cannot be looked at",
        ABSENT,
        "prevented(lambda: os.listdir('/proc/1/root'), lambda: open('/proc/1/environ').read(), lambda: os.listdir('/proc/1/fd'))",
    ),
    (
        "settings of the kernel",
        "partial /proc",
        ABSENT,
        (
            "prevented(lambda: open('/proc/sys/kernel/core_pattern', 'w'), "
            "lambda: open('/proc/sysrq-trigger', 'w'), lambda: open('/proc/kcore', 'rb'), lambda: open('/proc/kallsyms'))"
        ),
    ),
    (
        "rights by a program of root's",
        "no new privileges",
        r"^1000 1000$",
        """
import shutil
shutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)
subprocess.run(['/usr/bin/su', '-c', 'echo ESCAPED'], stdin=subprocess.DEVNULL, capture_output=True)
print(subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout.strip(), os.geteuid())""",
    ),
    (
        "another folder's file descriptor",
        "closed descriptors",
        r"^\[0, 1, 2\]$",
        """
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
print([number for number in range(4096) if is_open(number)])""",
    ),
    (
        "write to descriptors of the supervisor",
        "closed descriptors",
        "Bad file descriptor",
        """
for number in range(3, 1024):
    try:
        os.write(number, b'{"is": "result"}')
    except OSError as error:
        last = error
    else:
        print('ESCAPED')
print(last)""",
    ),
]
_ENVIRONMENT = [
    (
        "secrets in the environment",
        "built environment",
        "^clean$",
        """
text = open('/proc/self/environ').read() + repr(dict(os.environ))
print('ESCAPED' if 'WHET' in text or 'SECRET' in text or 'TOKEN' in text else 'clean')""",
    ),
    (
        "command lines of others",
        "own process namespace",
        r"^\[\]$",
        """
others = [name for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]
print(others if not others else 'ESCAPED')""",
    ),
    ("the host's name", "own namespace of host names", "^sandbox$", "print(socket.gethostname())"),
    (
        "the driver's memory",
        "own process namespace",
        r"^\[\]$",
        "print([pid for pid in range(2, 40000) if pid != os.getpid() and os.path.exists(f'/proc/{pid}/mem')])",
    ),
]
_NETWORK = [
    ("TCP to the machine", FILTER, FORBIDDEN, "socket.create_connection(('127.0.0.1', PORT)); print('ESCAPED')"),
    ("IPv6", FILTER, FORBIDDEN, "prevented(lambda: socket.socket(socket.AF_INET6))"),
    ("UDP", FILTER, FORBIDDEN, "prevented(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))"),
    (
        "name lookup",
        FILTER,
        "gaierror|not permitted|Name or service|resolution",
        "socket.getaddrinfo('example.org', 80); print('ESCAPED')",
    ),
    ("raw packets", FILTER, FORBIDDEN, "prevented(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))"),
    ("netlink", FILTER, FORBIDDEN, "prevented(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
    ("the host of a virtual machine", FILTER, FORBIDDEN, "prevented(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    (
        "sockets of the kernel's ciphers",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: socket.socket(38, socket.SOCK_SEQPACKET))",
    ),
    (
        "every other kind of socket",
        FILTER,
        "^none$",
        """
made = []
for family in range(64):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind).close()
        except OSError:
            continue
        made.append(family)
print('none' if set(made) <= {1} else f'ESCAPED {made}')""",
    ),
    (
        "a Unix socket of the machine",
        ROOT,
        ABSENT,
        "prevented(lambda: socket.socket(socket.AF_UNIX).connect(UNIX_PATH))",
    ),
    (
        "an abstract socket of the machine",
        "own network namespace",
        f"refused|{FORBIDDEN}",
        "prevented(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT))",
    ),
    ("sockets by io_uring", FILTER, FORBIDDEN, "prevented(lambda: call(425, 8, ctypes.create_string_buffer(256)))"),
    (
        "sockets by 32-bit calls",
        FILTER,
        f"signal -{31}",
        """
code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
code.write(b'\\xb8\\x67\\x01\\x00\\x00\\xbb\\x02\\x00\\x00\\x00\\xb9\\x01\\x00\\x00\\x00\\x31\\xd2\\xcd\\x80\\xc3')  # int 0x80: socket
print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())""",
    ),
    ("sockets by x32 calls", FILTER, "not implemented", "prevented(lambda: call(0x40000000 | 41, 2, 1, 0))"),
]
_PROCESSES = [
    (
        "kill process 1",
        "process 1 of a namespace",
        "^exit 0\nalive",
        """
for number in range(1, 65):
    try:
        os.kill(1, number)
    except OSError:
        pass
print('alive')""",
    ),
    (
        "kill everything",
        "own process namespace",
        "^exit 0\nalive",
        """
try:
    os.kill(-1, 9)
except OSError:
    pass
print('alive')""",
    ),
    ("kill the parent", "own process namespace", "^exit 0\nparent 0", "print('parent', os.getppid())"),
    ("stop itself", LIMIT, "^wall", "os.kill(os.getpid(), signal.SIGSTOP); print('ESCAPED')"),
    (
        "fork without end",
        LIMIT,
        "Resource temporarily unavailable|^(cpu|wall|memory)",
        """
while True:
    if os.fork() == 0:
        time.sleep(100)""",
    ),
    (
        "fork from every child",
        LIMIT,
        "^(cpu|wall|exit|signal)",
        """
while True:
    try:
        os.fork()
    except OSError:
        pass""",
    ),
    (
        "threads without end",
        LIMIT,
        "can't start new thread|MemoryError",
        """
while True:
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()""",
    ),
    (
        "a process that stays",
        "end of the process namespace",
        "^exit 0\nstarted",
        """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        time.sleep(1000)
    os._exit(0)
os.wait()
print('started')""",
    ),
    (
        "a child that holds the output",
        "end of the process namespace",
        "^exit 0\ndone",
        "subprocess.Popen(['/bin/sleep', '1000'], start_new_session=True); print('done')",
    ),
    ("attach to process 1", FILTER, FORBIDDEN, "prevented(lambda: call(101, 16, 1, 0, 0))"),
    ("be traced by the parent", FILTER, FORBIDDEN, "prevented(lambda: call(101, 0, 0, 0, 0))"),
    (
        "read another's memory",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(310, 1, None, 0, None, 0, 0), lambda: call(311, 1, None, 0, None, 0, 0))",
    ),
    ("take another's descriptor", FILTER, FORBIDDEN, "prevented(lambda: call(438, os.pidfd_open(os.getpid()), 0, 0))"),
    (
        "new namespaces",
        FILTER,
        FORBIDDEN,
        (
            "prevented(*[lambda flag=flag: call(272, flag) for flag in "
            "(0x10000000, 0x20000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x80)])"
        ),
    ),
    ("new namespaces by clone", FILTER, FORBIDDEN, "prevented(lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0))"),
    (
        "new namespaces by clone3",
        FILTER,
        "not implemented",
        "prevented(lambda: call(435, struct.pack('11Q', 0x10000000, *([0] * 10)), 88))",
    ),
    (
        "another's namespaces",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(308, os.open('/proc/self/ns/net', os.O_RDONLY), 0))",
    ),
    (
        "be root",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: os.setuid(0), lambda: os.setresgid(0, 0, 0), lambda: os.setgroups([0]))",
    ),
    (
        "capabilities",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(126, struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24))",
    ),
    (
        "hold capabilities",
        "dropped capabilities",
        "^none$",
        """
lines = [line.split() for line in open('/proc/self/status') if line.startswith('Cap')]
print('none' if len(lines) == 5 and all(int(value, 16) == 0 for _, value in lines) else f'ESCAPED {lines}')""",
    ),
    ("limits of process 1", FILTER, FORBIDDEN, "prevented(lambda: call(302, 1, 0, struct.pack('QQ', 1, 1), 0))"),
    (
        "higher limits for itself",
        LIMIT,
        "not allowed to raise|exceed",
        """
resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000)); print('ESCAPED')""",
    ),
    (
        "slow others down",
        FILTER,
        FORBIDDEN,
        (
            "prevented(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), "
            "lambda: os.sched_setaffinity(1, {0}), lambda: call(144, 1, 5, struct.pack('i', 0)), lambda: call(251, 1, 1, 0))"
        ),
    ),
    (
        "go first",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)), lambda: os.nice(-10))",
    ),
    (
        "little used parts of the kernel",
        FILTER,
        FORBIDDEN,
        (
            "prevented(lambda: call(321, 0, None, 0), "
            "lambda: call(298, None, 0, -1, -1, 0), lambda: call(323, 0), lambda: call(250, 0, -3, 0), "
            "lambda: call(248, b'user', b'x', b'x', 1, -3), lambda: call(135, 0x40000), lambda: call(300, 0, 0))"
        ),
    ),
    (
        "calls of later kernels",
        FILTER,
        "not implemented",
        "prevented(*[lambda n=n: call(n) for n in (451, 463, 470, 500, 1000)])",
    ),
    ("a filter of its own", FILTER, FORBIDDEN, "prevented(lambda: call(317, 1, 8, None))"),
    (
        "new privileges",
        "no new privileges",
        "Invalid argument",
        """
prevented(lambda: call(157, 38, 0, 0, 0, 0))""",
    ),
    ("keys into a terminal", FILTER, FORBIDDEN, "import fcntl; prevented(lambda: fcntl.ioctl(0, 0x5412, b'x'))"),
    (
        "the machine",
        FILTER,
        FORBIDDEN,
        (
            "prevented(lambda: call(169, 0xfee1dead, 672274793, 0x1234567, 0), "
            "lambda: call(246, 0, 0, None, 0), lambda: call(313, 0, b'', 0), lambda: socket.sethostname('x'), "
            "lambda: time.clock_settime(time.CLOCK_REALTIME, 0), lambda: call(103, 3, None, 0), lambda: call(167, b'/', 0))"
        ),
    ),
]
_EXHAUSTION = [
    ("endless computation", LIMIT, "^(cpu|wall)", "while True: pass"),
    (
        "endless computation without the signal",
        LIMIT,
        "^(cpu|wall)",
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ),
    (
        "endless computation in children",
        LIMIT,
        "^(cpu|wall)",
        """
while True:
    began = time.process_time()
    while time.process_time() - began < 0.3: pass
    if os.fork(): os._exit(0) if os.getpid() > 3 else time.sleep(1000)""",
    ),
    ("endless sleep", LIMIT, "^wall", "time.sleep(1000)"),
    (
        "sleep without signals",
        LIMIT,
        "^wall",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(100)",
    ),
    ("much memory", LIMIT, "MemoryError", "bytearray(8 << 30); print('ESCAPED')"),
    (
        "much memory in many processes",
        LIMIT,
        "^memory",
        """
for _ in range(12):
    if os.fork() == 0:
        data = bytearray(os.urandom(1) * (40 << 20)); time.sleep(100)
time.sleep(100); print('ESCAPED')""",
    ),
    (
        "shared memory, which stays whole while one page of it is mapped",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: mmap.mmap(-1, 1 << 20), lambda: mmap.mmap(-1, 1 << 20, flags=0x23))",
    ),
    ("shared memory by a device", ROOT, ABSENT, "prevented(lambda: open('/dev/zero', 'r+b'))"),
    (
        "an order in which the kernel frees memory",
        LIMIT,
        "^exit 0\n1000$",
        "print(open('/proc/self/oom_score_adj').read().strip())",
    ),
    ("memory files", FILTER, FORBIDDEN, "prevented(lambda: os.memfd_create('x'), lambda: call(447, 0))"),
    (
        "System V memory",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(29, 0, 1 << 30, 0o1600), lambda: call(68, 0, 0o1600), lambda: call(64, 0, 1, 0o1600))",
    ),
    ("message queues", FILTER, FORBIDDEN, "prevented(lambda: call(240, b'x', 66, 0o600, None))"),
    (
        "locked memory",
        LIMIT,
        f"{FORBIDDEN}|Cannot allocate",
        "prevented(lambda: call(149, ctypes.create_string_buffer(1 << 20), 1 << 20))",
    ),
    (
        "a large file",
        LIMIT,
        "File too large|No space|signal -25",
        """
with open('x', 'wb') as file:
    while True: file.write(bytes(1 << 20))""",
    ),
    (
        "files in every writable folder",
        LIMIT,
        "No space left",
        """
for at in range(100):
    for folder in ('/box', '/tmp', '/dev/shm'):
        open(f'{folder}/{at}', 'wb').write(bytes(1 << 20))""",
    ),
    ("very many files", LIMIT, "No space left", "for at in range(10 ** 6): open(str(at), 'w').close()"),
    (
        "a very deep folder",
        LIMIT,
        "^(exit|cpu|wall)",
        """
try:
    for _ in range(3000): os.mkdir('d'); os.chdir('d')
except OSError as error: print(error)""",
    ),
    ("output without end", LIMIT, "^output", "while True: print('x' * 10000)"),
    ("errors without end", LIMIT, "^output", "while True: sys.stderr.write('x' * 10000)"),
    ("output of children", LIMIT, "^output", "subprocess.run(['/usr/bin/yes'])"),
    (
        "very many open files",
        LIMIT,
        "Too many open files",
        "held = [open('/dev/null') for _ in range(10000)]; print('ESCAPED')",
    ),
    (
        "very many timers",
        LIMIT,
        "temporarily unavailable|Cannot allocate",
        """
made = ctypes.c_int()
def more():
    for _ in range(10000): call(222, 1, None, ctypes.byref(made))
prevented(more)""",
    ),
    (
        "full pipes",
        LIMIT,
        "^exit 0",
        """
import fcntl
held = []
try:
    while True:
        held.append(os.pipe()); fcntl.fcntl(held[-1][1], 1031, 1 << 20); os.set_blocking(held[-1][1], False); os.write(held[-1][1], bytes(1 << 20))
except OSError as error: print(len(held), error)""",
    ),
    ("a crash", "core limit of 1", "^signal -11", "ctypes.string_at(0)"),
    (
        "a crash for the machine's handler of cores",
        FILTER,
        "stopped.*\nstopped.*\nstopped.*\nMax core file size *1 *1 ",
        """
no_core = struct.pack('QQ', 0, 1)
prevented(lambda: call(302, 0, 4, no_core, None), lambda: call(160, 4, no_core))
try:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); print('ESCAPED')
except (OSError, ValueError) as error:
    print('stopped', error)
print(*[line for line in open('/proc/self/limits') if line.startswith('Max core')])""",
    ),
    (
        "what the whole machine has one limit of",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(206, 60000, ctypes.byref(ctypes.c_ulong())), lambda: call(294, 0), lambda: call(253), lambda: call(306, 1))",
    ),
    (
        "a lock on a file of the machine",
        FILTER,
        FORBIDDEN,
        "import fcntl; held = open('/usr/bin/env'); prevented(lambda: fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB))",
    ),
    (
        "a lock for writing on a file of the machine",
        "a file that is open for reading only",
        "Bad file descriptor",
        "import fcntl; held = open('/usr/bin/env'); prevented(lambda: fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB))",
    ),
    (
        "a lease on a file of the machine",
        FILTER,
        FORBIDDEN,
        "import fcntl; held = open('/usr/bin/env'); prevented(lambda: fcntl.fcntl(held, 1024, 0), lambda: fcntl.fcntl(held, 1026, 1))",
    ),
    ("a child of the supervisor", FILTER, FORBIDDEN, "prevented(lambda: call(56, 0x8000 | 17, 0, 0, 0, 0))"),
    (
        "endless recursion",
        LIMIT,
        "RecursionError|^(signal|cpu|wall|memory)",
        "sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    ),
]

_ROUNDABOUT = [
    (
        "write by a descriptor of a path",
        READ,
        "denied|Read-only",
        "held = os.open('/usr/bin/env', os.O_PATH); prevented(lambda: os.open(f'/proc/self/fd/{held}', os.O_RDWR))",
    ),
    (
        "above the root by descriptors",
        ROOT,
        "^inside$",
        """
held = os.open('/box', os.O_PATH)
for _ in range(40): held = os.open('..', os.O_PATH, dir_fd=held)
print('inside' if os.path.sameopenfile(held, os.open('/', os.O_PATH)) else 'ESCAPED')""",
    ),
    ("a second name of a file in /usr", ROOT, "cross-device", "prevented(lambda: os.link('/usr/bin/env', '/box/env'))"),
    (
        "keys into a terminal, with high bits",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(16, 0, ctypes.c_long(0x100005412), b'x'))",
    ),
    (
        "sockets of the internet, with high bits",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(41, ctypes.c_long(0x100000002), 1, 0))",
    ),
    (
        "namespaces by a process's descriptor",
        FILTER,
        FORBIDDEN,
        "prevented(lambda: call(308, os.pidfd_open(1), 0x10000000))",
    ),
    (
        "another program for /proc/self/exe",
        "dropped capabilities",
        FORBIDDEN,
        "prevented(lambda: call(157, 35, 9, 0, 0, 0))",
    ),
    (
        "change /dev/null",
        READ,
        READ_ONLY,
        "prevented(lambda: os.chmod('/dev/null', 0), lambda: os.unlink('/dev/null'), lambda: os.utime('/usr/bin/env'))",
    ),
    (
        "memory in attributes of files",
        LIMIT,
        "No space left|not supported",
        """
open('x', 'w').close()
def fill():
    for at in range(2000): os.setxattr('x', f'user.{at}', bytes(60000))
prevented(fill)""",
    ),
    (
        "memory in sockets that hold each other",
        LIMIT,
        "Too many references",
        """
def fill():
    for _ in range(3000):
        a, b = socket.socketpair()
        for one in (a, b): socket.send_fds(one, [b'x'], [a.fileno(), b.fileno()])
        a.close(); b.close()
prevented(fill)""",
    ),
    (
        "output after the end",
        "end of the process namespace",
        r"^exit 0\nfirst$",
        """
if os.fork() == 0:
    os.setsid(); os.getppid() and time.sleep(0.2); print('ESCAPED', flush=True); time.sleep(1000)
print('first', flush=True); os._exit(0)""",
    ),
]


def _escapes() -> list[Escape]:
    parts = (_FILES, _ENVIRONMENT, _NETWORK, _PROCESSES, _EXHAUSTION, _ROUNDABOUT)
    return [Escape(name, wall, shows, code) for part in parts for name, wall, shows, code in part]


ESCAPES: Final = _escapes()
