"""What a trainer can repeat of how a token was drawn, and what it cannot.

A ratio compares the probability of a token now with that when it was drawn, and both must be of the same kind. Temperature
is repeated, and so are top-p, top-k and min-p where the sampler recorded what they left (`TokenSupports`). Penalties change
with every token that was written, and are not.
"""

from ludic.types.errors import ConfigError
from ludic.types.inference import (
    BackendExtensions,
    ChatResponse,
    SamplingParams,
    TokenCompletionRequest,
    VLLMExtensions,
)
from ludic.types.supports import TokenSupports

_TRUNCATION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""What they are when they rule nothing out."""
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_OVERRIDES = frozenset(
    {*_TRUNCATION, *_PENALTIES, "min_tokens", "temperature", "logit_bias", "allowed_token_ids", "bad_words"}
)


def unrepeatable_settings(
    sampling: SamplingParams, extensions: BackendExtensions | None = None, supports: TokenSupports | None = None
) -> str | None:
    """The settings that stand between these tokens and a ratio, such as "top_p=0.9, top_k=50"; None when nothing does."""
    if extensions is None and _is_plain(sampling):  # nearly always, and every model call asks
        return None
    found = {name: getattr(sampling, name) for name in _PENALTIES if getattr(sampling, name) != _PENALTIES[name]}
    if supports is None and sampling.temperature > 0:
        found |= {name: getattr(sampling, name) for name in _TRUNCATION if getattr(sampling, name) != _TRUNCATION[name]}
    if supports is None and sampling.min_tokens:
        found["min_tokens"] = sampling.min_tokens
    if isinstance(extensions, VLLMExtensions):
        if extensions.repetition_penalty != 1.0:
            found["repetition_penalty"] = extensions.repetition_penalty
        found |= {name: value for name, value in extensions.extra_body_overrides.items() if name in _OVERRIDES}
    return ", ".join(f"{name}={value}" for name, value in found.items()) or None


def _is_plain(sampling: SamplingParams) -> bool:
    """Nothing but the temperature shapes the distribution."""
    return (
        sampling.top_p == 1.0
        and not (sampling.top_k or sampling.min_p or sampling.min_tokens)
        and not (sampling.frequency_penalty or sampling.presence_penalty)
        and sampling.repetition_penalty == 1.0
    )


def require_repeatable_reply(request: TokenCompletionRequest, response: ChatResponse) -> str | None:
    """What stands between the reply's tokens and a ratio; ConfigError where their log-probs were asked for, to train on.

    Found at the first reply, and not when a batch of them is to be trained on.
    """
    found = unrepeatable_settings(request.sampling, request.extensions, response.supports)
    if found is not None and request.return_.return_chosen_logprobs:
        raise ConfigError(
            f"Log-probs of the sampled tokens were asked for, to train on, but with {found} a trainer cannot tell what "
            "distribution they are of, and ratios would be wrong. Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no "
            "penalties. Only the embedded engine (LocalEngine) records what top_p, top_k and min_p leave; with it they can stay. "
            "Where no ratio is taken (evaluation, SFT, RFT), ask with ReturnSpec.for_eval()."
        )
    return found
