"""What healing, drafting and sparsity share: losses, forward passes, the optimiser, the loop, many processes."""
