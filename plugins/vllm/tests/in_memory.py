"""Fake vLLM servers in this process that record the calls of a control plane."""


class FakeServers:
    """Answers the control calls of vLLM with Ludic's extension, and records them."""

    def __init__(self, *servers: str) -> None:
        self.servers = list(servers or ["http://127.0.0.1:1"])
        self.log: list[tuple[str, str]] = []
        self.version = dict.fromkeys(self.servers, "default")
        self.paused = dict.fromkeys(self.servers, False)
        self.failures: list[tuple[str, str, Exception]] = []
        """(server, call, error), each raised once."""

    def calls(self, server: str | None = None) -> list[str]:
        return [call for where, call in self.log if where == (server or self.servers[0])]

    def maybe_fail(self, server: str, call: str) -> None:
        for failure in self.failures:
            if failure[:2] == (server, call):
                self.failures.remove(failure)
                raise failure[2]

    async def control_post(self, server, path, body=None, params=None, timeout_s=1.0):
        call = body["method"].removeprefix("ludic_") if path == "/collective_rpc" else path
        self.log.append((server, call))
        self.maybe_fail(server, call)
        if call in ("/pause", "/resume"):
            self.paused[server] = call == "/pause"
        return self.answer(server, call, body, params)
