"""Vision-language models: inputs of the decoder (inputs.py), the chat template, the embedded engine."""

from ludic_gpu.vision.inputs import Pictures, VisionDecoder, image_token
from ludic_gpu.vision.template import VisionTemplate

__all__ = ["Pictures", "VisionDecoder", "VisionTemplate", "image_token"]
