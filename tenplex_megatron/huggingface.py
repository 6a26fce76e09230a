"""What does a script with the Trainer of Transformers add?

from tenplex_megatron.huggingface import TenplexCallback

trainer.add_callback(TenplexCallback(trainer))
"""

from tenplex_megatron.adapters.huggingface.callback import TenplexCallback

__all__ = ["TenplexCallback"]
