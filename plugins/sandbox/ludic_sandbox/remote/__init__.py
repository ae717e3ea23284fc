"""Sandboxes on another machine: `ludic sandbox-server` runs the programs, `RemoteSandboxPool` sends them. See docs/sandbox.md.

wire.py has the messages, server.py the server, client.py the pool. Both ends need aiohttp, so nothing is imported here.
"""
