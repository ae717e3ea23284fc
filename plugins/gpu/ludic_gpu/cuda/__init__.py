"""The embedded engine on a GPU: `runner` (prompts, and decoding rounds as CUDA graphs), `forward` (the fused pass of the Llama
family) and their Triton kernels. Importing any of them needs Triton, so the engine does it when it finds a GPU."""
