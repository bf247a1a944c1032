"""Two minimal full models and what they need to be trained: each file readable in one sitting."""


class BadInput(ValueError):
    """What the user handed in cannot serve. The message is one line: what it is, and the cure."""
