"""EAGLE-3 heads: regenerated answers, draft vocabulary, training, import, export, checks."""
