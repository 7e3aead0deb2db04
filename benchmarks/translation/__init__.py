"""What GNMT and the Transformer share: parallel sentences, their preparation, orders of batches, BLEU."""
