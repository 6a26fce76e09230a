"""How does a GPT train on `megatron.training.pretrain` with nothing else around it?

Every flag is Megatron-LM's own. The model, optimizer and schedule follow from the flags; what is
written here is only where batches come from and what the loss is.
"""

from collections.abc import Iterator
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from tenplex_megatron.adapters.megatron.compat import use_built_helpers

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")

type Batch = dict[str, torch.Tensor | None]


def next_batch(samples: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> Batch:
    """The next micro-batch: tensor rank 0 reads it, the others of its group receive it."""
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(FIELDS)
    args = get_args()
    batch: Batch = dict.fromkeys(FIELDS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert samples is not None
        sample = next(samples)
        batch |= {name: sample[name].cuda(non_blocking=True) for name in FIELDS if name in sample}
    received = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    return {name: received[name] for name in FIELDS}


def compute_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The summed token losses, how many tokens they cover, and both together for the log."""
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    samples: Iterator[dict[str, torch.Tensor]] | None, model: GPTModel
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]]:
    """One micro-batch through this rank's part of the model."""
    batch = next_batch(samples, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(compute_loss, batch["loss_mask"])


def build_datasets(
    num_samples: list[int], vp_stage: int | None = None
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """Training, validation and test samples; None on ranks that never read a batch."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_read_here() -> bool:
        first_in_group = mpu.get_tensor_model_parallel_rank() == 0
        return first_in_group and is_first_or_last_pipeline_stage(vp_stage)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, is_read_here, config).build()


def main() -> None:
    """Parse Megatron-LM's flags and train."""
    use_built_helpers()
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    # Without the mark, Megatron builds the datasets on tensor rank 0 only.
    build_datasets.is_distributed = True
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    import tenplex_megatron.auto  # noqa: F401 - makes the job elastic when --elastic-policy is given

    main()
