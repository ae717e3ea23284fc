"""The seeds' import path of the client protocols, which are in `ludic.types`."""

from ludic.types import ChatClient, ChatResponse, TokenCompletionRequest, VersionedClient

__all__ = ["ChatClient", "VersionedClient", "ChatResponse", "TokenCompletionRequest"]
