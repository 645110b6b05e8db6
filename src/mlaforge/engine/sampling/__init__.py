"""From logits to tokens: sampling parameters, constrained decoding, the sampler, log probabilities."""
