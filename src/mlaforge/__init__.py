"""mlaforge: convert grouped-query attention into multi-head latent attention, and prove what it cost.

Importing this package is light on purpose: torch and transformers load with the stage that needs them.
"""

__version__ = "0.1.0"
