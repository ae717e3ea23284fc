"""What a started server takes over from the one before it, which may have been killed at any moment.

Called once, before the server listens. The SDK (0.36) then continues as if nothing had happened:

- Requests that were not answered come again with the same numbers (`execute_with_retries`, for 5 minutes), and meet the runs,
  sessions and results that are here: nothing is carried out twice.
- Requests that were answered are only asked for their results (`_APIFuture`, without an end while the server is away; 404 would
  end the client's program), and every one of a training run is in its journal.
- Sampling requests are not kept. Their ids are answered with 410, after which `SamplingClient` samples again. So the server must
  not tell clients to use `retrieve_futures`: its poller never learns that a request is lost, and waits without end.
- Heartbeats continue; a session that its client has not finished is open.
"""

import logging

from ludic_tinker.server.service import Service
from ludic_tinker.server.storage.journal import Recovered
from ludic_tinker.server.storage.store import DiskStore

logger = logging.getLogger(__name__)


def recover(store: DiskStore, service: Service) -> None:
    """Give the service the sessions, runs and samplers of the store. Runs are computed up to where they were in the background."""
    over = set()
    for session in store.sessions.listed():
        service.restore_session(session)
        if session.finished is not None:
            over.add(session.id)
    for run, found in store.recover():
        if run.session in over:
            store.end_run(run.id)
        elif not _is_begun(found):
            store.drop_run(run.id)
        else:
            unnamed = [checkpoint.path for checkpoint in reversed(store.checkpoints.unnamed(run.id))]
            try:
                service.restore_run(run, found, unnamed)
            except Exception as error:
                logger.exception("run %s cannot be continued; its checkpoints can still be loaded", run.id)
                store.damaged[run.id] = f"{type(error).__name__}: {error}"
                service.abandon(run.id)
    for sampler in store.samplers.listed():
        if sampler.session in over:
            store.samplers.remove(sampler.id)
        else:
            service.samplers.add(sampler)


def _is_begun(found: Recovered) -> bool:
    """Whether the client was told of the run: request 0, which makes it, is in its journal or in its state."""
    return found.next_number > 0 or any(request.seq == 0 for request in found.requests)
