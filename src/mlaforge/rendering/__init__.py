"""What pages and terminals share: HTML that needs no other file, drawings, text tables, templates."""
