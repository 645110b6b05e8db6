"""Models on disk: found, read, streamed a layer at a time, written. Safetensors and GGUF, never pickle."""
