"""Draft heads: regenerated answers, draft vocabulary, training, import, export, checks."""
