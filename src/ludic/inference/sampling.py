"""The seeds' path of how a model is sampled; the types are in `ludic.types`, the sampler in `ludic.inference.local`."""

from ludic.types import InferenceSpec, ReturnSpec, SamplingConfig, SamplingParams

__all__ = ["SamplingConfig", "SamplingParams", "ReturnSpec", "InferenceSpec"]
