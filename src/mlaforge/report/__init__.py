"""Presentation of measurements: HTML report, plots, recommendations, model card, upload to the hub."""
