"""NCF: recommendation on MovieLens with a neural matrix factorisation."""
