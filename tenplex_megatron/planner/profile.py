"""What is trained: the sizes of a transformer that decide its time and memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from tenplex_megatron.errors import ConfigError

__all__ = ["LatentAttention", "ModelProfile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention: queries, keys and values are projected down, then up again."""

    query_rank: int
    key_value_rank: int
    rope_head_size: int
    """Channels of a query or key that carry its position, beyond `head_size`."""
    value_head_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A decoder-only transformer as Megatron's flags describe it; sizes are counts of elements."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_query_groups: int
    """Key and value heads; equal to `num_heads` without grouped-query attention."""
    head_size: int
    """Channels of one head, `--kv-channels`."""
    ffn_size: int
    seq_length: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    pads_vocab: bool = True
    """Whether Megatron adds rows until every tensor-parallel size divides them."""
    is_gated: bool = False
    """SwiGLU and its like: the first matrix of the MLP is twice as wide."""
    has_bias: bool = True
    has_learned_positions: bool = True
    is_tied: bool = True
    """Whether input and output embedding are one tensor."""
    has_rms_norm: bool = False
    dropout: bool = True
    """Whether any dropout is above 0, so that its masks are kept."""
    num_experts: int = 0
    """Experts of every layer but the first `num_dense_layers`; 0 for a dense model."""
    experts_per_token: int = 1
    expert_ffn_size: int = 0
    shared_expert_ffn_size: int = 0
    num_dense_layers: int = 0
    """Leading layers without experts in a model that has some."""
    latent: LatentAttention | None = None
    """None: queries, keys and values are projected directly."""

    def __post_init__(self) -> None:
        broken = list(self._broken_rules())
        if broken:
            raise ConfigError("model: " + "; ".join(broken))

    def _broken_rules(self) -> Iterator[str]:
        """Why Megatron could build no such model, whatever the layout; one sentence each.

        megatron/training/arguments.py, `validate_args`; the rule of query groups is
        `TransformerConfig.__post_init__`'s, that of the router's choice its `topk`'s.
        """
        sizes = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden_size,
            "--num-attention-heads": self.num_heads,
            "--num-query-groups": self.num_query_groups,
            "--kv-channels": self.head_size,
            "--seq-length": self.seq_length,
            "--vocab-size": self.vocab_size,
        }
        if self.num_experts:
            sizes["--num-experts"] = self.num_experts
            sizes["--moe-ffn-hidden-size"] = self.expert_ffn_size
        if not self.num_experts or self.num_dense_layers:
            sizes["--ffn-hidden-size"] = self.ffn_size
        for flag, size in sizes.items():
            if size < 1:
                yield f"{flag} must be at least 1, got {size}"
        if self.num_query_groups > 0 and self.num_heads % self.num_query_groups:
            yield (
                f"{self.num_heads} attention heads do not divide into {self.num_query_groups} "
                "query groups"
            )
        if self.num_experts > 0 and not 1 <= self.experts_per_token <= self.num_experts:
            yield (
                f"--moe-router-topk must be from 1 to {self.num_experts}, the number of experts, "
                f"got {self.experts_per_token}"
            )
        if not 0 <= self.num_dense_layers <= self.num_layers:
            yield f"{self.num_dense_layers} leading layers of {self.num_layers} have no experts"
