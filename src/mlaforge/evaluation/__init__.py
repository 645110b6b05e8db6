"""Evaluation of models: perplexity, comparison of a student with its teacher, criteria, needles, lm-eval tasks."""
