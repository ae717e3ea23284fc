"""HTTP: the parts that all servers share, and the client of this package. Loads without torch.

Servers are in plug-ins: `ludic serve`, the gateway, Tinker's protocol, sandboxes, the viewer. Start with app.py (start, guard,
end). address.py checks where a server listens, tokens.py who may ask, limits.py how much; errors.py says why a request is refused,
turns.py gives room to clients fairly, and stopping.py hears signals. client.py sends requests.
"""
