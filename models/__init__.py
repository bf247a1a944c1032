"""Minimal full models and what they need to be trained: each file readable in one sitting."""


class BadInput(ValueError):
    """What the user handed in cannot serve. The message is one line: what it is, and the cure."""


def line(error: Exception) -> str:
    """An error as a part of one line: the system's words without the path, or the first line of its own."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0] or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
