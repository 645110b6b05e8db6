"""A model looked at before conversion: sinks, windows, experts, geometry, spectra, and what that comes to."""
