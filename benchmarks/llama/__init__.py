"""Code shared by Llama 3.1 8B, gpt-oss-20b and Llama 2 70B LoRA."""
