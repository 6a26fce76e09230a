"""One way to train a model: a layout, and the choices Megatron offers within it."""

from dataclasses import dataclass
from typing import Literal

from tenplex_megatron.core.mesh import ParallelLayout

__all__ = ["LossFusion", "Precision", "Recompute", "Strategy"]

type Recompute = Literal["none", "selective", "full"]
type Precision = Literal["fp32", "fp16", "bf16", "fp8"]
type LossFusion = Literal["none", "native", "te"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Everything that can be chosen for a job, expressible as flags."""

    layout: ParallelLayout
    """Its `micro_batch_size` is set."""
    global_batch_size: int
    sequence_parallel: bool = False
    zero_stage: int = 0
    """0: replicated optimizer; 1: distributed optimizer; 2 and 3 shard gradients and weights."""
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    """Layers per pipeline stage (virtual stage with VPP) that recompute fully; None for all."""
    precision: Precision = "bf16"
    is_flash: bool = True
    """Whether attention is fused and keeps no score matrix."""
    loss_fusion: LossFusion = "none"
    """`--cross-entropy-loss-fusion` with this `--cross-entropy-fusion-impl`."""
    overlaps_gradients: bool = True
    """Whether gradient reduction and parameter gathering hide behind computation."""
    overlaps_tensor_parallel: bool = False
    """Whether `--tp-comm-overlap` splits products so that their collectives hide behind them."""

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch."""
        assert self.layout.micro_batch_size is not None
        return self.layout.micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step and replica."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)
