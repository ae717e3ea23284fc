"""Chat templates: messages to tokens, tokens to messages and tool calls, and prompts that continue a conversation exactly.

Loads without transformers: `hf.py` is handed a tokenizer. Start with chat.py (the interface), then conversation.py.
"""
