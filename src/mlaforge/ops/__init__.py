"""Operations on tensors that have more than one implementation: a reference beside each, a dispatcher that chooses."""
