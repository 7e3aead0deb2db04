"""Extensions of the core; the core never imports them."""
