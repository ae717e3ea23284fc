"""Memory groups in both dialects, on folders that look like the kernel's. The real ones: tests/integration."""

import os
import signal
from pathlib import Path

import pytest

from ludic_sandbox.runner.cgroup import V1, V2, Dialect, MemoryGroup, MemoryGroups, _usable_parent


def make_group(folder: Path, dialect: Dialect, *, swap: bool = True) -> MemoryGroup:
    folder.mkdir()
    (folder / dialect.events).write_text("oom_kill_disable 0\noom_kill 3\n")
    (folder / dialect.peak).write_text("4096\n")
    if swap:
        (folder / dialect.swap_limit).write_text("0")
    return MemoryGroup(folder, dialect)


@pytest.mark.parametrize(("dialect", "swap"), [(V1, "1000000"), (V2, "0")])
def test_a_run_is_limited_with_its_swap_and_judged_by_its_own_kills(tmp_path, dialect, swap):
    group = make_group(tmp_path / "g", dialect)
    group.begin(1_000_000)
    assert (group.folder / dialect.limit).read_text() == "1000000"
    assert (group.folder / dialect.swap_limit).read_text() == swap
    assert group.read()[1] is False, "the three kills were before"
    (group.folder / dialect.events).write_text("oom_kill 4\n")
    assert group.read()[1] is True


def test_peak_memory_is_reset_where_the_kernel_supports_it(tmp_path):
    old, new = make_group(tmp_path / "old", V1), make_group(tmp_path / "new", V2, swap=False)
    old.begin(10), new.begin(10)
    assert old.read()[0] == 0 and new.read()[0] is None
    (new.folder / V2.peak).unlink()
    assert new.read()[0] is None


async def test_groups_are_used_again_and_removed_in_the_end(tmp_path):
    groups = MemoryGroups(tmp_path, V2)
    first, second = groups.lend(), groups.lend()
    assert first.folder != second.folder and first.folder.name.startswith(f"{os.getpid()}-")
    groups.give_back(first)
    assert groups.lend() is first
    groups.give_back(first), groups.give_back(second)
    await groups.remove_all()
    assert list(tmp_path.iterdir()) == []


def test_the_cgroup_version_is_found_and_groups_of_live_processes_stay(tmp_path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids\n")
    parent = tmp_path / "ludic-sandbox"
    dead = 2**22 + 1  # above any process number
    for name in (f"{dead}-{namespace}-0", f"{dead}-1-0", f"{os.getpid()}-{namespace}-0"):
        (parent / name).mkdir(parents=True)
    for folder in parent.iterdir():
        (folder / "cgroup.procs").symlink_to("/dev/null")
    found = _usable_parent(tmp_path)
    assert found == (parent, V2)
    assert (parent / f"{dead}-1-0").exists(), "of another process namespace: its harness may live"
    assert (parent / f"{os.getpid()}-{namespace}-0").exists()


def test_without_the_memory_controller_there_are_no_groups(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    assert _usable_parent(tmp_path) is None


def test_leftover_processes_are_ended(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    namespace = os.stat("/proc/self/ns/pid").st_ino
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / V1.limit).write_text("1")
    folder = tmp_path / "memory" / "ludic-sandbox" / f"{2**22 + 2}-{namespace}-7"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("123\n456\n")
    assert _usable_parent(tmp_path) == (folder.parent, V1)
    assert killed == [(123, signal.SIGKILL), (456, signal.SIGKILL)]
