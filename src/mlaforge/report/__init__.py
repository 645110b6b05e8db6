"""What was measured, shown: the page, its drawings, recommendations, the model card, the hub."""
