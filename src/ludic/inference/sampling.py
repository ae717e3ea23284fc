"""The seeds' import path of the sampling types, which are in `ludic.types`; the sampler is in `ludic.inference.local`."""

from ludic.types import InferenceSpec, ReturnSpec, SamplingConfig, SamplingParams

__all__ = ["SamplingConfig", "SamplingParams", "ReturnSpec", "InferenceSpec"]
