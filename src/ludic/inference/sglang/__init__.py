"""SGLang servers as a policy, through SGLang's own token endpoints. Untested against a real server: see docs/serving.md.

wire     request bodies and responses of /generate
client   SGLangChatClient: one server or several
"""
