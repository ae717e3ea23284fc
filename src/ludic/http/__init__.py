"""HTTP: the parts that all servers share, and the client of this package. Loads without torch.

Servers are in plug-ins: `ludic serve`, the gateway, Tinker's protocol, sandboxes, the viewer. Start with app.py: limits, start,
guard and end. address.py checks where a server listens, tokens.py knows who may ask, errors.py why a request is refused,
turns.py gives room to clients fairly. client.py sends requests.
"""
