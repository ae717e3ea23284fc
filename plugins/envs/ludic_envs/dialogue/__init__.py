"""Dialogues between a user simulator and an assistant."""

from ludic_envs.dialogue.env import ASSISTANT, USER, DialogueEnv

__all__ = ["ASSISTANT", "USER", "DialogueEnv"]
