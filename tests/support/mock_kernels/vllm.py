"""vLLM 0.32.0: the package, whose modules are vllm_decode.py and vllm_unified.py."""

__version__ = "0.32.0"
