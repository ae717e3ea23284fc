"""scripts/install_locked.py: uv is told what pip reads in its settings."""

from scripts import install_locked

LISTED = """\
:env:.cert='/etc/ssl/certs/ca.crt'
:env:.extra-index-url='https://a/simple  https://b/simple'
freeze.timeout='10'
global.cert='/another.crt'
global.extra-index-url='https://hidden/simple'
global.find-links='/opt/wheels\\n/more'
install.default-timeout='180'
"""


def test_uv_gets_the_indexes_folders_certificate_and_time_of_pip():
    of_pip = install_locked.settings(LISTED)
    assert install_locked.flags(of_pip) == [
        "--extra-index-url=https://a/simple", "--extra-index-url=https://b/simple",
        "--find-links=/opt/wheels", "--find-links=/more",
    ]  # fmt: skip
    assert install_locked.variables(of_pip) == {"SSL_CERT_FILE": "/etc/ssl/certs/ca.crt", "UV_HTTP_TIMEOUT": "180"}


def test_without_settings_nothing_is_added():
    assert install_locked.flags(install_locked.settings("")) == []
    assert install_locked.variables({}) == {}


def test_pip_installs_where_uv_fails(monkeypatch, capsys):
    commands = []

    class Ended:
        stdout = ""

        def __init__(self, returncode):
            self.returncode = returncode

    def run(command, **_):
        commands.append(command[2:])
        return Ended(1 if command[2] == "uv" else 0)

    monkeypatch.setattr(install_locked.subprocess, "run", run)
    assert install_locked.main(["--require-hashes", "-r", "main.txt"]) == 0
    assert [command[0] for command in commands] == ["pip", "uv", "pip"]
    assert all(command[-3:] == ["--require-hashes", "-r", "main.txt"] for command in commands[1:])
    assert "pip does" in capsys.readouterr().err
