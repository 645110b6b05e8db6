"""How good a model is: perplexity, a student beside its teacher, criteria, needles, tasks."""
