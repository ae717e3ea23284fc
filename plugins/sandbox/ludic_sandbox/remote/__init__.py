"""Sandboxes on another machine: `ludic sandbox-server` runs the programs, `RemoteSandboxPool` sends them. See docs/sandbox.md.

server.py is the server, client.py the pool; requests.py of the package has the messages.
Both ends need aiohttp, so nothing is imported here.
"""
