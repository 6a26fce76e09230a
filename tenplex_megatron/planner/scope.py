"""What of all that runs is worth a try?  That is taste: something better is known to exist."""

from dataclasses import dataclass

from tenplex_megatron.planner.columns import RECOMPUTES
from tenplex_megatron.planner.strategy import LossFusion, Precision, Recompute

__all__ = ["EVERYTHING", "Scope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of all that runs is worth trying, and what is the same in every strategy."""

    zero_stages: tuple[int, ...] = (0, 1)
    """Replicated or distributed optimizer; 2 and 3 are Megatron-FSDP."""
    recompute: tuple[Recompute, ...] = RECOMPUTES
    some_layers: bool = True
    """Whether full recomputation may be that of some layers of each stage only."""
    uneven_stages: bool = True
    """Also stages of different sizes."""
    max_virtual_stages: int | None = 8
    """Model chunks per stage at most; each more costs messages, for ever less of a bubble."""
    tensor_leaves_node: bool = False
    """Also tensor-parallel groups that span nodes: every layer then waits for the network."""
    tensor_above_query_groups: bool = False
    """Also more tensor parallelism than query groups: keys and values are gathered each step."""
    min_sequence_per_rank: int = 2048
    """Tokens of a sequence that context parallelism leaves to a rank at least."""
    fewer_replicas: bool = False
    """Also strategies that stay legal, and get faster, with more data-parallel replicas."""
    precision: Precision = "bf16"
    is_flash: bool = True
    loss_fusion: LossFusion = "none"
    overlaps_gradients: bool = True
    overlaps_tensor_parallel: bool = False
    """Taken where there is sequence parallelism, without which it does not run."""


EVERYTHING = Scope(
    max_virtual_stages=None,
    tensor_leaves_node=True,
    tensor_above_query_groups=True,
    min_sequence_per_rank=1,
    fewer_replicas=True,
)
"""All that runs, but optimizers that are distributed over a single replica."""
