"""What the benchmarks on COCO share: data, evaluation and operations on boxes."""
