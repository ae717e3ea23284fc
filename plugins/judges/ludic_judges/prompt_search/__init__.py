"""Prompt search: a learner that changes a text instead of weights, by reflection over rollouts (GEPA, arXiv 2507.19457).

Every candidate is scored on the same tasks. A round takes a candidate of the Pareto front (the best ones at some task), shows a
reflector some of its rollouts, and keeps the text that it proposes if that earns more on the tasks that were shown. The front
keeps candidates that are good at different tasks; a merge puts the changes of two of them together. With a folder, the search is
on disk after every round and goes on from there.
"""

from ludic_judges.prompt_search.reflection import Merger, ModelReflector, Reflector, merged_sentences, merged_texts
from ludic_judges.prompt_search.search import Candidate, PromptSearch

__all__ = ["Candidate", "Merger", "ModelReflector", "PromptSearch", "Reflector", "merged_sentences", "merged_texts"]
