"""Mathematics of the conversion, on tensors: moments, closed-form projections, ranks, refits."""
