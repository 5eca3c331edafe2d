"""Runs one generated program without network, other processes or files; started by sandbox.py.

Knows: resource limits, namespaces, Landlock, seccomp, through libc alone. Does not know: Quill (it
is run by its path), what the program should do. What the kernel doesn't offer is reported.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
# unshare: user, network, System V IPC. In the new network namespace even the loopback is down.
_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000
_NO_NEW_PRIVS, _SET_SECCOMP = 38, 22
# Landlock's system calls have the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 0b1100  # files and directories
_FILE = 0b100 | 0b10 | 1 << 14  # what applies to a file: read, write, truncate
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # how many rights each version of Landlock knows; then 16
_X86_64, _X32_BIT, _EPERM = 0xC000003E, 0x40000000, 1
# Of x86-64. New processes and programs, sockets, signals and access to other processes, shared
# memory, the system's settings, and changes of files that Landlock doesn't cover.
_DENIED = {
    "clone fork vfork execve execveat clone3": (56, 57, 58, 59, 322, 435),
    "socket socketpair io_uring_setup": (41, 53, 425),
    "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo": (62, 200, 234, 129, 297),
    "pidfd_send_signal pidfd_open pidfd_getfd ptrace": (424, 434, 438, 101),
    "process_vm_readv process_vm_writev process_madvise": (310, 311, 440),
    "setpriority sched_setaffinity sched_setscheduler ioprio_set": (141, 203, 144, 251),
    "shmget semget msgget mq_open memfd_create": (29, 64, 68, 240, 319),
    "keyctl add_key request_key bpf perf_event_open userfaultfd": (250, 248, 249, 321, 298, 323),
    "mount umount2 pivot_root chroot unshare setns": (165, 166, 155, 161, 272, 308),
    "reboot swapon swapoff sethostname setdomainname": (169, 167, 168, 170, 171),
    "init_module delete_module finit_module kexec_load": (175, 176, 313, 246),
    "settimeofday clock_settime adjtimex clock_adjtime": (164, 227, 159, 305),
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat": (
        *(90, 91, 268, 452, 92, 93, 94, 260),
    ),
    "utime utimes futimesat utimensat": (132, 235, 261, 280),
    "setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr": (
        *(188, 189, 190, 197, 198, 199),
    ),
}
_PRLIMIT = 302  # of the process itself only


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("directory", ctypes.c_int32))


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def limit(memory_bytes: int, cpu_s: float) -> None:
    """NPROC counts nothing for root: seccomp denies processes to everybody."""
    cpu = math.ceil(cpu_s)
    for name, value in (
        ("AS", memory_bytes),
        ("CPU", cpu),
        ("FSIZE", 1 << 20),
        ("NOFILE", 64),
        ("CORE", 0),
        ("NPROC", 0),
    ):
        with contextlib.suppress(ValueError):  # a lower limit is there already
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def isolate_network() -> None:
    _check(_LIBC.unshare(_NAMESPACES))


def restrict_files() -> None:
    """Reads the interpreter's files, and writes in the working directory alone."""
    version = _check(_LIBC.syscall(_CREATE_RULESET, None, 0, 1))
    handled = ctypes.c_uint64((1 << _RIGHTS.get(version, 16)) - 1)
    rules = _check(_LIBC.syscall(_CREATE_RULESET, ctypes.byref(handled), 8, 0))
    system = ("/usr", "/lib", "/lib64", "/dev/urandom", sys.prefix, sys.base_prefix)
    for path in {Path(each).resolve() for each in (*system, *sys.path)}:
        if path.exists():
            _allow(rules, path, _READ | 1)
    _allow(rules, Path(os.devnull), handled.value)
    _allow(rules, Path.cwd(), handled.value)
    _check(_LIBC.syscall(_RESTRICT_SELF, rules, 0))


def _allow(rules: int, path: Path, rights: int) -> None:
    rights &= -1 if path.is_dir() else _FILE
    directory = os.open(path, os.O_PATH)
    rule = _PathRule(rights, directory)
    _check(_LIBC.syscall(_ADD_RULE, rules, 1, ctypes.byref(rule), 0))
    os.close(directory)


def filter_calls() -> None:
    """seccomp: a denied call fails with EPERM, as does any of another architecture."""
    if platform.machine() != "x86_64":
        raise OSError(f"the table of system calls is of x86-64, not {platform.machine()}")
    denied = [number for numbers in _DENIED.values() for number in numbers]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, _X86_64), (give, 0, 0, 0x80000000)]
    program += [(load, 0, 0, 0), (at_least, len(denied) + 3, 0, _X32_BIT)]
    program += [(equal, len(denied) - at + 2, 0, number) for at, number in enumerate(denied)]
    # prlimit64 of process 0 is of the caller.
    program += [(equal, 0, 3, _PRLIMIT), (load, 0, 0, 16), (equal, 1, 0, 0)]
    program += [(give, 0, 0, 0x00050000 | _EPERM), (give, 0, 0, 0x7FFF0000)]
    instructions = (_Instruction * len(program))(*(_Instruction(*each) for each in program))
    _check(_LIBC.prctl(_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program), instructions))))


LAYERS: dict[str, Callable[[], None]] = {
    "network namespace": isolate_network,
    "Landlock": restrict_files,
    "seccomp": filter_calls,
}


def isolate() -> list[str]:
    """The layers that this machine has, applied."""
    applied = []
    for name, apply in LAYERS.items():
        with contextlib.suppress(OSError, AttributeError):
            if name != "network namespace":
                _check(_LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
            apply()
            applied.append(name)
    return applied


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)  # where the program doesn't write by itself
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    applied = isolate()
    limit(request["memory_bytes"], request["cpu_s"])
    try:
        exec(compile(request["program"], "program.py", "exec"), {"__name__": "__main__"})
    except BaseException:  # also SystemExit: a program that leaves has passed no test
        traceback.print_exc(limit=-1)
        os._exit(1)
    os.write(report, json.dumps({"key": request["key"], "layers": applied}).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
