"""Weight publishing to servers, under the path of an earlier version; the code is in the plug-in `ludic_vllm`."""
