"""Which tokens of the vocabulary count at each of several places, on a device: the rest has probability zero."""

from dataclasses import dataclass

import torch
from torch import Tensor


# Letters: A places, S candidates of all places, C places of one chunk, V vocabulary.
@dataclass(frozen=True, slots=True)
class Supports:
    """Candidates of each place, one list after the other. A place without any has the whole vocabulary."""

    ids_S: Tensor
    row_S: Tensor
    """Whose candidate each is."""
    starts: tuple[int, ...]
    """Where the candidates of each place begin, and their number at the end; on the host, so that chunks can be cut there."""

    def mask(self, here: slice, vocab: int) -> Tensor | None:
        """[C, V] whether each token counts; None where all do."""
        own = slice(self.starts[here.start], self.starts[here.stop])
        if own.start == own.stop:
            return None
        num_rows = here.stop - here.start
        rows = self.row_S[own] - here.start
        mask_CV = torch.zeros(num_rows, vocab, dtype=torch.bool, device=rows.device)
        mask_CV[rows, self.ids_S[own]] = True
        is_whole_C = torch.ones(num_rows, dtype=torch.bool, device=rows.device)
        is_whole_C[rows] = False
        return mask_CV | is_whole_C[:, None]
