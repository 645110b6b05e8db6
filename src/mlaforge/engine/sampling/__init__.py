"""From logits to tokens: what a request asks for, grammars, draws, log-probabilities."""
