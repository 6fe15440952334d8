"""What ends a command from outside; whatever else an engine raises is the engine's, and an observation."""

from __future__ import annotations

__all__ = ["FROM_OUTSIDE", "TERMINATED", "Terminated"]

#: Exit status of what SIGTERM has ended, as a shell counts it.
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM came. Not SystemExit, which code under test may raise itself."""


#: To be passed on where everything else that an engine raises is caught: `sys.exit` and the panics of
#: Rust are no `Exception`, and would end the command as if nothing had failed, or with a traceback.
FROM_OUTSIDE = (KeyboardInterrupt, Terminated)
