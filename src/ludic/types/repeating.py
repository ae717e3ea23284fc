"""What a trainer can repeat of how a token was drawn, and what it cannot.

A ratio compares the probability of a token now with that when it was drawn, and both must be of the same kind. Temperature
is repeated, and so are top-p, top-k and min-p where the sampler recorded what they left (`TokenSupports`). Penalties change
with every token that was written, and are not.
"""

from ludic.types.inference import BackendExtensions, SamplingParams, VLLMExtensions
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
