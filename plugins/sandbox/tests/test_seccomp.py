"""The filter, run by a small interpreter of BPF, and its numbers against libseccomp's where that is installed."""

import ctypes
import ctypes.util
import struct

import pytest

from ludic_sandbox.runner import seccomp

MACHINES = ["x86_64", "aarch64"]
SPECIAL = {
    "clone": seccomp.CLONE,
    "clone3": seccomp.CLONE3,
    "socket": seccomp.SOCKET,
    "socketpair": seccomp.SOCKETPAIR,
    "ioctl": seccomp.IOCTL,
    "prlimit64": seccomp.PRLIMIT,
}


def decide(program: bytes, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the kernel would return for this call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, seccomp.AUDIT_ARCH[machine] if arch is None else arch, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"unknown operation {operation:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_denied_call_is_refused_and_no_other_is(machine):
    program = seccomp.program(machine)
    column = MACHINES.index(machine)
    denied = {numbers[column] for numbers in seccomp.DENIED.values()} - {None}
    special = {numbers[column] for numbers in SPECIAL.values()}
    for number in range(600):
        if number in special:
            continue
        expected = seccomp.ERRNO | seccomp.EPERM if number in denied else seccomp.ALLOW
        assert decide(program, machine, number) == expected, number


@pytest.mark.parametrize("machine", MACHINES)
def test_some_calls_depend_on_their_arguments(machine):
    program = seccomp.program(machine)
    column = MACHINES.index(machine)

    def call(numbers: tuple[int, int], *arguments: int) -> int:
        return decide(program, machine, numbers[column], *arguments)

    for numbers in (seccomp.SOCKET, seccomp.SOCKETPAIR):
        assert call(numbers, 1) == seccomp.ALLOW
        other_families = [*range(2, 60), 0, 0x7FFFFFFF, 0xFFFFFFFF]
        assert {call(numbers, family) for family in other_families} == {seccomp.ERRNO | seccomp.EAFNOSUPPORT}
    fork, thread = 0x11, 0x3D0F00
    assert call(seccomp.CLONE, fork) == call(seccomp.CLONE, thread) == seccomp.ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert call(seccomp.CLONE, fork | flag) == seccomp.ERRNO | seccomp.EPERM
    assert call(seccomp.CLONE3, 0) == seccomp.ERRNO | seccomp.ENOSYS
    assert call(seccomp.PRLIMIT, 0) == seccomp.ALLOW and call(seccomp.PRLIMIT, 1) == seccomp.ERRNO | seccomp.EPERM
    assert call(seccomp.IOCTL, 0, 0x5401) == seccomp.ALLOW
    assert call(seccomp.IOCTL, 0, seccomp.TIOCSTI) == call(seccomp.IOCTL, 0, seccomp.TIOCLINUX) == seccomp.ERRNO | 1


@pytest.mark.parametrize("machine", MACHINES)
def test_loopback_adds_ip_sockets_only(machine):
    program, column = seccomp.program(machine, loopback=True), MACHINES.index(machine)
    permitted = {
        family
        for family in [*range(60), 0x7FFFFFFF, 0xFFFFFFFF]
        if decide(program, machine, seccomp.SOCKET[column], family) == seccomp.ALLOW
    }
    assert permitted == {1, 2, 10}
    assert decide(program, machine, seccomp.CLONE3[column]) == seccomp.ERRNO | seccomp.ENOSYS
    assert decide(program, machine, seccomp.DENIED["bpf"][column]) == seccomp.ERRNO | seccomp.EPERM


def test_other_kinds_of_calls_are_no_way_around():
    i386 = 0x40000003
    assert decide(seccomp.program("x86_64"), "x86_64", 1, arch=i386) == seccomp.KILL_PROCESS
    assert decide(seccomp.program("x86_64"), "x86_64", 0x40000000 + 41, 2) == seccomp.ERRNO | seccomp.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernel(machine):
    found = ctypes.util.find_library("seccomp")
    if found is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(found).seccomp_syscall_resolve_name_arch
    named = {**seccomp.DENIED, **SPECIAL}
    for name, numbers in named.items():
        number = resolve(ctypes.c_uint32(seccomp.AUDIT_ARCH[machine]), name.encode())
        assert (number if number >= 0 else None) == numbers[MACHINES.index(machine)], name


def test_other_machines_have_no_filter():
    assert not seccomp.is_supported("riscv64") and seccomp.is_supported("aarch64")
