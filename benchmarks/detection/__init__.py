"""Code shared by the COCO benchmarks: data, evaluation and box operations."""
