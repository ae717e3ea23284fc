"""Speed and size on GPUs: CUDA engine, fused Llama, hybrids, experts, vision, offload, context parallel.

The core runs every model without it, on transformers' own modules.
"""
