"""What the sandbox's plug-in tells `ludic doctor`."""

import sys

from ludic_sandbox.plugin import check_bubblewrap


def test_a_bubblewrap_without_namespaces_is_broken_and_the_kernel_settings_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ludic_sandbox.bubblewrap.bubblewrap_problem", lambda: "bwrap cannot make a sandbox here: no.")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "linux")
    status, says, repair = check_bubblewrap()
    assert status == "broken" and "cannot make a sandbox" in says and "unprivileged_userns_clone" in repair
