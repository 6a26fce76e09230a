"""The adapter for the Trainer of Hugging Face Transformers, which trains with DeepSpeed."""
