"""What it is trained on: devices, their memory, and the links between them."""

from dataclasses import dataclass, fields

from tenplex_megatron.errors import ConfigError

__all__ = ["ClusterProfile"]

_MAY_BE_ZERO = (
    "node_latency_s",
    "network_latency_s",
    "gemm_wave",
    "score_bytes",
    "overlap",
    "launch_forward_s",
    "launch_backward_s",
    "launch_send_s",
    "launch_spread",
    "fixed_s",
    "context_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """One kind of device in nodes of one size; every rate is per device and one direction.

    Peak rates are the vendor's; efficiencies are the fraction of them that is reached. The defaults
    of what is not the vendor's are those of A100 with Megatron on x86 hosts.
    """

    name: str
    devices_per_node: int
    memory_bytes: float
    peak_flops: float
    """Floating-point operations a second in the training type, without sparsity."""
    memory_bandwidth: float
    """Bytes a second of the device's memory."""
    node_bandwidth: float
    """Bytes a second between devices of one node (NVLink)."""
    network_bandwidth: float
    """Bytes a second of one device's share of the network between nodes."""
    node_latency_s: float = 5e-6
    network_latency_s: float = 15e-6
    fp8_speedup: float = 1.4
    """Rate of a matrix product in FP8 over the training type: twice, less casting and scaling."""
    gemm_efficiency: float = 0.78
    """Rate of large matrix products over the peak, at the clock that long training holds."""
    gemm_wave: float = 3.54e6
    """Elements of a product's result that all multiprocessors compute at once: their number x
    128 x 256 on NVIDIA's GPUs since A100."""
    attention_efficiency: float = 0.7
    """Rate of attention's batched products over that of large ones, without fused attention."""
    score_bytes: float = 13.0
    """Bytes moved forward per 2-byte score without fused attention. With fused masking and softmax:
    the product writes it, softmax reads and writes it, dropout reads it and writes it and a mask,
    the second product reads it. Several times that where masking and scaling are kernels of their
    own or work in fp32."""
    flash_efficiency: float = 0.8
    """Rate of fused attention over that of large products, forward."""
    memory_efficiency: float = 0.85
    node_efficiency: float = 0.7
    network_efficiency: float = 0.85
    overlap: float = 0.7
    """The part of the last backward pass behind which data-parallel communication can hide."""
    optimizer_bytes_per_parameter: float = 30.0
    """Bytes one step of Adam moves: fp32 weight and moments read and written, gradient read, copy
    in the training type written."""
    launch_forward_s: float = 0.7e-3
    """Least seconds one layer's forward pass keeps the host busy."""
    launch_backward_s: float = 1.6e-3
    """Least seconds one layer's backward pass keeps the host busy."""
    launch_send_s: float = 0.0
    """Seconds of host time for one message to a neighbouring pipeline stage."""
    launch_spread: float = 0.05
    """By how much of itself the host time of a layer grows per doubling of the tensor-parallel
    size: the slowest of the hosts' processes sets the pace."""
    fixed_s: float = 0.01
    """Seconds an iteration takes besides everything else."""
    scatters_sends: bool = False
    """Whether tensor-parallel ranks split what goes to the next stage without sequence parallelism
    too: Megatron-LM before core 0.3 (scatter-gather) and DeepSpeed's pipeline engine do."""
    context_bytes: float = 0.0
    """Device memory that neither model nor activations use: context, libraries, allocator."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str | bool):
                continue
            if not (value > 0 or (value == 0 and field.name in _MAY_BE_ZERO)):
                least = "at least 0" if field.name in _MAY_BE_ZERO else "above 0"
                raise ConfigError(f"{field.name}: expected a number {least}, got {value!r}")
