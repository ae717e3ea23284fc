"""Code that runs inside vLLM's own processes, with vLLM's packages."""
