"""The Llama family (Llama, Qwen2, Qwen3, Mistral): its decoder with a hand-written backward pass, for training on a GPU.

training.py is the pass, kernels.py what Triton computes between its matrix products, plain.py the same in PyTorch;
graphs.py runs the pass of a small model as CUDA graphs, adapters.py is LoRA in it. The embedded engine uses kernels.py and
adapters.py, too.
"""
