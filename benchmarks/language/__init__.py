"""English text for language models: WordPiece tokens, and arrays of samples without padding."""
