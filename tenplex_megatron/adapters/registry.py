"""Which adapter answers for a framework's name?  Frameworks are imported only when asked for."""

from typing import TYPE_CHECKING

from tenplex_megatron.adapters.arguments import ArgumentAdapter
from tenplex_megatron.errors import ConfigError

if TYPE_CHECKING:
    from tenplex_megatron.adapters.base import FrameworkAdapter

__all__ = ["FRAMEWORKS", "argument_adapter", "framework_adapter"]

FRAMEWORKS = ("megatron", "deepspeed")


def argument_adapter(framework: str) -> ArgumentAdapter:
    """The reader of a framework's command line."""
    _check(framework)
    if framework == "deepspeed":
        from tenplex_megatron.adapters.deepspeed.arguments import DeepSpeedArguments

        return DeepSpeedArguments()
    from tenplex_megatron.adapters.megatron.arguments import MegatronArguments

    return MegatronArguments()


def framework_adapter(framework: str) -> "FrameworkAdapter":
    """The hooks into a framework; imports it."""
    _check(framework)
    if framework == "deepspeed":
        from tenplex_megatron.adapters.deepspeed.hooks import DeepSpeedAdapter

        return DeepSpeedAdapter()
    from tenplex_megatron.adapters.megatron.hooks import MegatronAdapter

    return MegatronAdapter()


def _check(framework: str) -> None:
    if framework not in FRAMEWORKS:
        raise ConfigError(
            f"framework: {framework} is not known; expected one of {', '.join(FRAMEWORKS)}"
        )
