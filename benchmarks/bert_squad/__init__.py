"""Fine-tuning of BERT to answer questions: SQuAD v1.1."""
