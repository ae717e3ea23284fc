"""Chat templates: messages to tokens, tokens to messages and tool calls, and prompts that continue a conversation exactly.

Loads without transformers: `hf.py` takes a tokenizer object. Start with `Conversation.next_prompt` in conversation.py, which
renders the next prompt; chat.py has the interface of a template, hf.py that of a tokenizer's own.
"""
