"""Healing: distillation of a converted model from its original."""
