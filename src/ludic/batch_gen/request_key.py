"""A name for an episode that another process would give it too: how an interrupted run finds what it has done."""

import hashlib
import json
from dataclasses import asdict

from ludic.batch_gen.episodes import EpisodePlan
from ludic.types.rollout import json_number


def request_key(plan: EpisodePlan, *, max_steps: int) -> str | None:
    """32 hex digits made of everything that decides an episode: env, protocol, seeds, sampling, number of turns.

    None when the request's arguments are not all JSON: such objects have no text that another process would find again.
    """
    request = plan.request
    identity = {
        "env": [request.env.kind, dict(request.env.kwargs)],
        "protocol": [request.protocol.kind, dict(request.protocol.kwargs)],
        "seeds": [plan.env_seed, plan.sampling_seed],
        "inference": None if request.inference is None else asdict(request.inference),
        "max_steps": max_steps,
    }
    try:
        text = json.dumps(identity, sort_keys=True, default=json_number)
    except TypeError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]
