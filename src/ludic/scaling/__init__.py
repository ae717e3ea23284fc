"""What a model and a number of GPUs can do, on paper: memory, rates, and how to divide the GPUs. See docs/scaling.md.

Plain arithmetic without torch. `ludic plan` prints it, benchmarks/memory_check.py compares it with a GPU.
"""

from ludic.scaling.advice import Change, changes_that_help
from ludic.scaling.memory import ServingMemory, TrainingMemory, TrainingSetup, serving_memory, training_memory
from ludic.scaling.plan import Job, Plan, PlanOptions, best_plan
from ludic.scaling.shapes import SHAPES, ModelShape, read_shape
from ludic.scaling.throughput import Hardware, Rates

__all__ = [
    "ModelShape", "SHAPES", "read_shape",
    "TrainingSetup", "TrainingMemory", "training_memory", "ServingMemory", "serving_memory",
    "Hardware", "Rates",
    "Job", "PlanOptions", "Plan", "best_plan",
    "Change", "changes_that_help",
]  # fmt: skip
