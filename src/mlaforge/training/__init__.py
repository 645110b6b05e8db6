"""Training shared by healing, drafting and sparsity: losses, forward passes, optimiser, loop, distributed training."""
