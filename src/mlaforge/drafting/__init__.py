"""EAGLE-3 heads: the target's own answers, the vocabulary a head proposes, training, import, checks."""
