"""gpt-oss-20b's pretraining, on Llama 3.1 8B's data: see README.md."""
