"""The client of a vLLM server; the code is in the plug-in `ludic_vllm`."""
