"""When a completion is over."""

from collections.abc import Callable

from ludic.inference.dialogue import find_stop
from ludic.inference.local.sequence import Sequence


class StopRule:
    """Stop tokens, stop strings, the token limit; in that order."""

    def __init__(self, decode: Callable[[list[int]], str], max_length: int) -> None:
        self._decode = decode
        self._max_length = max_length

    def absorb(self, sequence: Sequence, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append what was sampled, up to where the sequence ends; what lies behind its end is dropped."""
        params = sequence.sampling
        room = min(params.max_tokens - len(sequence.logprobs), self._max_length - len(sequence.tokens))
        if len(tokens) < room and not params.stop and sequence.stop_ids.isdisjoint(tokens):
            sequence.extend(tokens, logprobs, version)
            return
        for token, logprob in zip(tokens, logprobs, strict=True):
            sequence.append(token, logprob, version)
            self.apply(sequence)
            if sequence.finish_reason is not None:
                return

    def apply(self, sequence: Sequence) -> None:
        """Set the finish reason if the newest token ended the sequence; none of the first `min_tokens` can."""
        params = sequence.sampling
        if len(sequence.logprobs) > params.min_tokens and (
            sequence.tokens[-1] in sequence.stop_ids or (params.stop and self._ends_in_stop_string(sequence))
        ):
            sequence.finish_reason = "stop"
        elif len(sequence.logprobs) >= params.max_tokens or len(sequence.tokens) >= self._max_length:
            sequence.finish_reason = "length"

    def _ends_in_stop_string(self, sequence: Sequence) -> bool:
        stop = sequence.sampling.stop
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        # A stop string can only end in the newest token; a token has at least one byte, so this tail is long enough.
        tail = self._decode(sequence.completion[-(max(len(s.encode()) for s in stops) + 4) :])
        if not any(s in tail for s in stops):
            return False
        text = self._decode(sequence.completion)
        exempt = sequence.completion[: sequence.sampling.min_tokens]
        cut = find_stop(text, sequence.sampling, len(self._decode(exempt)) if exempt else 0)
        if cut is None:
            return False
        sequence.text = text[:cut]
        return True
