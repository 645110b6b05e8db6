"""`verify-gpu`: what a machine with one NVIDIA GPU does with mlaforge, measured in minutes against predictions."""
