"""Text of a growing output: detokenisation and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_core.checkpoint.tokenizer import Tokenizer


class OutputText:
    """Turns output tokens into text that may be shown at once: never half a character, never the beginning of a stop string.

    The text ends before the first stop string that appears.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.incremental()
        self._stops = tuple(stops)
        self._held = ""  # decoded, not yet shown: it may become a stop string

    def feed(self, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """(tokens used, new text, whether a stop string ended the output). The token that completes a stop string is used."""
        if not self._stops:
            return len(tokens), self._decoder.feed(tokens), False
        shown = ""
        for used, token in enumerate(tokens, 1):
            text = self._held + self._decoder.feed([token])
            cut = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
            if cut >= 0:
                self._held = ""
                self._decoder.flush()
                return used, shown + text[:cut], True
            keep = self._suspicious(text)
            shown += text[: len(text) - keep]
            self._held = text[len(text) - keep :]
        return len(tokens), shown, False

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        rest, self._held = self._held + self._decoder.flush(), ""
        return rest

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
