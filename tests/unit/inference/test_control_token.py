import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from ludic.inference.vllm.control_token import make_control_token, read_control_token
from ludic.types import ConfigError


def test_the_token_is_long_and_only_its_owner_may_read_it(tmp_path):
    token = make_control_token(tmp_path / "run")
    file = tmp_path / "run" / "control_token"
    assert len(token) == 64 and file.read_text().strip() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list((tmp_path / "run").iterdir()) == [file], "nothing else is left behind"


def test_two_folders_have_two_tokens_and_one_folder_keeps_its_own(tmp_path):
    first = make_control_token(tmp_path / "a")
    assert make_control_token(tmp_path / "a") == first != make_control_token(tmp_path / "b")


def test_servers_that_start_at_once_agree(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(lambda _: make_control_token(tmp_path), range(64)))
    assert len(tokens) == 1


def test_a_folder_or_the_file_itself_can_be_read(tmp_path):
    token = make_control_token(tmp_path)
    assert read_control_token(tmp_path) == read_control_token(tmp_path / "control_token") == token


def test_a_token_that_others_can_read_is_refused(tmp_path):
    make_control_token(tmp_path)
    (tmp_path / "control_token").chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        make_control_token(tmp_path)


def test_a_missing_or_empty_token_is_an_error_that_helps(tmp_path):
    with pytest.raises(ConfigError, match="No control token at"):
        read_control_token(tmp_path)
    (tmp_path / "control_token").touch(mode=0o600)
    with pytest.raises(ConfigError, match="empty"):
        read_control_token(tmp_path)
