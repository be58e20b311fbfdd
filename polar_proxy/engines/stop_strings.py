"""The stop strings of an answer whose text arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from polar_proxy.engines.hermes import possible_start


class StopStrings:
    """Cuts a text before its first stop string. `stopped_at` is this stop string, or None before it is found."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(filter(None, strings))
        self._held = ""
        self.stopped_at: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can be shown now, including text that earlier calls held back.

        If a stop string is found, only the text before it is returned. If not, the last characters are held back if
        they may begin a stop string.
        """
        text = self._held + text
        found = [(place, string) for string in self._strings if (place := text.find(string)) >= 0]
        if found:
            place, self.stopped_at = min(found)
            self._held = ""
            return text[:place]
        cut = possible_start(text, self._strings)
        self._held = text[cut:]
        return text[:cut]

    def close(self) -> str:
        """Return the text that `feed` held back."""
        rest, self._held = self._held, ""
        return rest
