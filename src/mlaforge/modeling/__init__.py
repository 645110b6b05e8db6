"""The converted model: self-contained files (torch + transformers + each other) copied verbatim into checkpoints."""
