"""A server that speaks Tinker's protocol: many LoRA training runs of several tenants on one frozen base model.

`ludic serve --tinker` starts it. A request travels app.py (HTTP) → wire.py (protobuf and JSON) → service.py (sessions, runs,
training requests in order) → scheduler.py (whose turn it is) → runs.py and losses.py (the computation), or sampling.py (the
embedded engine). Its result waits in futures.py. records.py holds what is known by name: tenants, limits, sessions, runs,
samplers, and the `Store` that writes them down.
"""
