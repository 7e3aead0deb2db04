"""gpt-oss-20b in PyTorch, on the parts that are Llama's: benchmarks/llama."""
