"""Code that runs inside vLLM's own processes: weight updates, LoRA adapters, thinking limits, access control.

Imported by vLLM, never by the rest of ludic (guard.py and parent_watch.py excepted). Start with weights.py.
"""
