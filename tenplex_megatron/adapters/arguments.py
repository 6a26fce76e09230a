"""What must be known of a framework's command line, before anything of it is imported?"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

__all__ = ["ArgumentAdapter"]


class ArgumentAdapter(ABC):
    """What a framework's command line says, without importing the framework."""

    preload: tuple[str, ...]
    """Modules a fork server imports so that workers start warm."""

    cpu_stand_in: str | None = None
    """Module whose `install` makes code that insists on CUDA run on the host; None: not needed."""

    def modules(self, argv: Sequence[str]) -> tuple[str, ...]:
        """What to preload for a script with these flags."""
        del argv
        return self.preload

    def environment(self, device: str) -> dict[str, str]:
        """Variables without which the framework would not keep to `device`."""
        del device
        return {}

    @abstractmethod
    def profile(self, argv: Sequence[str], *, is_rough: bool = False) -> ModelProfile | None:
        """What is trained, as far as its speed and size depend on it; None: flags do not say.

        A rough profile guesses what the flags leave to be found out later.
        """

    @abstractmethod
    def strategy(self, argv: Sequence[str]) -> Strategy:
        """How it is trained, on one device: what stays the same in every layout of a job."""

    def usual_layouts(self, argv: Sequence[str]) -> tuple[str, ...] | None:
        """Patterns of layouts for a policy that names none; None: all that suit the model.

        A framework that can't build every layout of a known model says here which it builds.
        """
        del argv
        return None

    @abstractmethod
    def layout_arguments(
        self, argv: Sequence[str], layout: ParallelLayout, allowed: Sequence[ParallelLayout]
    ) -> list[str]:
        """Flags to append so that the framework builds `layout`.

        Args:
            argv: the user's own flags.
            layout: the layout of the coming generation.
            allowed: every layout the policy allows; what must stay equal over all of them (the
                padded vocabulary) is derived from these.
        """

    @abstractmethod
    def device_arguments(self, device: str) -> list[str]:
        """Flags to append so that the framework keeps to what `device` ("cuda", "cpu") can do."""

    @abstractmethod
    def identity(self, argv: Sequence[str]) -> str:
        """A fingerprint of what is trained, equal for all layouts of one job."""
