"""A server that speaks Tinker's protocol: many LoRA training runs of several tenants on one frozen base model.

`ludic serve --tinker` starts it. A request travels app.py (HTTP; rest.py lists and downloads) → bodies.py (JSON) or messages.py
(protobuf) → service.py (sessions, runs) → requests.py (what a training request does) → scheduler.py (whose turn it is) → runs.py
and losses.py (the computation); or → sampling.py (the embedded engine). Its result waits in futures.py. records.py holds tenants,
limits and plain data; storage/ writes them down, and `Service.recover` takes them over after a restart.
"""
