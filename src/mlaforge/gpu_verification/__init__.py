"""`verify-gpu`: measurement of mlaforge on a machine with one NVIDIA GPU, in minutes, against predictions."""
