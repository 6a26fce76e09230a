"""How do hooks get between a framework and its own functions?"""

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["add_policy_flag", "wrap"]


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:  # noqa: ANN401
    """Let every call of `owner.name` go through `wrapper`.

    Args:
        owner: a module, a class or an object.
        name: a function or method of it, looked up by its callers at every call.
        wrapper: takes the original and then what the caller gives; of a class, the object first.
    """
    original = getattr(owner, name)

    # A function, which classes bind to their objects.
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def add_policy_flag(original: Callable[..., Any], parser: Any) -> Any:  # noqa: ANN401
    """Wrapper of a function that adds a framework's arguments to a parser, and returns it."""
    parser = original(parser)
    group = parser.add_argument_group(title="elastic training")
    group.add_argument(
        "--elastic-policy",
        metavar="PATH",
        default=None,
        help="YAML policy; the job changes its layout when its devices change",
    )
    return parser
