"""The critic: a value head or model, its training, and generalized advantage estimation over tokens or turns.

The trainer uses it for PPO; nothing below `training` imports it. Start with critic.py.
"""
