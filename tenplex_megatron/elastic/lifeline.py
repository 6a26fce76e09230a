"""How does a process make sure that it does not outlive the one that started it?"""

import ctypes
import os
import signal
import sys

__all__ = ["AGENT_VARIABLE", "end_with_parent", "is_child_of_agent"]

AGENT_VARIABLE = "TENPLEX_AGENT"
"""Process id of the agent, for the processes it starts."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when its parent ends (Linux only).

    The parent may have ended before this call: check afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_child_of_agent() -> bool:
    """Whether the process that started this one is the agent named in the environment."""
    return os.environ.get(AGENT_VARIABLE) == str(os.getppid())
