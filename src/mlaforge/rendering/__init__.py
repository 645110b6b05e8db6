"""Rendering shared by pages and terminals: self-contained HTML, plots, text tables, templates."""
