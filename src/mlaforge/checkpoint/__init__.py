"""Model checkpoints: resolving, reading, streaming layer by layer, writing. Safetensors and GGUF, never pickle."""
