"""What ends a command from outside; whatever else an engine raises is the engine's, and an observation."""

from __future__ import annotations

__all__ = ["FROM_OUTSIDE", "Terminated"]


class Terminated(SystemExit):
    """SIGTERM came: leave with the status that a shell gives it. An engine's own SystemExit is another."""

    def __init__(self) -> None:
        super().__init__(143)


#: To be passed on where everything else that an engine raises is caught: `sys.exit` and the panics of
#: Rust are no `Exception`, and would end the command as if nothing had failed, or with a traceback.
FROM_OUTSIDE = (KeyboardInterrupt, Terminated)
