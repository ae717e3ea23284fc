"""What vLLM's plug-in tells `ludic doctor`."""

import sys

from ludic_vllm.command import check_vllm


def test_a_vllm_that_is_not_installed_is_missing_and_not_broken(tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", str(tmp_path / "python"))
    status, says, _ = check_vllm()
    assert (status, says.partition(".")[0]) == ("missing", f"{tmp_path / 'python'} has no vLLM")
    monkeypatch.setenv("LUDIC_VLLM_PYTHON", str(tmp_path / "gone"))
    status, says, _ = check_vllm()
    assert status == "broken" and "is not a working Python" in says
