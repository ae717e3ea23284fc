"""The system calls that a sandboxed program may not make, as a seccomp filter for `bwrap --seccomp`.

A deny list: programs need most calls, and the namespaces already hide what calls act on. It denies calls that get around the limits
(memory that RLIMIT_AS does not count, new namespaces), reach other processes, or reach rarely used parts of the kernel. The filter
is classic BPF: load the call's number, compare, return.
"""

import platform
import struct

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
"""Typing into a terminal on behalf of its user."""

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMNS = {"x86_64": 0, "aarch64": 1}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # CPU time of the supervisor: without any, it could not end the program
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # memory that RLIMIT_AS does not see
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # deep in the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
}
"""Name → numbers on x86_64 and aarch64 (None: there is no such call)."""
CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR, IOCTL, PRLIMIT = (41, 198), (53, 199), (16, 29), (302, 261)

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in struct seccomp_data; the low halves of the arguments, on little-endian machines."""

Instruction = tuple[int, int, int, int]


def is_supported(machine: str | None = None) -> bool:
    return (machine or platform.machine()) in AUDIT_ARCH


def program(machine: str | None = None, *, loopback: bool = False) -> bytes:
    """The filter for this kind of machine, as bwrap reads it. `loopback` permits IP sockets too; without a network they reach only
    processes of the same sandbox."""
    machine = machine or platform.machine()
    column = _COLUMNS[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 numbers would be a second way to every call
        code += [(_JUMP_GREATER_EQUAL, 0, 1, 0x40000000), (_RETURN, 0, 0, ERRNO | ENOSYS)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, ERRNO | EPERM)]
    # A filter cannot read its flags, which are in memory; callers fall back to clone.
    code += [(_JUMP_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, ERRNO | ENOSYS)]
    code += _by_argument(CLONE[column], _ARGUMENT_0, [(_JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES)], EPERM)
    families = (AF_UNIX, AF_INET, AF_INET6) if loopback else (AF_UNIX,)
    for call in (SOCKET, SOCKETPAIR):
        permitted = [(_JUMP_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)]
        code += _by_argument(call[column], _ARGUMENT_0, permitted, EAFNOSUPPORT)
    # A program may set its own limits (process 0), but not those of the supervisor, which has the same user.
    code += _by_argument(PRLIMIT[column], _ARGUMENT_0, [(_JUMP_EQUAL, 1, 0, 0)], EPERM)
    tests = [(_JUMP_EQUAL, 1, 0, TIOCSTI), (_JUMP_EQUAL, 0, 1, TIOCLINUX)]
    code += _by_argument(IOCTL[column], _ARGUMENT_1, tests, EPERM)
    code.append((_RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _by_argument(number: int, offset: int, tests: list[Instruction], errno: int) -> list[Instruction]:
    """Deny the call if the tests lead to the first of the two returns behind them."""
    body = [(_LOAD, 0, 0, offset), *tests, (_RETURN, 0, 0, ERRNO | errno), (_RETURN, 0, 0, ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]
