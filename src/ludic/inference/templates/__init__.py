"""Chat templates: messages to tokens, tokens to messages and tool calls, and prompts that continue a conversation exactly.

Loads without transformers: `hf.py` takes a tokenizer object. Start with chat.py (the interface), then conversation.py.
"""
