"""LoRA fine-tuning of Llama 2 70B."""
