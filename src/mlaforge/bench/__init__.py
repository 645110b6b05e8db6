"""What is measured, and what is judged: scenarios, kernels, conversions; gates."""
