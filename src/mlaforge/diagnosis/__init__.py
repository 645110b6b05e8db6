"""Diagnosis of a model before conversion: sinks, windows, experts, geometry, spectra, and a suggested plan."""
