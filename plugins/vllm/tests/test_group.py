"""A process group of a trainer and a worker without a default group, on the loopback address."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from ludic.distributed import WeightPushError
from ludic_vllm.publish.transfer import Meeting, broadcast, join, open_store, reach_store
from ludic_vllm.publish.vllm import finish


def test_a_worker_receives_what_the_trainer_sends():
    store = open_store("127.0.0.1", 2, timeout_s=20)
    meeting = Meeting("gloo", "127.0.0.1", store.port, 2, 20)
    received = torch.zeros(1000, dtype=torch.uint8)

    def work() -> None:
        theirs = reach_store(meeting)
        broadcast(join(meeting, theirs, rank=1), received)

    worker = threading.Thread(target=work)
    worker.start()
    sent = torch.arange(1000).to(torch.uint8)
    broadcast(join(meeting, store, rank=0), sent)
    worker.join(timeout=20)
    assert torch.equal(received, sent)


def test_store_listens_only_on_the_given_address():
    store = open_store("127.0.0.1", 2, timeout_s=5)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert f"0100007F:{store.port:04X}" in listening
    assert f"00000000:{store.port:04X}" not in listening


def test_failure_of_a_server_is_raised_without_waiting_for_a_hanging_send():
    theirs, ours = Future(), Future()
    theirs.set_exception(WeightPushError("http://a:1: 500"))
    with pytest.raises(WeightPushError, match="a:1: 500"):
        finish(theirs, {"http://a:1": ours})


def test_error_of_a_broken_connection_names_the_server():
    theirs, good, bad = Future(), Future(), Future()
    good.set_result(None)
    bad.set_exception(RuntimeError("Connection reset by peer"))
    with pytest.raises(WeightPushError, match="http://b:1: the connection for the weights failed: Connection reset"):
        finish(theirs, {"http://a:1": good, "http://b:1": bad})
