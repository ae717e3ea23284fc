"""The Llama family: its shapes without torch (shape.py), its modules (modules.py), and a fast pass for a CPU (cpu.py)."""
